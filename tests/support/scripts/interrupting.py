"""Ctrl-C in this process while something runs."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any


def interrupted_until_done(work: Callable[[], Any], late: float = 2.0) -> tuple[Any, int]:
    """Result of work(), begun again after each Ctrl-C, and the number of these, one every 0.15 s.

    Each must soon become a KeyboardInterrupt; any other exception ends this.
    """
    stop, sent, count = threading.Event(), [0.0], 0

    def interrupt() -> None:
        while not stop.wait(0.15):
            sent.append(time.perf_counter())
            os.kill(os.getpid(), signal.SIGINT)

    other = threading.Thread(target=interrupt)
    usual = signal.getsignal(signal.SIGINT)
    other.start()
    while True:
        try:
            result = work()
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            stop.set()
            break
        except KeyboardInterrupt:
            took = time.perf_counter() - sent[-1]
            assert took < late, f"KeyboardInterrupt {took} s late"
            count += 1
    other.join()
    signal.signal(signal.SIGINT, usual)
    return result, count
