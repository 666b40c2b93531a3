# SPDX-License-Identifier: Apache-2.0
"""The source of a spec's kernels: our headers flattened into one text, the printed variant, the constants, the entry points.

Flattened, because NVRTC then needs no include path and the text alone is the content that a cache key has to cover. A text may
hold any of a spec's kernels; each is a program of its own (programs.py), so that nobody waits for one that no plan asks for.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnrt.backends.cuda import structs
from attnrt.backends.cuda.boxes import MAPS_BYTES
from attnrt.backends.cuda.tables import WIDE_CTAS, TileConfig, hopper_config, narrow, takes_wide, tile_config
from attnrt.variants import include_dir
from attnrt.variants.expr import FLOAT, INT, const, make
from attnrt.variants.rotary import turns_by_position
from attnrt.variants.score_shapes import needs_keys

if TYPE_CHECKING:
    from attnrt.spec import AttentionSpec
    from attnrt.variants import Composed

__all__ = [
    "ATTEND",
    "DECODE",
    "DECODE_SMEM",
    "DECODE_THREADS",
    "DECODE_TOP",
    "HOPPER",
    "HOPPER_BOXES",
    "HOPPER_BOXES_FOLD",
    "HOPPER_GATHER",
    "HOPPER_GATHER_FOLD",
    "HOPPER_SMEM",
    "MERGE",
    "SMEM",
    "SMEM_BYTES",
    "THREADS",
    "WIDE",
    "WIDE_SMEM",
    "entry_names",
    "flatten",
    "maps_offset",
    "render",
    "render_roles",
    "threads_of",
    "variant_text",
    "waits",
]

ATTEND, MERGE, SMEM = "attnrt_attend", "attnrt_merge", "attnrt_smem_bytes"
DECODE, DECODE_SMEM = "attnrt_decode", "attnrt_decode_smem_bytes"
HOPPER_BOXES, HOPPER_GATHER, HOPPER_SMEM = (
    "attnrt_hopper_boxes",
    "attnrt_hopper_gather",
    "attnrt_hopper_smem_bytes",
)
WIDE, WIDE_SMEM = "attnrt_wide", "attnrt_wide_smem_bytes"
HOPPER_BOXES_FOLD, HOPPER_GATHER_FOLD = HOPPER_BOXES + "_fold", HOPPER_GATHER + "_fold"
#: The Hopper kernel in its forms: K and V in boxes (boxes.py), or key by key; for items of one leaf, or of several to be folded.
HOPPER = (HOPPER_BOXES, HOPPER_GATHER, HOPPER_BOXES_FOLD, HOPPER_GATHER_FOLD)
_HOPPER_BYTES = "attnrt::hopper_smem_bytes<attnrt::Config, attnrt::Variant>()"
#: Dynamic shared memory of the kernels that have some, as a constant expression of their text.
SMEM_BYTES = {
    ATTEND: "attnrt::Layout<attnrt::Config, attnrt::Variant>::kOffsetMeta"
    " + sizeof(attnrt::Meta<attnrt::Layout<attnrt::Config, attnrt::Variant>>)",
    DECODE: "attnrt::DecodeMemory<attnrt::Config, attnrt::Variant>::kGroupBytes",  # of each group of a CTA
    WIDE: "attnrt::wide_smem_bytes<attnrt::Config, attnrt::Variant>()",
    **dict.fromkeys(HOPPER, _HOPPER_BYTES),
}
#: And for all its groups together (DecodeMemory).
DECODE_TOP = 512
THREADS = 128
#: A group of the decode kernel has a warp more, which loads.
DECODE_THREADS = THREADS + 32
#: CTAs of the merge kernel per multiprocessor: fixed, for a captured graph; four warps each take (row, head) pairs in turn.
MERGE_CTAS = 4
#: sizeof(ParamRef).
PARAM_BYTES = 64

#: Fields of TileConfig that the Hopper kernel reads; it has more of its own.
_HOPPER_CONSTANTS = (
    "q_type",
    "q_stored_type",
    "kv_type",
    "out_type",
    "group",
    "head_dim",
    "head_dim_vo",
    "shared_kv",
)
#: Fields of TileConfig that the wide kernel reads.
_WIDE_CONSTANTS = (*_HOPPER_CONSTANTS, "kv_tile")
#: Two warpgroups: one computes, one loads.
WIDE_THREADS = 256
#: Fields of TileConfig that the others read.
_CONSTANTS = (
    *("q_type", "q_stored_type", "kv_type", "out_type", "group", "head_dim", "head_dim_vo"),
    *("m_blocks", "kv_tile", "stages", "q_blocks", "shared_kv"),
)

_ROOT = Path(__file__).resolve().parent
_INCLUDE = re.compile(r'^\s*#include "([^"]+)"\s*$', re.M)


def _find(name: str) -> Path:
    for folder in (_ROOT / "kernels", _ROOT, Path(include_dir())):
        if (folder / name).exists():
            return folder / name
    raise FileNotFoundError(name)


@lru_cache(maxsize=16)
def flatten(*names: str) -> str:
    """The named headers with everything they include, each once, in order of first use."""
    seen: set[str] = set()

    def expand(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        text = _find(name).read_text().replace("#pragma once\n", "")
        return _INCLUDE.sub(lambda match: expand(match.group(1)), text)

    return "\n".join(expand(name) for name in names)


def config_text(config: TileConfig, only: tuple[str, ...] = _CONSTANTS, **more: int) -> str:
    """The constants (or only the named ones, and more) as the struct that the kernels take."""
    lines = []
    for name, value in {**{name: getattr(config, name) for name in only}, **more}.items():
        if name.endswith("_type"):
            lines.append(f"  static constexpr Dtype {name} = Dtype::{value};")
        elif isinstance(value, bool):
            lines.append(f"  static constexpr bool {name} = {'true' if value else 'false'};")
        else:
            lines.append(f"  static constexpr int {name} = {value};")
    return "struct Config {\n" + "\n".join(lines) + "\n};\n"


def variant_text(composed: Composed) -> str:
    """The printed variant without its include (the header is in the text already)."""
    return _INCLUDE.sub("", composed.cpp_source("Variant"))


#: How kernels begin: those of a run that overlap, and others.
_WAITS = ("attnrt::begin_run(launch.run);", "attnrt::wait_for_predecessors();")


def waits(source: str, names: tuple[str, ...]) -> bool:
    """Whether all kernels of a text begin with the wait that a dependent launch asks for."""
    return sum(map(source.count, _WAITS)) == len(names)


def _attend_text(config: TileConfig) -> str:
    return f"""
