"""Kernels ready to be loaded: from this process, from disk, or compiled now.

A process that finds them on disk needs neither Numba nor the compiler's libraries.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from dataclasses import asdict
from importlib import metadata
from typing import Any

from numba_prefix.cuda.compile.compiler import FAMILIES, Compiled, compile_kernel
from numba_prefix.cuda.kernel.spec import KernelSpec
from numba_prefix.runtime import disk_cache, numba_options
from numba_prefix.runtime.signal_guard import uninterrupted

# Every module in these folders may take part in a kernel, or in compiling it.
_FOLDERS = ("rules", "planning", "cuda.kernel", "cuda.compile")
_COMPILER = ("numba", "numba-cuda", "llvmlite", "nvidia-nvvm", "nvidia-cuda-nvrtc", "nvidia-nvjitlink")
_TOOLKITS = ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX")  # of which versioned links are usual
_LENGTH_BYTES = 4

_ready: dict[tuple[KernelSpec, tuple[int, int]], Compiled] = {}


def kernel(spec: KernelSpec, cc: tuple[int, int]) -> Compiled:
    """The kernel for compute capability `cc`. Raises what compile_kernel does."""
    return obtain(spec, cc)[0]


def obtain(spec: KernelSpec, cc: tuple[int, int]) -> tuple[Compiled, str]:
    """The kernel, and where it came from: "memory", "cache" (disk) or "compiled"."""
    found = _ready.get((spec, cc))
    return (found, "memory") if found is not None else uninterrupted(lambda: _obtain(spec, cc))


def _obtain(spec: KernelSpec, cc: tuple[int, int]) -> tuple[Compiled, str]:
    found, source = _ready.get((spec, cc)), "memory"
    if found is None:
        found, source = load(spec, cc), "cache"
    if found is None:
        found, source = compile_kernel(spec, cc), "compiled"
        save(spec, cc, found)
    _ready[spec, cc] = found
    return found, source


def load(spec: KernelSpec, cc: tuple[int, int]) -> Compiled | None:
    """A kernel from disk, without its PTX; None if there is none that can be trusted."""
    try:
        payload = disk_cache.load(_file_name(spec, cc), _key(spec, cc))
        return None if payload is None else _unpacked(payload, cc)
    except Exception:  # whatever is wrong with a cache file, compiling is the answer
        return None


def save(spec: KernelSpec, cc: tuple[int, int], compiled: Compiled) -> None:
    """Keep a kernel for later processes, unless it is this process's own."""
    try:
        if not _are_options_altered():
            disk_cache.save(_file_name(spec, cc), _key(spec, cc), _packed(compiled))
    except Exception:  # the kernel is compiled, which is what matters
        return


def _packed(compiled: Compiled) -> bytes:
    facts: dict[str, Any] = asdict(compiled)
    for name in ("cubin", "cc", "ptx"):
        del facts[name]
    header = json.dumps(facts).encode()
    return len(header).to_bytes(_LENGTH_BYTES, "little") + header + compiled.cubin


def _unpacked(payload: bytes, cc: tuple[int, int]) -> Compiled:
    end = _LENGTH_BYTES + int.from_bytes(payload[:_LENGTH_BYTES], "little")
    return Compiled(cc=cc, cubin=payload[end:], **json.loads(payload[_LENGTH_BYTES:end]))


def _file_name(spec: KernelSpec, cc: tuple[int, int]) -> str:
    return f"{spec.name}-sm_{cc[0]}{cc[1]}"


def _key(spec: KernelSpec, cc: tuple[int, int]) -> bytes:
    """All that a cubin depends on."""
    return repr((_digest(), numba_options.in_environment(), FAMILIES[spec.family], spec, cc)).encode()


_altered: set[bool] = set()


def _are_options_altered() -> bool:
    """Whether the program itself has set options of Numba's at the time of any compilation, whose
    parts others link. The key names those of the environment alone."""
    _altered.add(numba_options.are_set_by_program())
    return True in _altered


@functools.cache
def _digest() -> str:
    """A digest of all sources of the kernels and of the versions of what compiles them; where
    packages are missing, of the places of a toolkit that serves instead."""
    versions = [_version(name) for name in _COMPILER]
    places = [os.path.realpath(os.environ[name]) for name in _TOOLKITS if name in os.environ]
    versions += places if None in versions else []
    return disk_cache.digest_of(_FOLDERS, (sys.version_info[:2], versions))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
