"""Compiled kernels on disk, so that a second process starts fast; any failure here only costs time.

Numba's own cache refuses to be set up where no directory is writable, keys a kernel by its own source file alone, and
trusts whatever bytes it finds. This one is keyed by all sources of the package, the versions and the CPU, reads only what
this user or root wrote, whole and under its own name, and is silent about directories that are missing, full or read-only.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle  # Numba's own format of compiled code; only files that this user or root wrote are read
import pkgutil
import secrets
import stat
import sys
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
            content = _read_trusted(path) if path is not None else b""
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
            # Readable by all that the umask lets, for images that root builds and another user runs.
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o644)
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


def _read_trusted(path: Path) -> bytes:
    """Nothing if is_trusted does not hold for what is opened, whatever lies there a moment later."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))  # FIFOs block
    with os.fdopen(handle, "rb") as file:
        return file.read() if is_trusted(os.fstat(handle)) else b""


def is_trusted(status: os.stat_result) -> bool:
    """Whether a cache file, which is code that will run, can have been written by this process's user or root alone.

    Root's group counts as root: platforms that give containers any user id (OpenShift) let it write to all of an image.
    On Windows, where a mode says nothing of other users, the directory's own permissions have to do.
    """
    if not stat.S_ISREG(status.st_mode):
        return False
    if not hasattr(os, "geteuid"):
        return True
    can_group_write = bool(status.st_mode & stat.S_IWGRP) and status.st_gid != 0
    can_others_write = bool(status.st_mode & stat.S_IWOTH)
    return status.st_uid in (0, os.geteuid()) and not can_group_write and not can_others_write
