"""children.py METHOD [host] [torch]: child processes of a method of multiprocessing, started after calls that had helpers.

host: the parent and the children also run a parallel function of their own, under $NUMBA_THREADING_LAYER (the children
only where that layer survives METHOD). torch: the children are workers of a DataLoader.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
from cases import make_case, run, same_bits

CASE = make_case([150, 60], [300, 400], head_num=8, kv_head_num=4, head_size=64, dtype="float16")


@numba.njit(parallel=True, cache=True)
def hosts_own(x: np.ndarray) -> float:
    total = 0.0
    for i in numba.prange(x.size):
        total += x[i]
    return total


def calls(threads: tuple[int, ...]) -> bytes:
    """The bits, the same with each number of threads, from this thread and from two others at once."""
    outs = [run(CASE, "cpu", num_threads=n) for n in threads]
    with ThreadPoolExecutor(2) as pool:
        outs += pool.map(lambda n: run(CASE, "cpu", num_threads=n), (2, 2))
    for out in outs:
        same_bits(out, outs[0])
    return outs[0].tobytes()


def child(threads: tuple[int, ...], is_host: bool) -> tuple[int, bytes]:
    if is_host:
        assert hosts_own(np.ones(1000)) == 1000.0
    return os.getpid(), calls(threads)


class Batches:
    """A torch data set whose items are computed by the operator."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return np.frombuffer(bytearray(calls((2,))), np.uint8)


def main() -> None:
    method, *flags = sys.argv[1:]
    expected = calls((2, 1, 4))
    # GNU OpenMP kills a forked child at its own parallel region, workqueue has no threads there: Numba's known limits.
    is_host_in_child = "host" in flags and method == "spawn"
    if "host" in flags:
        assert hosts_own(np.ones(100_000)) == 100_000.0
        assert numba.threading_layer() == os.environ["NUMBA_THREADING_LAYER"]
    if "torch" in flags:
        import torch

        assert torch.ones(300, 300).mm(torch.ones(300, 300)).sum() == 300**3  # brings up its OpenMP threads
        loader = torch.utils.data.DataLoader(Batches(), batch_size=None, num_workers=2, multiprocessing_context=method)
        results = [bytes(item.numpy()) for item in loader]
        assert len(results) == 4 and set(results) == {expected}
    else:
        context = multiprocessing.get_context(method)
        with ProcessPoolExecutor(2, mp_context=context) as pool:
            done = [pool.submit(child, threads, is_host_in_child) for threads in ((2,), (1, 2), (4,), (2, 1))]
            results = [future.result(timeout=120) for future in done]
            assert os.getpid() not in {pid for pid, _ in results}
            assert {out for _, out in results} == {expected}
    assert calls((2, 1)) == expected
    assert all(t.daemon or t is threading.main_thread() for t in threading.enumerate())
    print("right")


if __name__ == "__main__":
    main()