extern "C" __device__ const int {SMEM} = {SMEM_BYTES[ATTEND]};

extern "C" __global__ void __launch_bounds__({THREADS}, {config.ctas_per_sm})
{ATTEND}(const __grid_constant__ attnrt::Launch launch) {{
  extern __shared__ __align__(128) char smem[];
  attnrt::prefetch_plan(launch.run);
  attnrt::begin_run(launch.run);
  attnrt::Attend<attnrt::Config, attnrt::Variant>(launch.run, launch.params, smem).run();
  attnrt::end_run(launch.run);
}}
"""


def _decode_text(config: TileConfig) -> str:
    return f"""
namespace attnrt {{
typedef DecodeLayout<Config, Variant> DecodeShape;
}}
extern "C" __device__ const int {DECODE_SMEM} = {SMEM_BYTES[DECODE]};

extern "C" __global__ void __launch_bounds__({DECODE_THREADS * config.groups}, 1)
{DECODE}(const __grid_constant__ attnrt::Launch launch) {{
  extern __shared__ __align__(1024) char ring[];
  ATTNRT_MARK(0);
  if constexpr (attnrt::roles::kBegins)
    attnrt::prefetch_plan(launch.run);
  attnrt::DecodeGroups<attnrt::Config, attnrt::Variant> decode(launch.run, launch.params, ring);
  if constexpr (attnrt::roles::kBegins) {{
    decode.prepare();
    attnrt::begin_run(launch.run);
    ATTNRT_MARK(1);
  }}
  decode.run();
  attnrt::end_run(launch.run);
}}
"""


def _merge_text(config: TileConfig) -> str:
    return f"""
