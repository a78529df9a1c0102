"""Work that Ctrl-C can end: LLVM compiles for seconds without letting Python see a signal."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

EXIT_INTERRUPTED = 130
Result = TypeVar("Result")


def interruptible(work: Callable[[], Result]) -> Result:
    """Return or raise the outcome of work(), done in another thread. Ctrl-C ends the process."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def task() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=task, daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        # An orderly end would take LLVM down while the thread is inside it.
        os._exit(EXIT_INTERRUPTED)
    if errors:
        raise errors[0]
    return results[0]
