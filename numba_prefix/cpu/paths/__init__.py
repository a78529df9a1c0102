"""Instruction-set paths of the CPU target, one file each: how to add one is in
.github/CONTRIBUTING.md."""

from __future__ import annotations

from numba_prefix.cpu.paths import amx, avx512_bf16, vector
from numba_prefix.cpu.paths.record import Kernel, MicroKernels, Path, Scratch, kernel_of

PATHS = (amx.PATH, avx512_bf16.PATH, vector.PATH)  # the simplest last
VECTOR = vector.PATH

__all__ = ["PATHS", "VECTOR", "Kernel", "MicroKernels", "Path", "Scratch", "by_name", "kernel_of"]


def by_name(name: str) -> Path:
    """Raises ValueError for a name that no path has."""
    for path in PATHS:
        if path.name == name:
            return path
    raise ValueError(f"path: got {name!r}, expected one of {', '.join(path.name for path in PATHS)}")
