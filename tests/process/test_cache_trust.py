"""Which cache files are loaded: they are code, so only those that this user or root alone can have
written."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import succeed

from numba_prefix.cpu.compile.jit import kernel
from numba_prefix.runtime.disk_cache import cache_directory

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="owners and modes are POSIX's")
ROOT_ONLY = pytest.mark.skipif(getattr(os, "geteuid", lambda: 1)() != 0, reason="only root gives files away")
SOMEBODY, NOBODY = 12345, 12346


def doubled(x: Any) -> Any:
    return x * 2


def trebled(x: Any) -> Any:
    return x * 3


def is_loaded(function: Callable[[Any], Any] = doubled) -> bool:
    """Whether a new dispatcher finds its code on disk; what it computes is right in any case."""
    dispatcher = kernel(function)
    assert dispatcher(7) == function(7)
    return sum(dispatcher._cache_hits.values()) == 1


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The one file of a cache in a directory that others may enter, as an image's."""
    top = Path(tempfile.mkdtemp(prefix="numba_prefix_trust_"))
    top.chmod(0o755)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(top))
    try:
        assert not is_loaded() and is_loaded()
        (path,) = (top / "numba_prefix").iterdir()
        yield path
    finally:
        shutil.rmtree(top)


def test_as_written(cached: Path) -> None:
    """For all to read and only its owner to write, whatever the umask; nothing else is left
    behind."""
    for umask in (0o000, 0o022, 0o077):
        shutil.rmtree(cached.parent)
        before = os.umask(umask)
        try:
            assert not is_loaded()
        finally:
            os.umask(before)
        modes = [path.stat().st_mode & 0o777 for path in (cached.parent, cached)]
        assert modes == [0o755 & ~umask, 0o644 & ~umask]
        assert list(cached.parent.iterdir()) == [cached] and is_loaded()


@pytest.mark.parametrize("mode", [0o646, 0o666, 0o602])
def test_that_others_can_write(cached: Path, mode: int, capsys: Any) -> None:
    """Compiled anew, and replaced by a file that they cannot."""
    cached.chmod(mode)
    report = succeed(capsys, "info")["cache"]
    assert (report["files"], report["refused"]) == (0, 1) and "REFUSED" in report["state"]
    assert not is_loaded()
    assert is_loaded() and cached.stat().st_mode & 0o022 == 0
    report = succeed(capsys, "info")["cache"]
    assert (report["files"], report["refused"]) == (1, 0)


@ROOT_ONLY
@pytest.mark.parametrize(("owner", "group", "mode", "user", "expected"), [
    (SOMEBODY, SOMEBODY, 0o644, 0, False),  # root with a user's cache
    (SOMEBODY, SOMEBODY, 0o644, NOBODY, False),
    (SOMEBODY, SOMEBODY, 0o644, SOMEBODY, True),
    (0, 0, 0o644, SOMEBODY, True),  # an image's
    (0, 0, 0o664, SOMEBODY, True),  # an image's for any user id in root's group
    (0, SOMEBODY, 0o664, SOMEBODY, False),
    (SOMEBODY, SOMEBODY, 0o664, SOMEBODY, False),
])  # fmt: skip
def test_owners(
    cached: Path, owner: int, group: int, mode: int, user: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(cached, owner, group)
    cached.chmod(mode)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert is_loaded() is expected


@ROOT_ONLY
def test_cache_of_an_image_for_another_user(cached: Path) -> None:
    """Root fills a cache; a process of another user, which can only read it, has its code from
    there."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(SOMEBODY)
            os.setuid(SOMEBODY)
            status = 0 if is_loaded() and not os.access(cached.parent, os.W_OK) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_under_another_name(cached: Path) -> None:
    """Whoever may rename files, but not write them, could exchange kernels."""
    assert not is_loaded(trebled)
    (other,) = set(cached.parent.iterdir()) - {cached}
    shutil.copy(cached, other)
    assert not is_loaded(trebled)
    assert is_loaded(trebled) and is_loaded()


@pytest.mark.parametrize("kind", ["fifo", "directory", "link to itself", "empty", "cut"])
def test_what_is_no_whole_file(cached: Path, kind: str) -> None:
    """Neither waits nor fails."""
    content = cached.read_bytes()
    cached.unlink()
    if kind == "fifo":
        os.mkfifo(cached)
    elif kind == "directory":
        cached.mkdir()
    elif kind == "link to itself":
        cached.symlink_to(cached)
    else:
        cached.write_bytes(content[: len(content) // 2] if kind == "cut" else b"")
    assert not is_loaded()
    assert is_loaded() is (kind != "directory")  # which cannot be replaced by a file
    assert cache_directory() == cached.parent
