"""The cache that Numba's dispatchers ask for compiled kernels, on disk as
numba_prefix.runtime.disk_cache does.

Numba's own cache refuses to be set up where no directory is writable, keys a kernel by its own
source file alone, and trusts whatever bytes it finds. This one is keyed by all sources of the
package, the versions and the CPU.
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

from numba_prefix.runtime import disk_cache

# Every module in these folders may take part in a compiled kernel, or in compiling it.
_FOLDERS = ("rules", "planning", "cpu.kernel", "cpu.paths", "cpu.simd", "cpu.compile")


@functools.cache
def source_digest() -> str:
    """A digest of all sources of the kernels and of the versions of what compiles them."""
    return disk_cache.digest_of(_FOLDERS, (sys.version, numba.__version__, llvmlite.__version__, np.__version__))


class KernelCache:
    """The cache that a Numba dispatcher expects; one file per kernel, signature and CPU."""

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
            return None if payload is None else CompileResult._rebuild(target_context, *pickle.loads(payload))
        except Exception:  # whatever is wrong with a cache file, compiling is the answer
            return None

    def save_overload(self, sig: Any, result: Any) -> None:
        try:
            if not result.library.has_dynamic_globals:
                disk_cache.save(self.name, self._key(sig, result.codegen), dumps(result._reduce()))
        except Exception:  # the kernel is compiled, which is what matters
            return

    def _key(self, sig: Any, codegen: Any) -> bytes:
        return repr((source_digest(), self.name, str(sig), codegen.magic_tuple())).encode()
