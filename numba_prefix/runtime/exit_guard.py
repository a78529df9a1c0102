"""Stops compilations at interpreter exit: tearing down a compiler that a thread is in crashes."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any


class StopAtExit:
    """Ends a compilation at its next pass once the interpreter exits.

    A mixin for a Listener of Numba's events, or of numba-cuda's, installed for the events of
    passes.
    """

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.is_registered = False
        self.is_exiting = False

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        # Not earlier: exit handlers run last in, first out, and the compilers register clean-ups of
        # their own.
        if not self.is_registered:
            self.is_registered = True
            atexit.register(self.exit)
        me = threading.get_ident()
        self.threads.add(me)
        try:
            yield
        finally:
            self.threads.discard(me)

    def on_start(self, _: Any) -> None:
        if self.is_exiting and threading.get_ident() in self.threads:
            raise SystemExit  # ends the thread silently

    def on_end(self, _: Any) -> None: ...

    def exit(self) -> None:
        self.is_exiting = True
        while self.threads:
            time.sleep(0.01)
