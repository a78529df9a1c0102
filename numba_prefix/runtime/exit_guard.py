"""What the interpreter's end must not cut in half: a compilation. Taking a compiler down while a thread is inside it crashes."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any


class StopAtExit:
    """At the end of the interpreter a compilation stops at its next pass.

    To be mixed with a Listener of Numba's events, or of numba-cuda's, and to be installed for those of passes.
    """

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.is_registered = False
        self.is_exiting = False

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        if not self.is_registered:  # not earlier: what is registered last is called first, and compilers clean up too
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
            raise SystemExit  # ends a thread without a word

    def on_end(self, _: Any) -> None: ...

    def exit(self) -> None:
        self.is_exiting = True
        while self.threads:
            time.sleep(0.01)