extern "C" __global__ void __launch_bounds__({THREADS}, {MERGE_CTAS})
{MERGE}(const __grid_constant__ attnrt::Launch launch) {{
  attnrt::prefetch_plan(launch.run);
  ATTNRT_MARK(24);
  attnrt::wait_if_first(launch.run);
  typedef attnrt::Merge<attnrt::Config, attnrt::Variant> Rows;
  __shared__ __align__(128) char ring[Rows::kRingBytes];
  Rows(launch.run, *launch.run.plan, launch.params).run(ring, [] {{
    attnrt::wait_for_predecessors();
    ATTNRT_MARK(25);
  }});
}}
"""


def _hopper_text(name: str) -> str:
    # Forms may be launched one after the other: the plan at hand and the maps say which of them it is that runs.
    boxes = name in (HOPPER_BOXES, HOPPER_BOXES_FOLD)
    mine = f"attnrt::reads_boxes(launch.run, launch.maps) == {'true' if boxes else 'false'}"
    if boxes:
        mine += f" && launch.run.plan->folds == {int(name == HOPPER_BOXES_FOLD)}"
    return f"""
static_assert(sizeof(attnrt::KvMaps) == {MAPS_BYTES});
extern "C" __device__ const int {HOPPER_SMEM} = {_HOPPER_BYTES};

extern "C" __global__ void __launch_bounds__(attnrt::HopperLayout<attnrt::Config, attnrt::Variant>::kThreads, 1)
{name}(const __grid_constant__ attnrt::Launch launch) {{
  extern __shared__ __align__(1024) char smem[];
  if constexpr (attnrt::roles::kBegins) {{
    attnrt::prefetch_plan(launch.run);
    attnrt::begin_run(launch.run);
  }}
  if (!attnrt::roles::kBegins || ({mine})) {{
    typedef attnrt::HopperLoader<attnrt::Config, attnrt::Variant, attnrt::Loading::{"boxes" if boxes else "gather"}> Loader;
    attnrt::hopper_attend<attnrt::Config, attnrt::Variant, Loader>(launch.run, launch.params, launch.maps, smem);
  }}
  attnrt::end_run(launch.run);
}}
"""


def _wide_text(config: TileConfig) -> str:
    return f"""
extern "C" __device__ const int {WIDE_SMEM} = {SMEM_BYTES[WIDE]};

