"""Child processes of a method of multiprocessing, started after calls that had helpers and a
parallel region of the host."""

from __future__ import annotations

import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import numpy as np
from cases import make_case, run, same_bits
from hosts import bring_up

CASE = make_case([150, 60], [300, 400], head_num=8, kv_head_num=4, head_size=64, dtype="float16")


def calls(threads: tuple[int, ...]) -> bytes:
    """Compare the bits with each number of threads, from this thread and from two others at
    once."""
    outs = [run(CASE, "cpu", num_threads=n) for n in threads]
    with ThreadPoolExecutor(2) as pool:
        outs += pool.map(lambda n: run(CASE, "cpu", num_threads=n), (2, 2))
    for out in outs:
        same_bits(out, outs[0])
    return outs[0].tobytes()


def child(threads: tuple[int, ...], is_host: bool) -> tuple[int, bytes]:
    if is_host:
        bring_up()
    return os.getpid(), calls(threads)


class Batches:
    """A torch data set whose items the operator computes."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return np.frombuffer(bytearray(calls((2,))), np.uint8)


def main(method: str) -> None:
    expected = calls((2, 1, 4))
    bring_up()
    # GNU OpenMP kills a forked child at its own parallel region, workqueue has no threads there:
    # known limits of Numba.
    is_host_in_child = method != "fork"
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context(method)) as pool:
        done = [pool.submit(child, threads, is_host_in_child) for threads in ((2,), (1, 2), (4,), (2, 1))]
        results = [future.result(timeout=50) for future in done]
    assert os.getpid() not in {pid for pid, _ in results}
    assert {out for _, out in results} == {expected}
    assert calls((2, 1)) == expected
    assert all(t.daemon or t is threading.main_thread() for t in threading.enumerate())


def loader(method: str) -> None:
    """Run the workers of a torch DataLoader."""
    import torch

    expected = calls((2,))
    bring_up()
    assert torch.ones(300, 300).mm(torch.ones(300, 300)).sum() == 300**3  # starts OpenMP threads
    workers = torch.utils.data.DataLoader(Batches(), batch_size=None, num_workers=2, multiprocessing_context=method)
    results = [bytes(item.numpy()) for item in workers]
    assert len(results) == 4
    assert set(results) == {expected}
    assert calls((2, 1)) == expected
