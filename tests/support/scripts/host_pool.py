"""Calls with helpers from the threads of a host's own pool, while another thread runs the host's
parallel function.

Where the host's layer allows more than one user, the pool's threads run that function too, between
their calls.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numba
from cases import make_case, run, same_bits
from hosts import ONES, bring_up, hosts_own

CASES = [
    make_case([100 + n, 1], [300, 700], head_num=8, kv_head_num=4, head_size=64, dtype="bfloat16", seed=n)
    for n in range(4)
]


def main() -> None:
    layer = bring_up()
    expected = [run(case, "cpu", num_threads=1) for case in CASES]
    threads, stop, done = numba.get_num_threads(), threading.Event(), []

    def beside() -> None:
        while not stop.is_set():
            assert hosts_own(ONES) == ONES.size
            done.append(1)

    def task(index: int) -> None:
        same_bits(run(CASES[index % 4], "cpu", num_threads=2 + index % 3), expected[index % 4])
        if layer != "workqueue":
            assert hosts_own(ONES) == ONES.size

    other = threading.Thread(target=beside)
    other.start()
    try:
        with ThreadPoolExecutor(4) as pool:
            for _ in pool.map(task, range(60)):
                pass
    finally:
        stop.set()
        other.join()
    assert len(done) > 1
    assert numba.get_num_threads() == threads
    assert numba.threading_layer() == layer