extern "C" __global__ void __launch_bounds__({WIDE_THREADS}, {WIDE_CTAS})
{WIDE}(const __grid_constant__ attnrt::Launch launch) {{
  extern __shared__ __align__(1024) char smem[];
  attnrt::prefetch_plan(launch.run);
  attnrt::wide_prepare<attnrt::Config, attnrt::Variant>(launch.maps, smem);
  attnrt::begin_run(launch.run);
  attnrt::wide_attend<attnrt::Config, attnrt::Variant>(launch.run, launch.params, launch.maps, smem);
  attnrt::end_run(launch.run);
}}
"""


_HOPPER_HEADERS = ("hopper_attend.cuh", "hopper_loader.cuh")
#: Each kernel's headers and what prints its entry point.
_KERNELS: dict[str, tuple[tuple[str, ...], Callable[[TileConfig], str]]] = {
    ATTEND: (("attend.cuh",), _attend_text),
    DECODE: (("decode.cuh",), _decode_text),
    WIDE: (("wide.cuh",), _wide_text),
    **{name: (_HOPPER_HEADERS, lambda config, name=name: _hopper_text(name)) for name in HOPPER},  # type: ignore[misc]
    MERGE: (("merge.cuh",), _merge_text),
}
#: Constants that the merge kernel reads: a text with fewer is the same for more specs, and is compiled once for them all.
_MERGE_CONSTANTS = ("out_type", "group", "head_dim_vo")


def entry_names(spec: AttentionSpec, hopper: bool = False) -> tuple[str, ...]:
    """Kernels that a spec has; ``hopper``: on a device with the instructions of sm_90a."""
    decode = (DECODE,) if tile_config(spec).q_blocks else ()
    wide = (WIDE,) if hopper and takes_wide(spec) else ()
    return (ATTEND, *decode, *wide, *(HOPPER if hopper and hopper_config(spec) else ()), MERGE)


def threads_of(spec: AttentionSpec, name: str) -> int:
    """Threads of a CTA of a kernel; of the decode kernel, of one of its groups."""
    if name == DECODE:
        return DECODE_THREADS
    if name == WIDE:
        return WIDE_THREADS
    config = hopper_config(spec) if name in HOPPER else None
    return THREADS if config is None else config.threads


def maps_offset(num_params: int) -> int:
    """Where the tensor maps lie in the Hopper kernel's Launch: behind what the others read, on a multiple of 64 bytes."""
    return -(-(structs.LAUNCH_RUN.itemsize + PARAM_BYTES * max(1, num_params)) // 64) * 64


def _told(composed: Composed, name: str) -> Composed:
    """What those that bring keys read of a variant: of hooks on scores whether there are any and (in the Hopper kernel) whether
    they ask for tables of keys, of masks that are no interval only that there is one. The text is the same for all variants that
    differ in the rest alone."""
    logits = None if composed.logits is None else make("input", FLOAT, (), "score")
    if logits is not None and name in HOPPER and needs_keys(composed):
        logits += make("ctx", INT, (), "kv_pos")
    told = dataclasses.replace(
        composed,
        logits=logits,
        mask=None if composed.mask is None else const(True),
        texts=tuple(text for text in composed.texts if text.hook not in ("logits", "mask")),
    )
    assert name not in HOPPER or needs_keys(told) == needs_keys(composed), (
        "the roles' shared memory would differ"
    )
    return told


def _finishing(composed: Composed) -> Composed:
    """What the merge kernel reads of a variant: whether states are a softmax's, the sink, the output hook."""
    reads = composed.sink is not None or composed.output is not None
    dropped = dict.fromkeys(("logits", "low", "high", "mask", "query", "key_map", "value"))
    return dataclasses.replace(
        composed,
        **dropped,  # type: ignore[arg-type]
        params=composed.params if reads else (),
        texts=tuple(text for text in composed.texts if text.hook == "output"),
        reads_index_mask=False,
    )


def render_roles(spec: AttentionSpec, name: str) -> tuple[str, ...]:
    """The named kernel as one text for each role of its warps, to be compiled at once and joined (joined.py); empty: it is
    compiled in one piece. The first text is the same for many variants."""
    count = 0
    if name == DECODE:
        count = 2
    elif (
        name in HOPPER and spec.kv_dtype == spec.q_dtype and not narrow(spec)
    ):  # fp8 by roles takes 2 to 3 % longer (performance.md, Compilation)
        maps = (spec.composed.query, spec.composed.key_map, spec.composed.value)
        count = 2 if maps == (None,) * 3 else 3
    texts = [
        _text(spec, _told(spec.composed, name) if role == 0 else spec.composed, name) for role in range(count)
    ]
    return tuple(f"#define ATTNRT_ROLE {role}\n{text}" for role, text in enumerate(texts))


def render(spec: AttentionSpec, *names: str) -> str:
    """CUDA C++ of the named kernels of a spec (of all that it has, if none is named); the same text for NVRTC and nvcc."""
    return _text(spec, spec.composed, *(names or entry_names(spec)))


def _text(spec: AttentionSpec, composed: Composed, *names: str) -> str:
    config = tile_config(spec)
    constants, maps, asserts = config_text(config), "", ""
    wide = hopper_config(spec) if set(names) & set(HOPPER) else None
    if wide is not None:
        own: dict[str, Any] = {
            "kv_tile": wide.kv_tile,
            "warpgroups": wide.warpgroups,
            "turns": turns_by_position(composed),
            "folds": names[0] in (HOPPER_BOXES_FOLD, HOPPER_GATHER_FOLD),
        }
        own["two_level"] = narrow(spec) and spec.two_level
        if narrow(spec):
            own["q_type"] = config.q_stored_type
        constants = config_text(config, _HOPPER_CONSTANTS, **own)
    if names == (WIDE,):
        constants = config_text(config, _WIDE_CONSTANTS)
    if wide is not None or names == (WIDE,):
        maps = "\n  KvMaps maps;"
        asserts = f"\nstatic_assert(sizeof(Launch) == {maps_offset(len(composed.params)) + MAPS_BYTES});"
    if names == (MERGE,):
        composed, constants = _finishing(composed), config_text(config, _MERGE_CONSTANTS)
    entries = "".join(_KERNELS[name][1](config) for name in names)
    headers = dict.fromkeys(header for name in names for header in _KERNELS[name][0])
    return f"""{flatten(*headers)}
{variant_text(composed)}
namespace attnrt {{
{constants}
struct Launch {{
  RunParams run;
  ParamRef params[{max(1, len(composed.params))}];{maps}
}};
{structs.layout_asserts()}{asserts}
}}  // namespace attnrt
{entries}"""
