"""Eight threads behind a barrier, fifty calls each, the first one perhaps not compiled yet.

The same follows beside a parallel function of the host's own.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from cases import assert_close, make_case, run, same_bits

THREADS, CALLS = 8, 50
FORMS = [
    make_case([n, 1], [n + 200, 90 + n], head_num=4, kv_head_num=2, head_size=32, dtype="float16", seed=n)
    for n in range(1, THREADS + 1)
]


def work(index: int, barrier: threading.Barrier) -> None:
    case = FORMS[index]
    barrier.wait()
    first = run(case, "cpu")
    assert_close(first, case)
    for _ in range(CALLS - 1):
        same_bits(run(case, "cpu"), first)


def together() -> None:
    barrier = threading.Barrier(THREADS)
    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(work, index, barrier) for index in range(THREADS)]:
            done.result()


together()

import numba  # noqa: E402

try:
    used = numba.threading_layer()
except ValueError:
    used = None
assert used is None, f"the package brought up Numba's threading layer {used}"

from hosts import ONES, bring_up, hosts_own  # noqa: E402

bring_up()
stop, calls = threading.Event(), []


def busy() -> None:
    while not stop.is_set():
        assert hosts_own(ONES) == ONES.size
        calls.append(1)


beside = threading.Thread(target=busy)
beside.start()
together()
stop.set()
beside.join()
assert len(calls) > 1
print("right")
