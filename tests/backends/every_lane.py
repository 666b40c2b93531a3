# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest (-p every_lane) for compute-sanitizer's racecheck: kernels in which every lane of a warp arrives at a
barrier where else lane 0 speaks for all (ptx.cuh mbar_arrive_warp), compiled with the lines of their text."""

from __future__ import annotations


def pytest_configure() -> None:
    """Texts and compiler of all attentions made from here on."""
    from attnrt.backends.cuda import nvrtc, programs

    render, flags = programs.render, nvrtc._flags
    programs.render = lambda spec, *names: "#define ATTNRT_EVERY_LANE_ARRIVES\n" + render(spec, *names)
    nvrtc._flags = lambda arch: {**flags(arch), "lineinfo": True}
