"""Compiled kernels on disk, so that a second process starts fast; any failure here only costs time.

Numba's own cache refuses to be set up where no directory is writable, keys a kernel by its own source file alone, and
trusts whatever bytes it finds. This one is keyed by all sources of the package, the versions and the CPU, checks what it
reads, and is silent about directories that are missing, full or read-only.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle  # Numba's own format of compiled code; only files of this user's cache directory are read
import pkgutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

DIGEST_BYTES = 32
_SOURCES = (
    *(
        "masks",
        "softmax",
        "tiling",
        "vocabulary",
        "cpu.cache",
        "cpu.call",
        "cpu.dots",
        "cpu.features",
        "cpu.few",
        "cpu.jit",
    ),
    *("cpu.kernel", "cpu.lanes", "cpu.launch", "cpu.memory", "cpu.rows", "cpu.scores", "cpu.state", "cpu.vector"),
)


def cache_directory() -> Path | None:
    """Where compiled kernels go: $NUMBA_CACHE_DIR if set, else the user's cache directory; None if there is no home."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        return Path(chosen) / "numba_prefix"
    try:
        if sys.platform == "win32":
            base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        elif sys.platform == "darwin":
            base = Path.home() / "Library" / "Caches"
        else:
            base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return base / "numba_prefix" if base.is_absolute() else None


@functools.cache
def source_digest() -> str:
    """Of every module that takes part in a compiled kernel, and of what compiles it."""
    digest = hashlib.sha256()
    for name in _SOURCES:
        package, _, module = f"numba_prefix.{name}".rpartition(".")
        digest.update(pkgutil.get_data(package, f"{module}.py") or b"")
    versions = (sys.version, numba.__version__, llvmlite.__version__, np.__version__)
    digest.update(repr(versions).encode())
    return digest.hexdigest()


class KernelCache:
    """What a Numba dispatcher expects of its cache; one file per kernel, signature and CPU."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.cache_path = str(cache_directory())

    def enable(self) -> None: ...

    def disable(self) -> None: ...

    def flush(self) -> None: ...

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            target_context.refresh()
            key = self._key(sig, target_context.codegen())
            path = self._path(key)
            content = path.read_bytes() if path is not None else b""
            digest, payload = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
            if not payload or hashlib.sha256(key + payload).digest() != digest:
                return None
            return CompileResult._rebuild(target_context, *pickle.loads(payload))
        except Exception:  # whatever is wrong with a cache file, compiling is the answer
            return None

    def save_overload(self, sig: Any, result: Any) -> None:
        try:
            key = self._key(sig, result.codegen)
            path = self._path(key)
            if path is None or result.library.has_dynamic_globals:
                return
            payload = dumps(result._reduce())
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(hashlib.sha256(key + payload).digest() + payload)
                os.replace(temporary, path)  # whole or not at all, whoever else writes
            except BaseException:
                os.unlink(temporary)
                raise
        except Exception:  # no directory, no room, no permission: the kernel is compiled, which is what matters
            return

    def _key(self, sig: Any, codegen: Any) -> bytes:
        """All that a file's code depends on. Its digest covers this too: code under another kernel's name is not loaded."""
        return repr((source_digest(), self.name, str(sig), codegen.magic_tuple())).encode()

    def _path(self, key: bytes) -> Path | None:
        directory = cache_directory()
        return directory and directory / f"{self.name}-{hashlib.sha256(key).hexdigest()[:32]}.bin"
