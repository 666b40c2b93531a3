# SPDX-License-Identifier: Apache-2.0
"""The source of one kernel: our headers flattened into one text, the printed variant, the constants, three entry points.

Flattened, because NVRTC then needs no include path and the text alone is the content that a cache key has to cover.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from attnrt.backends.cuda import pack
from attnrt.backends.cuda.tables import DECODE_CTAS, TileConfig, tile_config
from attnrt.variants import include_dir

if TYPE_CHECKING:
    from attnrt.spec import AttentionSpec
    from attnrt.variants import Composed

__all__ = [
    "ATTEND",
    "DECODE",
    "DECODE_SMEM",
    "MERGE",
    "SMEM",
    "SMEM_BYTES",
    "THREADS",
    "entry_names",
    "flatten",
    "render",
    "variant_text",
    "waits",
]

ATTEND, MERGE, SMEM = "attnrt_attend", "attnrt_merge", "attnrt_smem_bytes"
DECODE, DECODE_SMEM = "attnrt_decode", "attnrt_decode_smem_bytes"
#: Dynamic shared memory of the kernels that have some, as a constant expression of their text.
SMEM_BYTES = {
    ATTEND: "attnrt::Layout<attnrt::Config, attnrt::Variant>::kOffsetMeta"
    " + sizeof(attnrt::Meta<attnrt::Layout<attnrt::Config, attnrt::Variant>>)",
    DECODE: "attnrt::DecodeShape::kOffsetMeta + sizeof(attnrt::DecodeMeta<attnrt::DecodeShape, attnrt::Variant>)",
}
THREADS = 128
#: CTAs of the merge kernel per multiprocessor: fixed, for a captured graph; four warps each take (row, head) pairs in turn.
MERGE_CTAS = 4

_ROOT = Path(__file__).resolve().parent
_INCLUDE = re.compile(r'^\s*#include "([^"]+)"\s*$', re.M)


def _find(name: str) -> Path:
    for folder in (_ROOT / "kernels", _ROOT, Path(include_dir())):
        if (folder / name).exists():
            return folder / name
    raise FileNotFoundError(name)


@lru_cache(maxsize=8)
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


def config_text(config: TileConfig) -> str:
    """The constants as the struct that the kernels take."""
    dtypes = "".join(
        f"  static constexpr Dtype {name} = Dtype::{getattr(config, name)};\n"
        for name in ("q_type", "kv_type", "out_type")
    )
    numbers = "".join(
        f"  static constexpr int {name} = {getattr(config, name)};\n"
        for name in ("group", "head_dim", "head_dim_vo", "m_blocks", "kv_tile", "stages", "q_blocks")
    )
    shared = "true" if config.shared_kv else "false"
    return f"struct Config {{\n{dtypes}{numbers}  static constexpr bool shared_kv = {shared};\n}};\n"


def variant_text(composed: Composed) -> str:
    """The printed variant without its include (the header is in the text already)."""
    return _INCLUDE.sub("", composed.cpp_source("Variant"))


def waits(source: str, names: tuple[str, ...]) -> bool:
    """Whether all kernels of a text begin with the wait that a dependent launch asks for."""
    return source.count("attnrt::wait_for_predecessors();") == len(names)


_DECODE_TEXT = f"""
namespace attnrt {{
typedef DecodeLayout<Config, Variant> DecodeShape;
}}
extern "C" __device__ const int {DECODE_SMEM} = {SMEM_BYTES[DECODE]};

extern "C" __global__ void __launch_bounds__({THREADS}, {DECODE_CTAS})
{DECODE}(const __grid_constant__ attnrt::Launch launch) {{
  extern __shared__ __align__(1024) char ring[];
  attnrt::prefetch_plan(launch.run.plan);
  attnrt::wait_for_predecessors();
  attnrt::release_dependents();
  attnrt::Decode<attnrt::Config, attnrt::Variant>(launch.run, launch.params, ring).run();
}}
"""


def entry_names(spec: AttentionSpec) -> tuple[str, ...]:
    """Kernels that the text of a spec holds."""
    return (ATTEND, DECODE, MERGE) if tile_config(spec).q_blocks else (ATTEND, MERGE)


def render(spec: AttentionSpec) -> str:
    """CUDA C++ of the kernels of a spec; the same text for NVRTC and nvcc."""
    config = tile_config(spec)
    params = max(1, len(spec.composed.params))
    decode = config.q_blocks > 0
    headers = ("attend.cuh", "decode.cuh", "merge.cuh") if decode else ("attend.cuh", "merge.cuh")
    return f"""{flatten(*headers)}
{variant_text(spec.composed)}
namespace attnrt {{
{config_text(config)}
struct Launch {{
  RunParams run;
  ParamRef params[{params}];
}};
{pack.layout_asserts()}
}}  // namespace attnrt

extern "C" __device__ const int {SMEM} = {SMEM_BYTES[ATTEND]};

extern "C" __global__ void __launch_bounds__({THREADS}, {config.ctas_per_sm})
{ATTEND}(const __grid_constant__ attnrt::Launch launch) {{
  extern __shared__ __align__(128) char smem[];
  attnrt::prefetch_plan(launch.run.plan);
  attnrt::wait_for_predecessors();
  attnrt::release_dependents();
  attnrt::Attend<attnrt::Config, attnrt::Variant>(launch.run, launch.params, smem).run();
}}

{_DECODE_TEXT if decode else ""}
extern "C" __global__ void __launch_bounds__({THREADS}, {MERGE_CTAS})
{MERGE}(const __grid_constant__ attnrt::Launch launch) {{
  attnrt::prefetch_plan(launch.run.plan);
  attnrt::wait_for_predecessors();
  attnrt::Merge<attnrt::Config, attnrt::Variant>(launch.run, launch.params).run();
}}
"""
