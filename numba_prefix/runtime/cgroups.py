"""The CPU time that Linux control groups grant this process."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_V2 = ""  # /proc/self/cgroup names no controller for the unified hierarchy
_ESCAPE = re.compile(r"\\([0-7]{3})")


def cpu_quota(proc: Path = Path("/proc/self"), usual: Path = Path("/sys/fs/cgroup")) -> float | None:
    """CPUs' worth of time that this process may use: the smallest quota of its control group and of
    all groups above it, in both versions and mixtures of them. None if nothing limits it; an
    unreadable quota is no limit.

    proc: has `cgroup` and `mountinfo`. usual: where hierarchies are mounted if mountinfo cannot be
    read.
    """
    quotas = [quota for group in _groups(proc, usual) if (quota := _quota(group)) is not None]
    return min(quotas, default=None)


def _groups(proc: Path, usual: Path) -> Iterator[Path]:
    """Directories of this process's groups and of those above them, as far as they are mounted
    here."""
    paths = {
        controller: path
        for _, controllers, path in (line.split(":", 2) for line in _lines(proc / "cgroup") if line.count(":") >= 2)
        for controller in controllers.split(",")
    }
    for controller, root, mount_point in _mounts(proc, usual):
        path = PurePosixPath(paths.get(controller, root))
        # Other paths belong to other groups: a mount of theirs, or a group outside of this
        # namespace ("/../x").
        if path.is_relative_to(root) and ".." not in path.parts:
            below = path.relative_to(root)
            yield from (mount_point / group for group in (below, *below.parents))


def _mounts(proc: Path, usual: Path) -> list[tuple[str, str, Path]]:
    """(controller, group that is mounted, mount point) of each hierarchy that has CPU quotas."""
    found = []
    lines = _lines(proc / "mountinfo")
    for line in lines:
        mount, _, kind = line.partition(" - ")
        mount_fields, kind_fields = mount.split(" "), kind.split(" ")
        if len(mount_fields) < 5 or len(kind_fields) < 3:
            continue
        root, mount_point = (_ESCAPE.sub(lambda m: chr(int(m[1], 8)), text) for text in mount_fields[3:5])
        if kind_fields[0] == "cgroup2":
            found.append((_V2, root, Path(mount_point)))
        elif kind_fields[0] == "cgroup" and "cpu" in kind_fields[2].split(","):
            found.append(("cpu", root, Path(mount_point)))
    if lines:
        return found
    return [(_V2, "/", usual), ("cpu", "/", usual / "cpu"), ("cpu", "/", usual / "cpu,cpuacct")]


def _quota(group: Path) -> float | None:
    lines = _lines(group / "cpu.max") or [*_lines(group / "cpu.cfs_quota_us"), *_lines(group / "cpu.cfs_period_us")]
    try:
        quota, period = map(int, " ".join(lines).split())
        return quota / period if quota > 0 and period > 0 else None
    except (ValueError, OverflowError):  # "max", or no numbers at all
        return None


def _lines(path: Path) -> list[str]:
    try:
        return os.fsdecode(path.read_bytes()).splitlines()
    except (OSError, ValueError):
        return []
