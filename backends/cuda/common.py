# SPDX-License-Identifier: Apache-2.0
"""What the two CUDA backends share: what they can take, traits, loading. They differ in who compiles."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from attnrt.backends.cuda import driver, select, structs, tables
from attnrt.backends.cuda.append import ENTRIES, Appender
from attnrt.backends.cuda.kernel import CudaKernel
from attnrt.backends.cuda.programs import Programs
from attnrt.device import as_device
from attnrt.memory import ops_of

if TYPE_CHECKING:
    from attnrt.backends.cuda.modules import Module
    from attnrt.device import Device
    from attnrt.formats.base import Features
    from attnrt.layout import Limits
    from attnrt.scheduler.base import Traits
    from attnrt.spec import AttentionSpec

__all__ = ["CudaBackend"]

FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2")
Q_DTYPES = ("float16", "bfloat16", *FP8_DTYPES)
OUT_DTYPES = ("float16", "bfloat16", "float32")
MAX_HEAD_DIM = 576
#: An H200's multiprocessors, for plans made without a GPU.
DEFAULT_MULTIPROCESSORS = 132


class CudaBackend:
    """A backend over the kernels of backends/cuda/kernels.

    A kernel depends on the spec alone: parts, pages, masks and bound arrays are data to it, so one compilation serves every
    layout and one captured graph every later plan.
    """

    name = "cuda"
    header_nbytes = structs.FIRST_AT
    header_nbytes_per_worker = structs.FIRST_ITEM_BYTES
    header_teams = (tables.WIDE,)

    def __init__(self) -> None:
        self._kernels: dict[tuple[AttentionSpec, int], CudaKernel] = {}
        self._lock = threading.Lock()

    def current_device(self) -> Device:
        """The device of the thread's current context; cuda:0 where there is none, so that why_not can say what is missing."""
        return as_device(f"cuda:{driver.current_device() if driver.why_not() is None else 0}")

    def why_not_compiler(self) -> tuple[str, ...]:
        """Reasons why this backend cannot compile here."""
        raise NotImplementedError

    def load(
        self, source: str, names: tuple[str, ...], device: int, label: str, roles: tuple[str, ...] = ()
    ) -> Module:
        """Compiled, loaded code of a text with these kernels; ``roles``: of one kernel, a text for each role of its warps."""
        raise NotImplementedError

    def why_not(
        self, spec: AttentionSpec | None, features: Features | None, device: Device
    ) -> tuple[str, ...]:
        """Reasons against the device, then the spec."""
        if device.kind != "cuda":
            return (f"runs on CUDA devices, not on {device}",)
        reason = driver.why_not()
        reasons = list(self.why_not_compiler())
        if reason is not None:
            return (reason, *reasons)
        if device.index >= driver.device_count():
            return (f"there is no {device}: the driver sees {driver.device_count()} GPUs",)
        major = driver.device_attribute(device.index, driver.MAJOR)
        if major < 8:
            reasons.append(f"needs compute capability 8.0, {device} has {major}.x")
        return (*reasons, *(() if spec is None else why_not_spec(spec)))

    def traits(
        self, spec: AttentionSpec, features: Features, device: Device, deterministic: str = "batch"
    ) -> Traits:
        """Traits of the kernels on the device (on an H200 where there is none)."""
        multiprocessors, hopper = DEFAULT_MULTIPROCESSORS, True
        if driver.why_not() is None:
            multiprocessors = driver.device_attribute(device.index, driver.MULTIPROCESSORS)
            hopper = is_hopper(device.index)
        return tables.traits_for(spec, multiprocessors, deterministic, hopper)

    @staticmethod
    def traits_within(spec: AttentionSpec, traits: Traits, limits: Limits) -> Traits:
        """The traits of an attention with limits."""
        return select.within(spec, traits, limits)

    def compile(self, spec: AttentionSpec, features: Features, device: Device) -> CudaKernel:
        """The kernels of a spec on a device. Nothing is compiled yet: CudaKernel.prepare does, or the first run."""
        key = (spec, device.index)
        with self._lock:
            found = self._kernels.get(key)
        if found is None:
            ops_of(device)  # makes sure that the device's context is there
            label, number = f"the kernel of {spec.composed!r}", device.index
            programs = Programs(
                spec,
                lambda source, names, roles: self.load(source, names, number, label, roles),
                is_hopper(number),
            )
            appender = Appender(
                spec, number, lambda source: self.load(source, ENTRIES, number, "the append kernel")
            )
            with self._lock:
                found = self._kernels.setdefault(key, CudaKernel(spec, number, programs, appender))
        return found


def is_hopper(device: int) -> bool:
    """Whether a device has the instructions of sm_90a; later ones do not have them."""
    return driver.device_attribute(device, driver.MAJOR) == 9


def arch_of(device: int) -> str:
    """The target of a device: sm_90a where the Hopper-only instructions are."""
    major = driver.device_attribute(device, driver.MAJOR)
    minor = driver.device_attribute(device, driver.MINOR)
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def why_not_spec(spec: AttentionSpec) -> tuple[str, ...]:
    """Reasons against a spec, whatever the device."""
    reasons = []
    if spec.q_dtype not in Q_DTYPES:
        reasons.append(f"takes q as {' or '.join(Q_DTYPES)}, not {spec.q_dtype}")
    if spec.kv_dtype != spec.q_dtype and spec.kv_dtype not in FP8_DTYPES:
        reasons.append(f"takes K and V in q's dtype or fp8, not {spec.kv_dtype}")
    if spec.out_dtype not in OUT_DTYPES:
        reasons.append(f"writes {', '.join(OUT_DTYPES)}, not {spec.out_dtype}")
    if max(spec.head_dim, spec.head_dim_vo) > MAX_HEAD_DIM:
        reasons.append(f"takes head_dim up to {MAX_HEAD_DIM}, not {max(spec.head_dim, spec.head_dim_vo)}")
    return tuple(reasons)
