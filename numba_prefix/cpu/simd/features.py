"""Features of the host CPU, as Numba compiles for it."""

from __future__ import annotations

import functools
import platform

import llvmlite.binding as llvm
from numba.core import config
from numba.core.codegen import get_host_cpu_features


@functools.cache
def features() -> frozenset[str]:
    """LLVM feature names that code is compiled with (NUMBA_CPU_NAME, NUMBA_CPU_FEATURES and
    NUMBA_ENABLE_AVX are honoured)."""
    text = config.CPU_FEATURES if config.CPU_FEATURES is not None else get_host_cpu_features()
    return frozenset(name[1:] for name in text.split(",") if name.startswith("+"))


@functools.cache
def cpu_name() -> str:
    return config.CPU_NAME or llvm.get_host_cpu_name()


def is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")


def is_arm64() -> bool:
    return platform.machine().lower() in ("aarch64", "arm64")


def has_half_conversion() -> bool:
    """Whether float16 <-> float32 is an instruction; elsewhere LLVM would call a library that may
    not be there."""
    return is_arm64() or (is_x86() and bool({"f16c", "avx512f"} & features()))


def has_pairs() -> bool:
    """Whether there are instructions for pairs of bfloat16 (vdpbf16ps) on whole vectors of 16
    lanes."""
    return is_x86() and {"avx512bf16", "avx512bw", "avx512f"} <= features()


def has_tiles() -> bool:
    """Whether there are AMX's for tiles of such pairs. Whether a process may use them is another
    matter (cpu/isa.py)."""
    return has_pairs() and {"amx-tile", "amx-bf16"} <= features()


def register_block() -> tuple[int, int]:
    """(scalars, panels of 16 lanes) that one micro-kernel step multiplies: as many accumulators as
    registers allow.

    AVX-512 has 32 registers of 16 lanes: 8 x 2 accumulators. AVX2 has 16 of 8 lanes: 4 x 1 takes 8,
    and 2 + 4 in flight. NEON has 32 of 4 lanes: 4 x 1 takes 16. SSE2 has 16 of 4 lanes: 2 x 1 takes
    8.
    """
    if is_x86():
        if "avx512f" in features():
            return 8, 2
        return (4, 1) if "avx" in features() else (2, 1)
    return 4, 1
