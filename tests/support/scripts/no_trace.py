"""The process's state outside the operator: the same before the first call and after many of all
kinds."""

from __future__ import annotations

import ctypes
import gc
import locale
import os
import random
import signal
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numba
import numpy as np
from cases import DTYPES, make_case, run, with_mask

import numba_prefix as nbp

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

FORMS = ("causal", "none", "alibi_sqrt-generator", "alibi-template", "alibi_left_align-heads")
LIBM = ctypes.CDLL("libm.so.6") if sys.platform == "linux" else None


def openmp_threads() -> tuple[int, ...]:
    """Thread numbers of every GNU OpenMP that this process has loaded (torch brings its own)."""
    if sys.platform != "linux":
        return ()
    lines = Path("/proc/self/maps").read_text().splitlines()
    libraries = sorted({line.split()[-1] for line in lines if "libgomp" in line})
    return tuple(ctypes.CDLL(path).omp_get_max_threads() for path in libraries)


def float_control() -> tuple[Any, ...]:
    """Rounding direction, and whether subnormals survive as results and as operands."""
    tiny = np.float32(1e-38)
    with np.errstate(all="ignore"):
        results = (float(tiny / np.float32(4)), float(np.float32(1e-40) * np.float32(1e10)))
    return (LIBM.fegetround() if LIBM else None, results)


def state() -> dict[str, Any]:
    found: dict[str, Any] = {
        "numba threads": (numba.get_num_threads(), numba.config.NUMBA_NUM_THREADS, numba.config.DISABLE_JIT),
        "numba layer": numba.config.THREADING_LAYER,
        "environment": dict(os.environ),
        "warning filters": list(warnings.filters),
        "numpy errors": (np.geterr(), np.geterrcall(), np.getbufsize(), np.get_printoptions()),
        "random": (random.getstate(), str(np.random.get_state())),
        "handlers": {s: signal.getsignal(s) for s in signal.valid_signals()},
        "blocked signals": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "float control": float_control(),
        "hooks": (sys.excepthook, sys.unraisablehook, threading.excepthook, sys.gettrace(), sys.getprofile()),
        "interpreter": (
            sys.getrecursionlimit(),
            sys.getswitchinterval(),
            gc.get_threshold(),
            gc.isenabled(),
            gc.callbacks[:],
        ),
        "stack size": threading.stack_size(),
        "locale": locale.setlocale(locale.LC_ALL),
        "place": (os.getcwd(), os.umask(0o22)),
        "path": list(sys.path),
        "stdio": (sys.stdin, sys.stdout, sys.stderr),
    }
    os.umask(found["place"][1])
    if hasattr(os, "sched_getaffinity"):
        found["affinity"] = os.sched_getaffinity(0)
        found["descriptors"] = sorted(os.listdir("/proc/self/fd"))
        found["children"] = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
        found["priority"] = os.getpriority(os.PRIO_PROCESS, 0)
    if torch is not None:
        found["torch"] = (torch.get_num_threads(), torch.get_num_interop_threads(), torch.is_grad_enabled())
        found["torch random"] = torch.get_rng_state().tolist()
        found["torch default"] = (torch.get_default_dtype(), float(torch.tensor(1e-38) / 4))
    # torch sets its own for a thread at the thread's first operation.
    found["OpenMP threads"] = openmp_threads()
    return found


def calls() -> None:
    for dtype in DTYPES:
        for form in FORMS:
            case = with_mask(make_case([60, 1], [90, 1100], head_num=8, head_size=64, dtype=dtype), form)
            for num_threads in (1, 2):
                run(case, "cpu", num_threads=num_threads, return_lse=True)
    if torch is not None:
        lent()
    huge = make_case([3], [40], query=1e30, key=1e30, value=1e38)
    run(huge, "cpu")  # overflows
    run(make_case([3], [40], value=1e-40), "cpu")  # subnormals
    run(huge, "reference")
    for bad in ({"kv_seq_len": [1]}, {"block_tables": np.full((1, 9), 99, np.int32)}, {"target": "cuda"}, {"mask": 3}):
        try:
            nbp.prefix_encoder(**(huge.arguments() | {"target": "cpu"} | bad))
        except (TypeError, ValueError, RuntimeError):
            continue
        raise AssertionError(f"no error with {bad}")


def lent() -> None:
    """A call on PyTorch's threads."""
    query, page = torch.ones(200, 8, 64), torch.ones(1, 1200, 2, 64)
    table, out = torch.zeros((1, 1), dtype=torch.int32), torch.empty_like(query)
    context = nbp.Context(pool="torch", num_threads=3)
    _, op = nbp.self_attention_prefix_encoder_get_workspace_size(
        query, page, page, table, None, [200], [1200], None, "causal", 8, 2, 0.1, out, context
    )
    op.run()


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[Any]:
    return [(name, before[name], after[name]) for name in before if before[name] != after[name]]


def main() -> None:
    np.seterr(divide="raise", over="warn", under="ignore", invalid="print")
    warnings.filterwarnings("error", category=UserWarning, module="nobody")
    signal.signal(signal.SIGUSR1, lambda *_: None)
    if torch is not None:
        torch.set_num_threads(3)
    numba.set_num_threads(1)
    before = state()
    calls()
    assert not (found := differences(before, state())), found
    with ThreadPoolExecutor(1) as pool:  # the state of another thread
        before = pool.submit(state).result()
        pool.submit(calls).result()
        assert not (found := differences(before, pool.submit(state).result())), found
    if torch is not None and torch.set_flush_denormal(True):
        before = state()
        assert before["float control"][1] == (0.0, 0.0)
        calls()
        assert not (found := differences(before, state())), found
