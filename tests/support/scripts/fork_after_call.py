"""A fork() after calls that used several threads: the child computes the same, and so does the
parent afterwards."""

from __future__ import annotations

import os
import threading
from typing import Any

from cases import make_case, run, same_bits

CASE = make_case([200, 100], [300, 400], head_num=8, head_size=64)


def child(expected: Any) -> None:
    for threads in (2, 1, 4):
        same_bits(run(CASE, "cpu", num_threads=threads), expected)
    thread = threading.Thread(target=run, args=(CASE, "cpu"))
    thread.start()
    thread.join()


def fork(expected: Any) -> None:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            child(expected)
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    same_bits(run(CASE, "cpu", num_threads=2), expected)


def main() -> None:
    """Fork three times at rest, and five times while another thread is in the middle of a call."""
    expected = run(CASE, "cpu", num_threads=2)
    for _ in range(3):
        fork(expected)
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            run(CASE, "cpu", num_threads=2)

    other = threading.Thread(target=busy)
    other.start()
    try:
        for _ in range(5):
            fork(expected)
    finally:
        stop.set()
        other.join()
