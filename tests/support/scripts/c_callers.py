"""c_callers.py MODE LIBRARY: caller.c, compiled as LIBRARY, calls numba_prefix.

threads: from eight threads that Python did not start. signal: a signal arrives while C code runs.
after: C code calls once the interpreter has ended. Without a LIBRARY, ctrl_c: Ctrl-C during the
computation; fork: calls in a child of a process that has made some.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
import warnings
from typing import Any

import c_side
import numpy as np
from cases import DTYPES, Case, make_case, run, same_bits, with_mask

from numba_prefix import capi
from numba_prefix.capi.status import Status

THREADS, CALLS = 8, 5
_P = ctypes.c_void_p


class Problem(ctypes.Structure):
    _fields_ = (
        *((name, _P) for name in c_side.TENSORS),
        *(("maskType", ctypes.c_int), ("headNum", ctypes.c_int32), ("kvHeadNum", ctypes.c_int32)),
        *(("qkScale", ctypes.c_float), ("outBytes", ctypes.c_uint64)),
    )


class Stop(BaseException): ...


def from_threads(library: Any, case: Case) -> None:
    out = c_side.nan_like(case.query)
    arguments = c_side.problem(case, out)
    given = {name: c_side.address(arguments[name]) for name in c_side.TENSORS}
    given |= {name: arguments[name] for name in ("maskType", "headNum", "kvHeadNum", "qkScale")}
    problem = Problem(**given, outBytes=out.nbytes)
    c_side.compute(arguments)
    same_bits(out, run(case, "cpu"))
    line = library.call_from_threads(_P(c_side.api.table), ctypes.byref(problem), THREADS, CALLS)
    assert line == 0, f"caller.c:{line}"


def threads(library: Any) -> None:
    for dtype, form in zip(DTYPES, ("causal", "alibi_sqrt-generator", "alibi-template"), strict=True):
        case = make_case([65, 1, 0, 9], [165, 90, 3, 900], head_num=8, kv_head_num=2, head_size=64, dtype=dtype)
        assert case.qk_scale == np.float32(case.qk_scale)
        from_threads(library, with_mask(case, form))
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("Dummy")
    ]  # C's threads leave no trace


def raise_stop(*_: object) -> None:
    raise Stop


def signals(library: Any) -> None:
    signal.signal(signal.SIGTERM, raise_stop)
    for number, error in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Stop)):
        line = None
        try:
            line = library.call_with_a_signal(_P(c_side.api.table), int(number))
            _ = [None for _ in range(3)]
        except error:
            pass
        else:
            raise AssertionError(f"{error.__name__} was lost")
        assert line in (None, 0), f"caller.c:{line}"
        assert error.__name__ in c_side.last_error()
        assert c_side.destroy(1) == Status.ERROR_INVALID_OPERATION_ADDR  # the next call works


def ctrl_c() -> None:
    assert capi.load(warmup=True) is c_side.api
    rng = np.random.default_rng(0)
    # A minute of work or more in little memory: all blocks of the table are one block.
    rows, tokens = 4096, 1 << 17
    query = rng.standard_normal((rows, 16, 128)).astype(np.float16)
    page = rng.standard_normal((1, 128, 1, 128)).astype(np.float16)
    table = np.zeros((1, tokens // 128), np.int32)
    case = Case(query, (), (), page, page, table, (rows,), (tokens,))
    arguments = c_side.problem(case, np.empty_like(query))  # kept: the operation writes to it
    status, size, op = c_side.plan(arguments)
    assert status == Status.NO_ERROR, c_side.last_error()
    workspace = np.empty(size, np.uint8)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.perf_counter()
    try:
        status = c_side.run(workspace, size, op)
        _ = [None for _ in range(3)]
    except KeyboardInterrupt:
        assert time.perf_counter() - began < 10.0
    else:
        raise AssertionError(f"KeyboardInterrupt was lost, status {status}")
    assert "KeyboardInterrupt" in c_side.last_error()
    assert c_side.destroy(op) == Status.NO_ERROR


def forked() -> None:
    case = make_case([65, 1], [165, 90], head_num=8, kv_head_num=2, head_size=64, dtype="float16")
    expected, out = run(case, "cpu"), c_side.nan_like(case.query)
    arguments = c_side.problem(case, out)
    c_side.compute(arguments)
    # Newer Pythons warn of a fork beside threads.
    warnings.simplefilter("ignore", DeprecationWarning)
    child = os.fork()
    out[...] = np.nan
    c_side.compute(arguments)
    same_bits(out, expected)
    if child == 0:
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def main(mode: str, *path: str) -> None:
    if not path:
        {"ctrl_c": ctrl_c, "fork": forked}[mode]()
    else:
        library = ctypes.CDLL(*path)
        if mode == "after":
            assert library.call_after_the_interpreter(_P(c_side.api.table)) == 0
        else:
            {"threads": threads, "signal": signals}[mode](library)
    print("right")


main(*sys.argv[1:])
