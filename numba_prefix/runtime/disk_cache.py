"""Compiled code on disk, so that a second process starts fast; a failure here only costs time.

A file is loaded only if this user or root alone can have written it, and only whole and under its
own name. Directories that are missing, full or read-only cause no error.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pkgutil
import secrets
import stat
import sys
from collections.abc import Iterable
from pathlib import Path
from types import CodeType
from typing import Any

DIGEST_BYTES = 32
_BYTECODE = (
    *("co_name", "co_flags", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_code", "co_consts"),
    *("co_names", "co_varnames", "co_freevars", "co_cellvars", "co_exceptiontable"),
)


def cache_directory() -> Path | None:
    """The directory of compiled kernels: $NUMBA_CACHE_DIR if set, else the user's cache directory;
    None if there is no home."""
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


def digest_of(folders: Iterable[str], versions: object) -> str:
    """A digest of every module in these folders, named without the package, and of `versions`:
    everything else that shapes the code compiled from them.

    Raises ImportError for a folder without modules.
    """
    digest = hashlib.sha256()
    for name in modules_in(folders):
        digest.update(name.encode() + b"\0" + code_of(name) + b"\0")
    # Python leaves assertions out of what it compiles if it is told to.
    digest.update(repr((versions, __debug__)).encode())
    return digest.hexdigest()


def modules_in(folders: Iterable[str]) -> list[str]:
    """Full names of the modules in these folders of the package, not of folders within them."""
    found = []
    for folder in folders:
        spec = importlib.util.find_spec(f"numba_prefix.{folder}")
        places = spec.submodule_search_locations if spec is not None else None
        names = [module.name for module in pkgutil.iter_modules(places) if not module.ispkg] if places else []
        if not names:
            raise ImportError(f"numba_prefix.{folder}: no modules to be found")
        found += [f"numba_prefix.{folder}.{name}" for name in sorted(names)]
    return found


def code_of(module: str) -> bytes:
    """A module's source, or what its bytecode says where an installation has no sources (compileall
    -b, frozen programs).

    Raises ImportError for a module that has neither.
    """
    spec = importlib.util.find_spec(module)
    loader: Any = spec.loader if spec is not None else None
    source = loader.get_source(module)
    if source is not None:
        return source.encode()
    code = loader.get_code(module)
    if code is None:
        raise ImportError(f"{module}: neither source nor bytecode to be found")
    return repr(_described(code)).encode()


def _described(constant: Any) -> Any:
    """A constant of bytecode in a form whose repr is the same in every process; that of marshal
    depends on how often an object is referred to."""
    if isinstance(constant, CodeType):
        return [(name, _described(getattr(constant, name, None))) for name in _BYTECODE]
    if isinstance(constant, (tuple, frozenset)):
        parts = [_described(part) for part in constant]
        return parts if isinstance(constant, tuple) else sorted(parts, key=repr)
    return type(constant).__name__, constant


def path_of(name: str, key: bytes) -> Path | None:
    directory = cache_directory()
    return directory and directory / f"{name}-{hashlib.sha256(key).hexdigest()[:32]}.bin"


def load(name: str, key: bytes) -> bytes | None:
    """The payload saved under this name and key; None if there is none that can be trusted.

    `key` holds everything that the code depends on: code under another kernel's name is not loaded.
    """
    try:
        path = path_of(name, key)
        content = _read_trusted(path) if path is not None else b""
    except Exception:  # an unreadable file is compiled again
        return None
    digest, payload = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    return payload if payload and hashlib.sha256(key + payload).digest() == digest else None


def save(name: str, key: bytes, payload: bytes) -> None:
    """Write the payload; without room or permission, do nothing."""
    try:
        path = path_of(name, key)
        if path is None:
            return
        # Readable by everybody that the umask allows, for images that root builds and another user
        # runs.
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o644)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(key + payload).digest() + payload)
            os.replace(temporary, path)  # whole or not at all, even if other processes write too
        except BaseException:
            os.unlink(temporary)
            raise
    # No directory, no room, no permission: the kernel is compiled, which is what matters.
    except Exception:
        return


def _read_trusted(path: Path) -> bytes:
    """The file's content, or nothing if it is not trusted. The opened file is checked, not its
    path, which may change."""
    # O_NONBLOCK: opening a FIFO would block.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(handle, "rb") as file:
        return file.read() if is_trusted(os.fstat(handle)) else b""


def is_trusted(status: os.stat_result) -> bool:
    """Whether only this process's user or root can have written a cache file, which is code that
    will run.

    Root's group counts as root: platforms that give containers any user id (OpenShift) let it write
    to all of an image. On Windows a mode does not cover other users; the directory's own
    permissions have to suffice.
    """
    if not stat.S_ISREG(status.st_mode):
        return False
    if not hasattr(os, "geteuid"):
        return True
    can_group_write = bool(status.st_mode & stat.S_IWGRP) and status.st_gid != 0
    can_others_write = bool(status.st_mode & stat.S_IWOTH)
    return status.st_uid in (0, os.geteuid()) and not can_group_write and not can_others_write
