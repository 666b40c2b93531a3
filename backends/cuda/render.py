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
from attnrt.backends.cuda.tables import TileConfig, tile_config
from attnrt.variants import include_dir

if TYPE_CHECKING:
    from attnrt.spec import AttentionSpec
    from attnrt.variants import Composed

__all__ = ["ATTEND", "MERGE", "SMEM", "THREADS", "flatten", "render", "variant_text", "waits"]

ATTEND, MERGE, SMEM = "attnrt_attend", "attnrt_merge", "attnrt_smem_bytes"
THREADS = 128

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
        for name in ("group", "head_dim", "head_dim_vo", "m_blocks", "kv_tile", "stages")
    )
    shared = "true" if config.shared_kv else "false"
    return f"struct Config {{\n{dtypes}{numbers}  static constexpr bool shared_kv = {shared};\n}};\n"


def variant_text(composed: Composed) -> str:
    """The printed variant without its include (the header is in the text already)."""
    return _INCLUDE.sub("", composed.cpp_source("Variant"))


def waits(source: str, names: tuple[str, ...]) -> bool:
    """Whether all kernels of a text begin with the wait that a dependent launch asks for."""
    return source.count("attnrt::wait_for_predecessors();") == len(names)


def render(spec: AttentionSpec) -> str:
    """CUDA C++ of the kernels of a spec; the same text for NVRTC and nvcc."""
    config = tile_config(spec)
    params = max(1, len(spec.composed.params))
    return f"""{flatten("attend.cuh", "merge.cuh")}
{variant_text(spec.composed)}
namespace attnrt {{
{config_text(config)}
struct Launch {{
  RunParams run;
  ParamRef params[{params}];
}};
{pack.layout_asserts()}
}}  // namespace attnrt

extern "C" __device__ const int {SMEM} =
    attnrt::Layout<attnrt::Config, attnrt::Variant>::kOffsetMeta +
    sizeof(attnrt::Meta<attnrt::Layout<attnrt::Config, attnrt::Variant>>);

extern "C" __global__ void __launch_bounds__({THREADS}, {config.ctas_per_sm})
{ATTEND}(const __grid_constant__ attnrt::Launch launch) {{
  extern __shared__ __align__(128) char smem[];
  attnrt::wait_for_predecessors();
  attnrt::Attend<attnrt::Config, attnrt::Variant>(launch.run, launch.params, smem).run();
}}

extern "C" __global__ void __launch_bounds__({THREADS})
{MERGE}(const __grid_constant__ attnrt::Launch launch) {{
  attnrt::wait_for_predecessors();
  attnrt::Merge<attnrt::Config, attnrt::Variant>(launch.run, launch.params).run();
}}
"""
