"""How many threads a call may use."""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path


def available_cpus() -> int:
    """CPUs this process may run on: its affinity, capped by a cgroup's CPU quota (versions 1 and 2)."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota()
    return max(1, min(cpus, math.ceil(quota)) if quota is not None else cpus)


@functools.cache
def _cgroup_quota() -> float | None:
    def numbers(path: str) -> list[float]:
        try:
            return [float(word) for word in Path(path).read_text().split()]
        except (OSError, ValueError):  # absent, or "max"
            return []

    v2 = numbers("/sys/fs/cgroup/cpu.max")
    if len(v2) == 2:
        return v2[0] / v2[1]
    quota, period = numbers("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), numbers("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
    if quota and period and quota[0] > 0:
        return quota[0] / period[0]
    return None


def default_num_threads() -> int:
    """available_cpus(), capped by NUMBA_NUM_THREADS if that is set to a number."""
    cap = os.environ.get("NUMBA_NUM_THREADS", "")
    cpus = available_cpus()
    return max(1, min(cpus, int(cap))) if cap.isdigit() and int(cap) > 0 else cpus
