# SPDX-License-Identifier: Apache-2.0
"""The C++ CPU backend: AVX-512, AVX2 or plain C++ chosen at run time, threads, any variant."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnrt.backends.cpu.traits import cpu_traits
from attnrt.config import config
from attnrt.errors import UnsupportedError

if TYPE_CHECKING:
    from attnrt.backends.cpu.kernel import CpuKernel
    from attnrt.device import Device
    from attnrt.formats.base import Features
    from attnrt.scheduler.base import Traits
    from attnrt.spec import AttentionSpec

__all__ = ["CpuBackend", "load"]

Q_DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
KV_DTYPES = Q_DTYPES


class CpuBackend:
    """Runs plans on the CPU.

    Parameters
    ----------
    family : str, optional
        "avx512", "avx2" or "plain"; None: the best that the machine has. Families differ in rounding, as machines do.
    num_threads : int, optional
        None: ``ATTNRT_NUM_THREADS``, else the CPUs that the process may use. Changes time, never bits.
    """

    name = "cpu"

    def __init__(self, family: str | None = None, num_threads: int | None = None) -> None:
        from attnrt.backends.cpu.families import families

        known = families()
        if family is None:
            family = known[0]
        if family not in known:
            raise UnsupportedError(f"family {family!r}", f"must be one of {', '.join(known)} on this machine")
        self.family = family
        self._num_threads = num_threads

    @property
    def num_threads(self) -> int:
        """Threads of a run."""
        return config().num_threads if self._num_threads is None else self._num_threads

    def why_not(self, spec: AttentionSpec, features: Features, device: Device) -> tuple[str, ...]:
        """Reasons why the backend cannot take it; empty: it can."""
        from attnrt.backends.cpu.jit import why_not_compile
        from attnrt.backends.cpu.prebuilt import prebuilt_index

        reasons = []
        if device.kind != "cpu":
            reasons.append(f"runs on the CPU, not on {device}")
        for label, dtype, known in (
            ("q_dtype", spec.q_dtype, Q_DTYPES),
            ("kv_dtype", spec.kv_dtype, KV_DTYPES),
            ("out_dtype", spec.out_dtype, KV_DTYPES),
        ):
            if dtype not in known:
                reasons.append(f"{label} must be one of {', '.join(known)}, not {dtype}")
        if prebuilt_index(spec.composed) is None:
            reasons += why_not_compile(spec.composed, self.family)
        return tuple(reasons)

    def traits(
        self, spec: AttentionSpec, features: Features, device: Device, deterministic: str = "batch"
    ) -> Traits:
        """Threads as workers; see ``traits.cpu_traits``."""
        return cpu_traits(self.num_threads, deterministic)

    def compile(self, spec: AttentionSpec, features: Features, device: Device) -> CpuKernel:
        """The variant's machine code: prebuilt, from the cache, or compiled now.

        Raises
        ------
        CompileError
            There is no compiler, compiling is forbidden, or the variant's text does not compile.
        """
        from attnrt.backends.cpu.families import prebuilt_kernel
        from attnrt.backends.cpu.jit import compiled_kernel
        from attnrt.backends.cpu.kernel import CpuKernel
        from attnrt.backends.cpu.prebuilt import prebuilt_index

        index = prebuilt_index(spec.composed)
        if index is None:
            code = compiled_kernel(spec.composed, self.family)
        else:
            code = prebuilt_kernel(self.family, index)
        return CpuKernel(spec, code, self.family, lambda: self.num_threads)


def load() -> CpuBackend:
    """The backend, for the registry."""
    return CpuBackend()
