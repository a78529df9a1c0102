"""The cache that Numba's dispatchers ask for compiled kernels, on disk as
numba_prefix.runtime.disk_cache does.

Numba's own cache refuses to be set up where no directory is writable, keys a kernel by its own
source file alone, and trusts whatever bytes it finds. This one is keyed by all sources of the
package, the versions, the CPU and Numba's options.
"""

from __future__ import annotations

import functools

# Numba's own format of compiled code; only files that this user or root wrote are read.
import pickle
import sys
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from numba_prefix.runtime import disk_cache, numba_options

# Every module in these folders may take part in a compiled kernel, or in compiling it.
_FOLDERS = ("rules", "planning", "cpu.kernel", "cpu.paths", "cpu.simd", "cpu.compile")


@functools.cache
def source_digest() -> str:
    """A digest of all sources of the kernels and of the versions of what compiles them."""
    llvm = llvmlite.__version__, llvmlite.binding.llvm_version_info
    return disk_cache.digest_of(_FOLDERS, (sys.version, numba.__version__, llvm, np.__version__))


def origin() -> tuple[object, ...]:
    """Everything that code is keyed by, but for the CPU: the sources, what compiles them, and how
    it is told to."""
    return source_digest(), numba_options.in_effect()


# The options that this process has compiled under. A kernel links device functions that were
# compiled earlier: if the options have changed since, its code is not for other processes.
_compiled_under: set[str] = set()


def _note_options() -> None:
    _compiled_under.add(repr(numba_options.in_effect()))


class KernelCache:
    """The cache that a Numba dispatcher expects; one file per kernel, signature, CPU and set
    of options."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.cache_path = str(disk_cache.cache_directory())

    def enable(self) -> None: ...

    def disable(self) -> None: ...

    def flush(self) -> None: ...

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            target_context.refresh()
            payload = disk_cache.load(self.name, self._key(sig, target_context.codegen()))
            if payload is not None:
                return CompileResult._rebuild(target_context, *pickle.loads(payload))
        except Exception:  # whatever is wrong with a cache file, compiling is the answer
            pass
        _note_options()
        return None

    def save_overload(self, sig: Any, result: Any) -> None:
        try:
            _note_options()
            if not result.library.has_dynamic_globals and len(_compiled_under) == 1:
                disk_cache.save(self.name, self._key(sig, result.codegen), dumps(result._reduce()))
        except Exception:  # the kernel is compiled, which is what matters
            return

    def _key(self, sig: Any, codegen: Any) -> bytes:
        return repr((*origin(), self.name, str(sig), codegen.magic_tuple())).encode()
