# SPDX-License-Identifier: Apache-2.0
"""What one attention layer is: heads, dims, dtypes, variant. Static, hashable, free of any layout or length."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnrt.errors import ArgumentError, DtypeError

if TYPE_CHECKING:
    from attnrt.variants import Composed

KV_LAYOUTS = ("NHD", "HND")
#: What attention computes on; a backend says itself which of them it takes where.
FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
DETERMINISM = ("batch", "token", "run")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The static description of one attention layer.

    Parameters
    ----------
    num_qo_heads, num_kv_heads : int
        Heads of q and of the KV cache; the first is a multiple of the second (grouped-query attention).
    head_dim : int
        Numbers per head of q and k, unpadded.
    head_dim_vo : int, optional
        Numbers per head of v and out; None: ``head_dim``.
    q_dtype, kv_dtype, out_dtype : dtype name or object
        bfloat16; None for the last two: the same as q, but for results of 8-bit q, which are bfloat16. CUDA kernels take q in 8
        bits with K and V in 8 bits; which of these they multiply so, and which in float16, docs/limits.md says.
    variant : variant or tuple of variants
        Applied in order; None: ``full()``.
    sm_scale : float, optional
        Factor on q.k; None: ``1 / sqrt(head_dim)``. With ``shared_kv`` it must be given.
    kv_layout : {"NHD", "HND"}
        Order of the axes of a paged cache, (page, token, head, dim) or (page, head, token, dim).
    shared_kv : bool
        V is the first ``head_dim_vo`` numbers of K's row (multi-head latent attention).
    two_level : bool
        Where tensor cores multiply 8-bit numbers (q, K and V in float8_e4m3fn), which they sum in 13 bits: their sums are kept
        in float32 every 512 keys (two-level accumulation). False: a tenth faster, and as exact as a sum of so few bits;
        products of values of one sign lose 6 % in 4096 keys, 24 % in 16384 (docs/performance/prefill.md).
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_vo: int = None  # type: ignore[assignment]  # filled in by __post_init__
    q_dtype: Any = "bfloat16"
    kv_dtype: Any = None
    out_dtype: Any = None
    variant: Any = None
    sm_scale: float = None  # type: ignore[assignment]  # filled in by __post_init__
    kv_layout: str = "NHD"
    shared_kv: bool = False
    two_level: bool = True

    def __post_init__(self) -> None:
        from attnrt.checks import flag
        from attnrt.dtypes import as_dtype
        from attnrt.variants import Composed, compose

        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        for name in ("num_qo_heads", "num_kv_heads", "head_dim"):
            put(name, _positive(name, getattr(self, name)))
        put(
            "head_dim_vo",
            _positive("head_dim_vo", self.head_dim if self.head_dim_vo is None else self.head_dim_vo),
        )
        if self.num_qo_heads % self.num_kv_heads:
            raise ArgumentError(
                "num_qo_heads",
                "must be a multiple of num_kv_heads",
                f"{self.num_qo_heads} and {self.num_kv_heads}",
                "Every KV head serves the same number of query heads.",
            )
        put("shared_kv", flag(self.shared_kv, "shared_kv"))
        put("two_level", flag(self.two_level, "two_level"))
        put("q_dtype", as_dtype(self.q_dtype, "q_dtype").name)
        put("kv_dtype", self.q_dtype if self.kv_dtype is None else as_dtype(self.kv_dtype, "kv_dtype").name)
        found = as_dtype(self.q_dtype if self.out_dtype is None else self.out_dtype, "out_dtype")
        put("out_dtype", "bfloat16" if self.out_dtype is None and found.itemsize == 1 else found.name)
        _check_dtypes(self)
        if not isinstance(self.variant, Composed):  # dataclasses.replace hands the composed one over
            put("variant", compose(self.variant))
        _check_pairs(self.variant, self.head_dim, self.head_dim_vo)
        if self.kv_layout not in KV_LAYOUTS:
            raise ArgumentError("kv_layout", "must be 'NHD' or 'HND'", repr(self.kv_layout))
        if self.shared_kv and self.head_dim_vo > self.head_dim:
            raise ArgumentError("head_dim_vo", "must not exceed head_dim with shared_kv", self.head_dim_vo)
        if self.sm_scale is None:
            if self.shared_kv:
                raise ArgumentError(
                    "sm_scale",
                    "must be given with shared_kv",
                    None,
                    "The absorbed head_dim is not the model's own.",
                )
            put("sm_scale", 1.0 / math.sqrt(self.head_dim))
        else:
            put("sm_scale", _finite("sm_scale", self.sm_scale))

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def composed(self) -> Composed:
        """The variants as one composed value."""
        return self.variant


def _check_dtypes(spec: AttentionSpec) -> None:
    for name in ("q_dtype", "kv_dtype", "out_dtype"):
        found = getattr(spec, name)
        if found not in FLOATS:
            raise DtypeError(name, f"must be one of {', '.join(FLOATS)}", found)


def _check_pairs(variant: Composed, head_dim: int, head_dim_vo: int) -> None:
    """A hook that maps more numbers than a head has would read its neighbour's."""
    for hook, pairs, dim in (
        ("query", variant.query, head_dim),
        ("key", variant.key_map, head_dim),
        ("value", variant.value, head_dim_vo),
    ):
        if pairs is not None and pairs.dim is not None and pairs.dim > dim:
            raise ArgumentError(
                "variant", f"must map at most the {dim} numbers of a head in its {hook} hook", pairs.dim
            )


def _positive(name: str, value: object) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or int(value) < 1:
        raise ArgumentError(name, "must be an integer of at least 1", repr(value))
    if int(value) >= 2**31:
        raise ArgumentError(name, "must fit in int32", f"a number of {int(value).bit_length()} bits")
    return int(value)


def _finite(name: str, value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ArgumentError(name, "must be a number", repr(value)) from None
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ArgumentError(name, "must be finite", number)
    return number
