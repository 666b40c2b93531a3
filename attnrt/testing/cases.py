# SPDX-License-Identifier: Apache-2.0
"""Cases: what a batch of requests means, apart from where its keys lie, and ways to lay it out in memory.

A ``Case`` has q, k, v of each request. ``lay_out`` puts it into a cache: some builder, page size, placement of pages, memory
order, and poison wherever nothing lives. All layouts of one case have the same right answer, most of them to the bit.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from attnrt.dtypes import as_dtype
from attnrt.errors import ArgumentError

if TYPE_CHECKING:
    from attnrt.formats.base import Index
    from attnrt.spec import AttentionSpec

__all__ = ["Batch", "Case", "Layout", "lay_out", "load_case", "make_case", "poison_of", "save_case", "take"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """Requests with their numbers.

    Attributes
    ----------
    spec : AttentionSpec
    q : tuple of [qo_len, num_qo_heads, head_dim]
    k, v : tuples of [kv_len, num_kv_heads, head_dim or head_dim_vo]
        One array per request, in the spec's dtypes; v is empty with shared_kv.
    params : dict
        Arguments of run; numbers or host arrays.
    """

    spec: AttentionSpec
    q: tuple[np.ndarray, ...]
    k: tuple[np.ndarray, ...]
    v: tuple[np.ndarray, ...]
    params: dict[str, Any] = field(default_factory=dict)

    @property
    def qo_lens(self) -> np.ndarray:
        return np.array([len(x) for x in self.q], np.int32)

    @property
    def kv_lens(self) -> np.ndarray:
        return np.array([len(x) for x in self.k], np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where keys lie.

    Attributes
    ----------
    builder : "paged", "block_table" or "ragged"
    page_size : int
    seed : int
        Of the placement of pages.
    spare : int
        Pages (ragged: tokens) that nobody owns.
    fill : float
        What dead memory holds.
    form : "plain", "interleaved", "strided", "transposed", "pool"
        Memory order of the cache; kv_layout stays the spec's.
    """

    builder: str = "paged"
    page_size: int = 16
    seed: int = 0
    spare: int = 3
    fill: float = float("nan")
    form: str = "plain"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """A case in memory: what plan and run take."""

    index: Index
    q: np.ndarray
    kv: Any
    params: dict[str, Any]


def make_case(
    spec: AttentionSpec, qo_lens: Any, kv_lens: Any, *, seed: int = 0, scale: float = 1.0, **params: Any
) -> Case:
    """Normal random numbers in the spec's dtypes, drawn request by request."""
    qo_lens, kv_lens = list(qo_lens), list(kv_lens)
    if len(qo_lens) != len(kv_lens):
        raise ArgumentError("kv_lens", f"must have qo_lens's {len(qo_lens)} entries", len(kv_lens))
    rng = np.random.default_rng(seed)

    def draw(count: int, heads: int, dim: int, dtype: str) -> np.ndarray:
        return (rng.standard_normal((count, heads, dim)) * scale).astype(as_dtype(dtype).numpy)

    q, k, v = [], [], []
    for qo_len, kv_len in zip(qo_lens, kv_lens, strict=True):
        q.append(draw(int(qo_len), spec.num_qo_heads, spec.head_dim, spec.q_dtype))
        k.append(draw(int(kv_len), spec.num_kv_heads, spec.head_dim, spec.kv_dtype))
        if not spec.shared_kv:
            v.append(draw(int(kv_len), spec.num_kv_heads, spec.head_dim_vo, spec.kv_dtype))
    return Case(spec=spec, q=tuple(q), k=tuple(k), v=tuple(v), params=params)


def take(case: Case, order: Any) -> Case:
    """The requests of ``order`` as a case of their own; parameters stay."""
    pick = [int(i) for i in order]
    v = tuple(case.v[i] for i in pick) if case.v else ()
    return replace(case, q=tuple(case.q[i] for i in pick), k=tuple(case.k[i] for i in pick), v=v)


def poison_of(dtype: str, value: float) -> np.ndarray:
    """``value`` in a dtype, the largest finite number where it does not fit."""
    kind = as_dtype(dtype).numpy
    with np.errstate(over="ignore"):
        found = np.asarray(value).astype(kind)
    if np.isnan(value) or np.isfinite(found.astype(np.float64)):
        return found
    top = {"float16": 65504.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}[as_dtype(dtype).name]
    return np.asarray(np.copysign(top, value)).astype(kind)


def lay_out(case: Case, layout: Layout | None = None, **changes: Any) -> Batch:
    """Put a case into memory; ``changes`` are fields of Layout."""
    layout = replace(layout or Layout(), **changes)
    spec = case.spec
    shape = (0, spec.num_qo_heads, spec.head_dim)
    q = np.concatenate([np.empty(shape, as_dtype(spec.q_dtype).numpy), *case.q])
    qo_indptr = np.concatenate([[0], np.cumsum(case.qo_lens)]).astype(np.int32)
    if layout.builder == "ragged":
        index, kv = _ragged(case, layout, qo_indptr)
    else:
        index, kv = _paged(case, layout, qo_indptr)
    return Batch(index=index, q=q, kv=kv[0] if spec.shared_kv else kv, params=dict(case.params))


def _sides(case: Case) -> list[tuple[tuple[np.ndarray, ...], int]]:
    """(rows, dim) of K and, unless it is K's own, of V."""
    sides = [(case.k, case.spec.head_dim), (case.v, case.spec.head_dim_vo)]
    return sides[:1] if case.spec.shared_kv else sides


