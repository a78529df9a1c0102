"""Calls on PyTorch's threads, ended or forked in the middle. The next call is right, and torch is
unchanged."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import make_case, run, same_bits

import numba_prefix as nbp
from numba_prefix.cpu.kernel import work_loop
from numba_prefix.runtime import openmp

CASE = make_case([200, 100], [300, 400], head_num=8, head_size=64)
LENT = nbp.Context(target="cpu", num_threads=2, pool="torch")
SOON = 3.0
lent: list[bool] = []


def watched(run: Callable[..., None]) -> Callable[..., None]:
    def noted(*arguments: Any) -> None:
        lent.append(True)
        run(*arguments)

    return noted


def call(case: Any = CASE, context: Any = LENT) -> Any:
    out = np.full_like(case.query, np.nan)
    given = case.arguments()
    _, op = nbp.self_attention_prefix_encoder_get_workspace_size(
        *(given.get(name) for name in ("query", "key", "value", "block_tables", "mask", "seq_len", "kv_seq_len")),
        *(given.get(name) for name in ("slopes", "mask_type", "head_num", "kv_head_num", "qk_scale")), out, context,
    )  # fmt: skip
    op.run()
    return out


def is_right(expected: Any, is_lent: bool) -> None:
    lent.clear()
    same_bits(call(), expected)
    assert bool(lent) == is_lent
    assert torch.get_num_threads() == 2
    assert int(torch.ones(1 << 20, dtype=torch.int64).sum()) == 1 << 20


def fork(expected: Any) -> None:
    """Fork: in the child PyTorch's threads are missing, so that it takes its own."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            lent.clear()
            same_bits(call(), expected)
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
            status = 2 if lent else 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def interrupted(expected: Any) -> None:
    """Interrupt calls of a minute, by two Ctrl-C in a row."""
    rng = np.random.default_rng(0)
    query = rng.standard_normal((4096, 16, 128)).astype(np.float16)
    page = rng.standard_normal((1, 128, 1, 128)).astype(np.float16)
    table, tokens = np.zeros((1, 1024), np.int32), 1 << 17
    _, op = nbp.self_attention_prefix_encoder_get_workspace_size(
        query, page, page, table, None, [4096], [tokens], None, "causal", 16, 1, 1.0, np.empty_like(query), LENT
    )
    for _ in range(2):
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        begin = time.perf_counter()
        with pytest.raises(KeyboardInterrupt):
            op.run()
        assert time.perf_counter() - begin < 0.3 + SOON
        is_right(expected, True)


def handled(expected: Any) -> None:
    """Call from a signal handler too: within the other call it takes its own threads, or none."""
    seen = []

    def handler(*_: Any) -> None:
        seen.append(call())
        signal.setitimer(signal.ITIMER_REAL, 0.01)

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    try:
        until = time.perf_counter() + 1.0
        while time.perf_counter() < until:
            same_bits(call(), expected)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert seen
    for out in seen:
        same_bits(out, expected)
    is_right(expected, True)


def from_threads(expected: Any) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                same_bits(call(), expected)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def main(mode: str) -> None:
    torch.set_num_threads(2)
    torch.ones(1 << 20).sum()
    expected = run(CASE, "cpu", num_threads=1)
    team = openmp.team(work_loop.drain)
    if team is None:
        print("PyTorch's threads cannot be had here")
        return
    openmp.Team.run = watched(openmp.Team.run)  # type: ignore[method-assign]
    is_right(expected, True)
    {"fork": fork, "interrupted": interrupted, "handled": handled, "threads": from_threads}[mode](expected)
    is_right(expected, True)
    print("right")


main(sys.argv[1])
