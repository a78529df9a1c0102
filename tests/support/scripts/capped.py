"""capped.py [quota]: the package's own cap in every thread and in forked children, beside a
parallel function of the host.

Checks how many workers each call is given, and that no helper, a thread named numba_prefix, exists
while the cap is one. quota: the process is limited to one CPU by its cgroup.
"""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
from cases import make_case, run, same_bits

import numba_prefix as nbp
from numba_prefix.cpu import target

CASE = make_case([150, 60], [300, 400], head_num=8, kv_head_num=4, head_size=64, dtype="float16")
ONES = np.ones(100_000)
num_workers: list[int] = []
run_together = target.run_together


def watched(task: Any, count: int) -> None:
    num_workers.append(count)
    run_together(task, count)


target.run_together = watched


@numba.njit(parallel=True, cache=True)
def hosts_own(x: np.ndarray) -> float:
    total = 0.0
    for i in numba.prange(x.size):
        total += x[i]
    return total


def num_helpers() -> int:
    return sum(thread.name == "numba_prefix" for thread in threading.enumerate())


def plan(num_threads: int) -> tuple[nbp.Op, np.ndarray]:
    out = np.full_like(CASE.query, np.nan)
    heads = {"head_num": None, "kv_head_num": None}
    arguments = CASE.arguments() | heads | {"attn_out": out, "context": nbp.Context("cpu", num_threads)}
    return nbp.self_attention_prefix_encoder_get_workspace_size(**arguments)[1], out


def calls(expected: np.ndarray, planned: tuple[nbp.Op, np.ndarray] | None = None) -> None:
    for num_threads in (None, 1, 4):
        same_bits(run(CASE, "cpu", num_threads=num_threads), expected)
    if planned is not None:
        op, out = planned
        out[...] = np.nan
        op.run()
        same_bits(out, expected)


def in_a_forked_child(expected: np.ndarray) -> None:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            assert nbp.get_num_threads() == 1
            calls(expected)
            status = int(num_helpers() != 0)
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0


def main() -> None:
    cpus = nbp.get_num_threads()
    assert cpus == 1 if "quota" in sys.argv else cpus <= 2  # NUMBA_NUM_THREADS=2
    before = numba.get_num_threads()
    assert hosts_own(ONES) == ONES.size
    planned = plan(4)
    expected = run(CASE, "cpu", num_threads=1)
    nbp.set_num_threads(1)
    in_a_forked_child(expected)  # first: TBB says something at forks once two threads have used it
    nbp.set_num_threads(None)
    stop, done = threading.Event(), []

    def most_workers(cap: int) -> None:
        num_workers.clear()
        calls(expected, planned)
        assert max(num_workers) == cap and len(num_workers) == 4, num_workers

    def beside() -> None:
        while not stop.is_set():
            done.append(hosts_own(ONES) == ONES.size)

    other = threading.Thread(target=beside)
    other.start()
    try:
        if cpus == 1:
            run(CASE, "cpu")
            assert num_helpers() == 0
        with ThreadPoolExecutor(3) as pool:
            pool.submit(nbp.set_num_threads, 1).result()  # a thread sets the process's cap
            for _ in pool.map(lambda _: calls(expected), range(9)):
                pass
            assert num_helpers() == 0 and nbp.get_num_threads() == 1
            most_workers(1)
            nbp.set_num_threads(2)
            most_workers(2)
            assert num_helpers() > 0
            os.environ["NUMBA_PREFIX_NUM_THREADS"] = "3"
            nbp.set_num_threads(None)
            most_workers(3)
    finally:
        stop.set()
        other.join()
    assert len(done) > 1 and all(done)
    assert numba.get_num_threads() == before
    layer = numba.threading_layer()
    assert layer == os.environ.get("NUMBA_THREADING_LAYER", layer)


main()
print("right")
