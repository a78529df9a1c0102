"""Calls with helpers from the threads of a host's own pool, while another thread runs the host's parallel function.

Where the host's layer allows it ("everywhere"), the pool's threads run that function too, between their calls.
"""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
from cases import make_case, run, same_bits

CASES = [
    make_case([100 + n, 1], [300, 700], head_num=8, kv_head_num=4, head_size=64, dtype="bfloat16", seed=n)
    for n in range(4)
]
ONES = np.ones(100_000)


@numba.njit(parallel=True, cache=True)
def hosts_own(x: np.ndarray) -> float:
    total = 0.0
    for i in numba.prange(x.size):
        total += x[i]
    return total


expected = [run(case, "cpu", num_threads=1) for case in CASES]
assert hosts_own(ONES) == ONES.size
stop, done = threading.Event(), 0


def beside() -> None:
    global done
    while not stop.is_set():
        assert hosts_own(ONES) == ONES.size
        done += 1


def task(index: int) -> None:
    same_bits(run(CASES[index % 4], "cpu", num_threads=2 + index % 3), expected[index % 4])
    if "everywhere" in sys.argv:
        assert hosts_own(ONES) == ONES.size


threads = numba.get_num_threads()
other = threading.Thread(target=beside)
other.start()
try:
    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(task, range(80)):
            pass
finally:
    stop.set()
    other.join()
assert done > 1
assert numba.get_num_threads() == threads
assert numba.threading_layer() == os.environ["NUMBA_THREADING_LAYER"]
print("right")
