"""Control groups for tests: trees of files that look like them, and real ones where this process
may make them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from numba_prefix.runtime import cgroups


def tree(top: Path, files: dict[str, str]) -> Path:
    """Write files below top; TOP in their contents is its path. Returns top."""
    for name, text in files.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(text.replace("TOP", str(top)))
    return top


@contextlib.contextmanager
def limited_to_one_cpu() -> Iterator[Path | None]:
    """An unlimited group inside one with a quota of one CPU, below this process's own; None where
    none can be made."""
    made: list[Path] = []
    try:
        yield _make(made)
    finally:
        for path in reversed(made):
            _remove(path)


def _make(made: list[Path]) -> Path | None:
    for own in cgroups._groups(Path("/proc/self"), Path("/sys/fs/cgroup")):
        outer = own / f"numba_prefix_test_{os.getpid()}"
        with contextlib.suppress(OSError):
            outer.mkdir()
            made.append(outer)
            if (outer / "cpu.max").exists():
                (outer / "cpu.max").write_text("100000 100000")
            else:
                (outer / "cpu.cfs_period_us").write_text("100000")
                (outer / "cpu.cfs_quota_us").write_text("100000")
            inner = outer / "inner"
            inner.mkdir()
            made.append(inner)
            return inner
    return None


def _remove(path: Path) -> None:
    for _ in range(50):  # a process that has ended leaves its group a little later
        try:
            path.rmdir()
            return
        except OSError:
            time.sleep(0.05)
