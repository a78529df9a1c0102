"""The CPU time of every thread of this process during a call, read from the kernel."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

if "pinned" in sys.argv:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

from cases import make_case, run, same_bits

CASE = make_case([1400, 1400], [1400, 3000], head_num=8, kv_head_num=8, head_size=128)
STRAY = 2  # ticks of threads that end their earlier work, and of the host's


def ticks() -> dict[int, int]:
    """CPU time per thread id, in units of 10 ms."""
    result = {}
    for task in Path("/proc/self/task").iterdir():
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        result[int(task.name)] = int(fields[11]) + int(fields[12])
    return result


def helpers_time(**options: Any) -> tuple[int, Any]:
    """Ticks that threads other than the caller's spent in a call, and its result."""
    me, before = threading.get_native_id(), ticks()
    out = run(CASE, "cpu", **options)
    return sum(n - before.get(tid, 0) for tid, n in ticks().items() if tid != me), out


def per_call() -> None:
    _, expected = helpers_time()  # compiles
    for call in (lambda **o: helpers_time(**o), lambda **o: ThreadPoolExecutor(1).submit(helpers_time, **o).result()):
        spent, out = call(num_threads=1)
        assert spent <= STRAY, f"num_threads=1, and other threads spent {spent} ticks"
        same_bits(out, expected)
        spent, out = call(num_threads=2)
        assert spent > STRAY or len(os.sched_getaffinity(0)) == 1, "num_threads=2, and nobody helped"
        same_bits(out, expected)


def main(mode: str) -> None:
    _, expected = helpers_time()  # compiles
    if mode == "capped":
        spent, out = helpers_time()
        assert spent <= STRAY, f"capped to one thread, and others spent {spent} ticks"
        same_bits(out, expected)
    elif mode == "many":
        spent, out = helpers_time()
        same_bits(out, expected)
        out = helpers_time(num_threads=200)[1]
        same_bits(out, expected)
    elif mode == "mask":
        import numba

        most = numba.get_num_threads()
        for own in (1, most):
            numba.set_num_threads(own)
            helpers_time()
            assert numba.get_num_threads() == own
            try:
                run(CASE, "cpu", kv_seq_len=(1, 1))
            except ValueError:
                pass
            else:
                raise AssertionError("no error")
            assert numba.get_num_threads() == own
            numba.set_num_threads(own)
        in_pool = ThreadPoolExecutor(1).submit(
            lambda: (numba.set_num_threads(1), helpers_time(), numba.get_num_threads())
        )
        assert in_pool.result()[2] == 1
        assert np.isfinite(expected).all()


if __name__ == "__main__":
    main(sys.argv[1])