def _ragged(case: Case, layout: Layout, qo_indptr: np.ndarray) -> tuple[Any, tuple[np.ndarray, ...]]:
    from attnrt.formats import ragged

    spec = case.spec
    total = int(case.kv_lens.sum())
    caches = []
    for rows, dim in _sides(case):
        cache = _memory((total + layout.spare, spec.num_kv_heads, dim), spec.kv_dtype, layout)
        cache[:total] = np.concatenate([cache[:0], *rows])
        caches.append(cache)
    return ragged(qo_indptr, np.concatenate([[0], np.cumsum(case.kv_lens)]).astype(np.int32)), tuple(caches)


def _paged(case: Case, layout: Layout, qo_indptr: np.ndarray) -> tuple[Any, tuple[np.ndarray, ...]]:
    from attnrt.formats import block_table, paged

    spec, size = case.spec, layout.page_size
    pages = -(-case.kv_lens // size)
    indptr = np.concatenate([[0], np.cumsum(pages)]).astype(np.int32)
    total = int(indptr[-1]) + layout.spare
    ids = np.random.default_rng(layout.seed).permutation(total)[: indptr[-1]].astype(np.int32)
    caches = []
    for rows, dim in _sides(case):
        cache = _cache(spec, total, size, dim, layout)
        tokens = (
            cache if cache.ndim == 3 else cache.transpose(0, 2, 1, 3) if spec.kv_layout == "HND" else cache
        )
        for r, one in enumerate(rows):
            for i, token in enumerate(one):
                page = int(ids[indptr[r] + i // size])
                if cache.ndim == 3:
                    tokens[page * size + i % size] = token
                else:
                    tokens[page, i % size] = token
        caches.append(cache)
    if layout.builder == "block_table":
        table = np.full((len(pages), int(pages.max(initial=0)) + 1), -1, np.int32)
        for r in range(len(pages)):
            table[r, : pages[r]] = ids[indptr[r] : indptr[r + 1]]
        index: Any = block_table(qo_indptr, table, case.kv_lens, size)
    else:
        index = paged(qo_indptr, indptr, ids, case.kv_lens, size)
    return index, tuple(caches)


def _memory(shape: tuple[int, ...], dtype: str, layout: Layout) -> np.ndarray:
    """Poisoned memory in the order the layout asks for; the last axis stays dense."""
    kind = as_dtype(dtype).numpy
    fill = poison_of(dtype, layout.fill)
    if layout.form == "strided":  # every second row of a wider array
        wide = np.full((2 * shape[0], *shape[1:-1], shape[-1] + 8), fill, kind)
        return wide[::2, ..., : shape[-1]]
    if layout.form == "transposed":  # the first two axes the other way round in memory
        return np.full((shape[1], shape[0], *shape[2:]), fill, kind).swapaxes(0, 1)
    return np.full(shape, fill, kind)


def _cache(spec: AttentionSpec, pages: int, size: int, dim: int, layout: Layout) -> np.ndarray:
    if layout.form == "pool":
        return _memory((pages * size, spec.num_kv_heads, dim), spec.kv_dtype, layout)
    inner = (spec.num_kv_heads, size) if spec.kv_layout == "HND" else (size, spec.num_kv_heads)
    if layout.form == "interleaved":
        return _memory((pages, 2, *inner, dim), spec.kv_dtype, layout)[:, 1]
    return _memory((pages, *inner, dim), spec.kv_dtype, layout)


# ------------------------------------------------------------------------------------------------- files

_SPEC_FIELDS = (
    *("num_qo_heads", "num_kv_heads", "head_dim", "head_dim_vo", "q_dtype", "kv_dtype", "out_dtype"),
    *("sm_scale", "kv_layout", "shared_kv", "two_level"),
)


def save_case(path: str, case: Case) -> None:
    """Write a case as .npz: numbers as their bits, the variant by name only (``load_case`` must be given it)."""
    spec = {name: getattr(case.spec, name) for name in _SPEC_FIELDS}
    about = {"spec": spec, "variant": list(case.spec.composed.names), "requests": len(case.q)}
    arrays: dict[str, np.ndarray] = {"about": np.frombuffer(json.dumps(about).encode(), np.uint8)}
    for name in ("q", "k", "v"):
        for i, one in enumerate(getattr(case, name)):
            arrays[f"{name}{i}"] = np.ascontiguousarray(one).view(f"u{one.dtype.itemsize}")
    for name, value in case.params.items():
        arrays[f"param_{name}"] = np.asarray(value)
    np.savez(path, **arrays)  # type: ignore[arg-type]


def load_case(path: str, variant: Any = None) -> Case:
    """Read a case back; ``variant`` is the one it was saved with."""
    from attnrt.spec import AttentionSpec

    with np.load(path) as file:
        about = json.loads(bytes(file["about"]))
        spec = AttentionSpec(**about["spec"], variant=variant)
        assert list(spec.composed.names) == about["variant"], f"the case was saved with {about['variant']}"
        dtypes = {"q": spec.q_dtype, "k": spec.kv_dtype, "v": spec.kv_dtype}
        rows = {
            name: tuple(
                file[f"{name}{i}"].view(as_dtype(dtype).numpy)
                for i in range(about["requests"])
                if f"{name}{i}" in file
            )
            for name, dtype in dtypes.items()
        }
        params = {key[6:]: file[key] for key in file.files if key.startswith("param_")}
    return Case(spec=spec, **rows, params={k: v.item() if v.ndim == 0 else v for k, v in params.items()})
