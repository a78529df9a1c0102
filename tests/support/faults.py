"""The faults that a service can meet, and their outcomes: one JSON line per case in the file that
$NUMBA_PREFIX_FAULT_LOG names.

`python tests/support/fault_table.py FILE` makes the README's table of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator

import pytest

VARIABLE = "NUMBA_PREFIX_FAULT_LOG"
ANY_LAYER = "any"
RIGHT = "right result"
NOT_INSTALLED = "not installed"

# Key: the fault, and the outcome if all is well; in the order of the README's table.
FAULTS = {
    "pool": ("calls from the host's thread pool beside its own parallel function", RIGHT),
    "per_call": ("`num_threads=1` and `num_threads=2` in one process: nobody helps, somebody does", RIGHT),
    "soak": ("random problems and errors from several threads (bits compared)", RIGHT),
    "denormals": ("threads of the host that flush subnormals", RIGHT),
    "fork": ("fork after calls and a parallel region of the host", RIGHT),
    "spawn": ("spawn after the same", RIGHT),
    "forkserver": ("forkserver after the same", RIGHT),
    "fork_busy": ("fork while another thread is inside a call", RIGHT),
    "fork_first": ("fork while another thread makes the first call", RIGHT),
    "loader": ("forked DataLoader workers, torch's OpenMP up in the parent", RIGHT),
    "gunicorn": ("gunicorn (preload, threads), workers killed and replaced under load", RIGHT),
    "exit": ("exit while daemon threads are inside calls", "clean exit"),
    "exit_first": ("exit while a daemon thread makes the first call, which compiles", "clean exit"),
    "cold": ("first calls of 8 threads in each of 4 processes at once, one empty cache", RIGHT),
    "nowhere": ("no writable HOME, read-only site-packages, PYTHONDONTWRITEBYTECODE", RIGHT),
    "zip": ("import from a zip, cache directory read-only and empty", RIGHT),
    "read_only": ("cache directory read-only, with a part of the kernels", RIGHT),
    "full_disk": ("cache directory on a full disk", RIGHT),
    "truncated": ("truncated cache files", RIGHT),
    "foreign": ("cache files of another kernel, or of nothing known, under our names", RIGHT),
    "other_cpu": ("a cache made on another CPU", RIGHT),
    "boundscheck": ("`NUMBA_BOUNDSCHECK=1`", RIGHT),
    "disable_jit": ("`NUMBA_DISABLE_JIT=1`", RIGHT),
    "guard": ("every buffer (out, lse, workspace too) between guard pages, inputs read-only", RIGHT),
    "guard_others": ("the same for reshape_and_cache and merge_states", RIGHT),
    "block_ids": ("a bad block id in any place that would be read (nothing is written)", "ValueError"),
    "arguments": ("senseless arguments", "documented exception"),
    "npz": ("damaged npz files on the command line", "exit code 2"),
    "ctrl_c": ("Ctrl-C during a long call (soon; next call right)", "KeyboardInterrupt"),
    "ctrl_c_first": ("Ctrl-C again and again during the first call (within 2 s; next call right)", "KeyboardInterrupt"),
    "alarm": ("exception of a signal handler during a long call (soon; next call right)", "that exception"),
    "async": ("exception set in a thread during its call (soon; other threads right)", "that exception"),
    "bad_ids": ("bad arguments in one thread (other threads right)", "ValueError"),
    "capped": ("package-wide cap, num_threads and cgroup quota", RIGHT),
    "no_trace": (
        "thread counts, environment, handlers, filters, numpy's error state, float mode afterwards",
        "unchanged",
    ),
}


@contextlib.contextmanager
def fault(key: str, layer: str = ANY_LAYER) -> Iterator[None]:
    """Log the body's outcome: it tests a fault under one of Numba's threading layers."""
    name, outcome = FAULTS[key]
    try:
        yield
    except pytest.skip.Exception:
        _write(name, layer, NOT_INSTALLED)
        raise
    except BaseException as error:
        _write(name, layer, _failure(str(error)))
        raise
    _write(name, layer, outcome)


def _failure(text: str) -> str:
    if "no end after" in text:
        return "hung"
    died = re.search(r"exit status -(\d+)", text)
    return f"aborted (signal {died[1]})" if died else "FAILED"


def _write(name: str, layer: str, outcome: str) -> None:
    path = os.environ.get(VARIABLE)
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"fault": name, "layer": layer, "outcome": outcome}) + "\n")
