"""service.py FOLDER FAULT…: a service's outcome under each fault.

Each fault has a process of its own, forked before any call, whose host has had a parallel region
under $NUMBA_THREADING_LAYER. Prints a JSON line per fault: its name, "status" (an exit status,
minus a signal, or "hung"), "seconds" of CPU time, and the process's output.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

LIMIT = 60.0
# Fault: module and function, with its arguments.
FAULTS: dict[str, tuple[Any, ...]] = {
    "no_trace": ("no_trace", "main"),
    "pool": ("host_pool", "main"),
    "per_call": ("thread_caps", "per_call"),
    "soak": ("soak", "short"),
    "denormals": ("float_modes", "main"),
    "fork": ("children", "main", "fork"),
    "spawn": ("children", "main", "spawn"),
    "forkserver": ("children", "main", "forkserver"),
    "loader": ("children", "loader", "fork"),
    "fork_busy": ("fork_after_call", "main"),
    "guard": ("guard_pages", "quick", "cpu"),
    "guard_others": ("guard_pages", "others"),
    "block_ids": ("bad_input", "block_ids"),
    "arguments": ("bad_input", "senseless_arguments"),
    "npz": ("bad_input", "damaged_files"),
    "ctrl_c": ("interrupted", "main", "ctrl_c"),
    "alarm": ("interrupted", "main", "alarm"),
    "async": ("interrupted", "main", "async"),
    "bad_ids": ("interrupted", "main", "bad_ids"),
    "exit": ("interrupted", "main", "exit"),
    "read_only": ("caches", "read_only"),
    "full_disk": ("caches", "full_disk"),
    "truncated": ("caches", "truncated"),
    "foreign": ("caches", "foreign"),
    "other_cpu": ("caches", "other_cpu"),
    "ctrl_c_first": ("caches", "ctrl_c"),
    "exit_first": ("caches", "exit"),
}


def begin(name: str, output: Path) -> None:
    with output.open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    from hosts import bring_up

    bring_up()
    module, function, *arguments = FAULTS[name]
    sys.exit(getattr(importlib.import_module(module), function)(*arguments))


def end(pid: int) -> tuple[int | str, float]:
    """Wait for the process, or kill it after LIMIT. Returns its status and its CPU time."""
    limit = time.monotonic() + LIMIT
    while time.monotonic() < limit:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hung", LIMIT


def main(folder: str, *names: str) -> None:
    import cases  # noqa: F401
    import numba

    with contextlib.suppress(ImportError):
        import torch  # noqa: F401
    # Numba's own first compilation, which needs no threading layer. Objects made here are not
    # scanned in every child's collections: together 1.3 s of the 1.8 s that a child would take to
    # begin and end.
    numba.njit(lambda x: x + 1.0)(1.0)
    gc.collect()
    gc.freeze()
    for name in names:
        output = Path(folder) / f"{name}.txt"
        pid = os.fork()
        if pid == 0:
            return begin(name, output)  # and to the end of the interpreter
        status, seconds = end(pid)
        said = output.read_text(errors="replace")[-6000:]
        print(json.dumps({"fault": name, "status": status, "seconds": seconds, "output": said}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
