"""Long calls that something ends. The exception comes soon, the next call is right, and so are
those that other threads make meanwhile.

ctrl_c: SIGINT. alarm: an exception of a signal handler, as servers use for time limits. async: an
exception set in one thread by another. bad_ids: an error of one thread's arguments. exit: the
interpreter ends while daemon threads compute.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cases import make_case, run, same_bits

import numba_prefix as nbp

SMALL = make_case([90, 1], [300, 700], head_num=8, kv_head_num=4, head_size=64, dtype="float16")
# 2.2 GFLOP, about cpu.plan.FLOPS_PER_VISIT at the assumed speed
VISIT = make_case([600], [1200], head_num=8, head_size=128, dtype="float16")
SOON = 2.0
expected: list[Any] = []


def next_call_is_right() -> None:
    same_bits(run(SMALL, "cpu", num_threads=2), expected[0])


class TimeLimit(Exception): ...


def long_call(num_threads: int, rows: int = 4096, tokens: int = 1 << 17, batch: int = 1) -> Callable[[], None]:
    """A minute of work or more in little memory: all blocks of the table are one block."""
    rng = np.random.default_rng(0)
    query = rng.standard_normal((batch * rows, 16, 128)).astype(np.float16)
    page = rng.standard_normal((1, 128, 1, 128)).astype(np.float16)
    table = np.zeros((batch, tokens // 128), np.int32)

    def call() -> None:
        lengths = [rows] * batch, [tokens] * batch
        nbp.prefix_encoder(query, page, page, table, *lengths, num_threads=num_threads, target="cpu")
        raise AssertionError("the long call came to its end")

    return call


def ended_by(
    error: type[BaseException], start: Callable[[], Any], call: Callable[[], None], limit: float = SOON
) -> None:
    """Check that `error`, which start() has raised here 0.3 s later, ends call() soon (later on a
    busy machine)."""
    limit += 4 * seconds_of_a_visit()
    begin = time.perf_counter()
    start()
    try:
        call()
    except error:
        took = time.perf_counter() - begin - 0.3
        assert took < limit, f"{error.__name__} {took} s late"
    next_call_is_right()


def seconds_of_a_visit() -> float:
    """Time, about, that a thread now spends inside compiled code before it looks at signals."""
    begin = time.perf_counter()
    run(VISIT, "cpu", num_threads=1)
    return time.perf_counter() - begin


def others(stop: threading.Event, failures: list[BaseException]) -> list[threading.Thread]:
    def work() -> None:
        try:
            while not stop.is_set():
                next_call_is_right()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    return threads


def interrupt() -> None:
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()


def alarm() -> None:
    def handler(*_: Any) -> None:
        raise TimeLimit

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)


def set_async() -> None:
    me = threading.get_ident()
    set_exc = ctypes.pythonapi.PyThreadState_SetAsyncExc
    threading.Timer(0.3, set_exc, (ctypes.c_ulong(me), ctypes.py_object(TimeLimit))).start()


def bad_ids() -> None:
    for _ in range(20):
        with pytest.raises(ValueError, match="block_tables"):
            run(SMALL, "cpu", block_tables=SMALL.block_tables + 1000)
        next_call_is_right()


def main(mode: str) -> None:
    expected[:] = [run(SMALL, "cpu", num_threads=1)]
    if mode == "exit":
        for n in (1, 2):
            threading.Thread(target=long_call(n), daemon=True).start()
        time.sleep(0.3)
        return
    stop, failures = threading.Event(), []
    beside = others(stop, failures) if mode in ("async", "bad_ids") else []
    try:
        if mode == "bad_ids":
            bad_ids()
        else:
            start = {"ctrl_c": interrupt, "alarm": alarm, "async": set_async}[mode]
            error = KeyboardInterrupt if mode == "ctrl_c" else TimeLimit
            limit = SOON * 3 if beside else SOON  # other threads have their part of the CPUs
            for num_threads in (1, 2):
                ended_by(error, start, long_call(num_threads), limit)
            ended_by(error, start, long_call(2, rows=1, tokens=1 << 22, batch=16), limit)  # a split
    finally:
        stop.set()
        for thread in beside:
            thread.join()
    assert not failures, failures[0]
