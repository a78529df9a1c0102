"""The number of threads that a call may use. Imports no Numba."""

from __future__ import annotations

import functools
import math
import os
from typing import Any

import numpy as np

from numba_prefix.runtime.cgroups import cpu_quota

VARIABLE = "NUMBA_PREFIX_NUM_THREADS"

_own_cap: int | None = None
# Read once, because reading takes longer than planning a call. A forked child may be moved to a
# group of its own.
quota = functools.cache(cpu_quota)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=quota.cache_clear)


def set_num_threads(num_threads: int | None) -> None:
    """Let no call of this process use more than num_threads threads from now on, from any thread;
    None removes the cap.

    The caller's thread counts as one. Running calls and other caps (NUMBA_PREFIX_NUM_THREADS,
    num_threads of a call) are left as they are: the smallest of all caps holds. Forked children
    inherit it. Raises TypeError and ValueError for anything but None and integers of at least 1.
    """
    global _own_cap  # noqa: PLW0603 - one number for the process, as affinity is
    _own_cap = None if num_threads is None else checked(num_threads)


def get_num_threads() -> int:
    """Threads that a call without num_threads may use now: the CPUs of this process's affinity and
    cgroup quota, capped by NUMBA_NUM_THREADS, NUMBA_PREFIX_NUM_THREADS and set_num_threads.

    Raises ValueError if NUMBA_PREFIX_NUM_THREADS is set to something else than an integer of at
    least 1.
    """
    # Junk in this variable is for Numba to complain about.
    numbas = _positive(os.environ.get("NUMBA_NUM_THREADS", ""))
    cpus = available_cpus()
    return capped(min(cpus, numbas) if numbas else cpus)


def resolved(num_threads: Any) -> int:
    """Threads for a call that asked for num_threads: possibly more than there are CPUs, but not
    more than the cap."""
    return get_num_threads() if num_threads is None else capped(checked(num_threads))


def capped(num_threads: int) -> int:
    cap, _ = thread_cap()
    return num_threads if cap is None else min(num_threads, cap)


def thread_cap() -> tuple[int | None, str | None]:
    """The cap of all calls and its source: NUMBA_PREFIX_NUM_THREADS or set_num_threads, the smaller
    of the two."""
    own = _own_cap  # read once: another thread may set it
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return own, None if own is None else "set_num_threads"
    variables = _positive(text)
    if not variables:
        raise ValueError(f"{VARIABLE}: got {text[:40]!r}, expected an integer of at least 1")
    return (own, "set_num_threads") if own is not None and own < variables else (variables, VARIABLE)


def _positive(text: str) -> int:
    """The number, or 0 for anything but the digits of a number that fits in an int64."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else 0


def checked(num_threads: Any) -> int:
    if isinstance(num_threads, bool) or not isinstance(num_threads, (int, np.integer)):
        raise TypeError(f"num_threads: got {type(num_threads).__name__}, expected an int or None")
    if num_threads < 1:
        raise ValueError(f"num_threads: got {num_threads}, expected at least 1")
    return int(num_threads)


def available_cpus() -> int:
    """CPUs this process may run on: its affinity, capped by the CPU quotas of its cgroups."""
    cpus, limit = allowed_cpus(), quota()
    return cpus if limit is None else max(1, min(cpus, math.ceil(limit)))


def allowed_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
