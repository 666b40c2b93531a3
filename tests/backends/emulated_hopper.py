# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend of an sm_90 device on the CPU: the Hopper kernel by benchmarks/experiments/prefill_emulate.hpp (threads as
fibers, asynchronous work at random moments), the others by emulated_cuda.py. bfloat16 alone; a tile takes tenths of a second.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from emulated_cuda import ASSEMBLY, EmulatedCuda, EmulatedKernel, build

from attnrt.backends.cuda import boxes, pack, render, select, structs, tables

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ["-std=c++17", "-O2", "-w", "-shared", "-fPIC", "-ffp-contract=off"]

_RUN = """
typedef attnrt::HopperLayout<attnrt::Config, attnrt::Variant> Shape;
template <attnrt::Loading kHow>
static bool run(const attnrt::Launch& launch) {
  typedef attnrt::HopperLoader<attnrt::Config, attnrt::Variant, kHow> Loader;
  return emu::run(Shape::kThreads, [&] {
    attnrt::hopper_attend<attnrt::Config, attnrt::Variant, Loader>(launch.run, launch.params, launch.maps, emu::smem);
  });
}
extern "C" int emulate_hopper(const void* args, unsigned seed, int* by_boxes) {
  const auto& launch = *static_cast<const attnrt::Launch*>(args);
  emu::rng = seed;
  *by_boxes = attnrt::reads_boxes(launch.run, launch.maps);
  for (blockIdx.x = 0; blockIdx.x < launch.run.plan->team_workers; ++blockIdx.x)
    if (!(*by_boxes ? run<attnrt::Loading::boxes>(launch) : run<attnrt::Loading::gather>(launch))) return 0;
  return 1;
}
"""


_RUN_WIDE = """
extern "C" int emulate_wide(const void* args, unsigned seed) {
  const auto& launch = *static_cast<const attnrt::Launch*>(args);
  emu::rng = seed;
  gridDim.x = launch.run.plan->wide_workers;
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
    if (!emu::run(attnrt::WideLayout<attnrt::Config, attnrt::Variant>::kThreads, [&] {
          attnrt::wide_prepare<attnrt::Config, attnrt::Variant>(launch.maps, emu::smem);
          attnrt::wide_attend<attnrt::Config, attnrt::Variant>(launch.run, launch.params, launch.maps, emu::smem);
        }))
      return 0;
  return 1;
}
"""


def hopper_text(spec: Any, kernel: str) -> str:
    """The rendered text of a spec's Hopper or wide kernel for g++, without its entry point."""
    text = render.render(spec, kernel)
    for name in ("ptx.cuh", "kernels/hopper_ptx.cuh"):
        own = render._INCLUDE.sub("", (render._ROOT / name).read_text().replace("#pragma once\n", ""))
        before, found, after = text.partition(own.strip())
        assert found, name
        text = before + after
    for found, instead in ASSEMBLY.items():
        text = text.replace(found, instead)
    head = (ROOT / "benchmarks/experiments/prefill_emulate.hpp").read_text().replace("#pragma once", "")
    helpers = """
static inline unsigned short emu_to_bf16(float x) { return emu::to_bf16(x); }
static inline float emu_from_half(unsigned short x) { return static_cast<float>(unpun<_Float16>(x)); }
static inline unsigned short emu_to_half(float x) { return static_cast<unsigned short>(pun(static_cast<_Float16>(x))); }
static inline unsigned emu_mul_half2(unsigned a, unsigned b) {
  const unsigned lo = emu_to_half(emu_from_half(a & 0xffff) * emu_from_half(b & 0xffff));
  return lo | static_cast<unsigned>(emu_to_half(emu_from_half(a >> 16) * emu_from_half(b >> 16))) << 16;
}
"""
    wide = kernel == render.WIDE
    entry = text.index('extern "C" __device__' if wide else "static_assert(sizeof(attnrt::KvMaps)")
    return f"{head}\n{helpers}{text[:entry]}{_RUN_WIDE if wide else _RUN}"


class HopperKernel(EmulatedKernel):
    """attend and merge; ``seen`` lists whether each Hopper launch went by boxes."""

    def __init__(self, spec: Any, backend: EmulatedHopper) -> None:
        super().__init__(spec, backend)
        self.hopper = functools.cache(lambda form: build(hopper_text(spec, form), FLAGS))
        self.wide = functools.cache(lambda: build(hopper_text(spec, render.WIDE), FLAGS))

    def launch_many(self, call: Any) -> None:
        if not tables.takes_wide(self.spec):
            return super().launch_many(call)
        box = boxes.encoded(boxes.NO_BOXES, self.backend.boxes, call, self.spec)
        memory, at = self._with_maps(call, box)
        if self.backend.behind:
            ctypes.c_int.from_address(at.value + structs.run_offsets()["first"]).value = 0
        assert self.wide().emulate_wide(at, self.backend.seed), (
            "the threads of a CTA wait for each other in vain"
        )
        del memory

    def _with_maps(self, call: Any, box: int) -> tuple[Any, Any]:
        """(memory, address in it) of a Launch with maps of such boxes."""
        head = pack.fill_run(call, self.itemsize) + (call.params.table.tobytes() or bytes(64))
        maps = bytes(256)
        if box != boxes.NO_BOXES:  # as prefill_emulate.hpp reads them
            maps = b"".join(
                struct.pack("<10Q48x", address, *strides, *dims, extents[1], self.itemsize)
                for address, dims, strides, extents in boxes.geometry(call, box, self.spec)
            )
        at = render.maps_offset(len(self.spec.composed.params))
        packed = head.ljust(at, b"\0") + maps + boxes.tail(call, box)
        memory = np.zeros(len(packed) + 64, np.uint8)
        first = -memory.ctypes.data % 64
        memory[first : first + len(packed)] = np.frombuffer(packed, np.uint8)
        return memory, ctypes.c_void_p(memory.ctypes.data + first)

    def attend(self, call: Any) -> None:
        plan = call.loaded.plan
        super().attend(call)
        if not select.has_items(plan, tables.HOPPER):
            return
        box = boxes.box_of(plan, call, self.spec) if self.backend.boxes else boxes.NO_BOXES
        memory, at = self._with_maps(call, box)
        by_boxes = ctypes.c_int()
        form = render.HOPPER_BOXES_FOLD if select.plan_folds(plan) else render.HOPPER_BOXES
        done = self.hopper(form).emulate_hopper(at, self.backend.seed, ctypes.byref(by_boxes))
        assert done, "the threads of a CTA wait for each other in vain"
        del memory
        self.backend.seen.append(bool(by_boxes.value))


class EmulatedHopper(EmulatedCuda):
    """The backend; ``boxes`` False: K and V come key by key; ``behind``: the wide kernel is not the first of a run."""

    name = "emulated hopper"

    def __init__(
        self, multiprocessors: int = 2, boxes: bool = True, seed: int = 1, behind: bool = False
    ) -> None:
        super().__init__(multiprocessors=multiprocessors)
        self.boxes, self.seed, self.seen, self.behind = boxes, seed, [], behind

    def traits(self, spec: Any, features: Any, device: Any, deterministic: str = "batch") -> Any:
        return replace(tables.traits_for(spec, self.multiprocessors, deterministic, hopper=True), launch=0.0)

    def compile(self, spec: Any, features: Any, device: Any) -> HopperKernel:
        if spec not in self._kernels:
            self._kernels[spec] = HopperKernel(spec, self)
        return self._kernels[spec]
