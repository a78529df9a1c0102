"""What an interruption or a fork must not cut in half: the import of the CPU target and the first calls of its kernels.

An exception of a signal handler (Ctrl-C) can strike between any two bytecodes of the main thread, also where Numba, LLVM's
locks or the import system have half-made state of their own: such work is done in another thread, where signals raise
nothing, while the main thread waits. And locks that a thread holds while another one forks are never released in the child,
those of modules that are being imported among them: a fork waits until such work is done.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401
import logging  # noqa: F401
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

# Two modules are imported for what they do at forks: if Numba imported them while a fork waits for us, they would do only
# the second half of it at that one.
Result = TypeVar("Result")
ENOUGH_STACK = 8 << 20  # LLVM recurses deeply: what a main thread commonly has
_lock = threading.RLock()
_other_locks: list[AbstractContextManager[Any]] = []
_held = ExitStack()


def uninterrupted(work: Callable[[], Result]) -> Result:
    """What work() returns or raises; one such work at a time, and no fork meanwhile.

    What a signal handler raises is raised here soon, and the work goes on to its end: it must be such that it may be asked
    for again.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or 0 < threading.stack_size() < ENOUGH_STACK:
        return _alone(work)
    results: list[Result] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def task() -> None:
        try:
            results.append(_alone(work))
        except BaseException as error:
            errors.append(error)
        done.set()

    try:
        threading.Thread(target=task, name="numba_prefix first call", daemon=True).start()
    except RuntimeError:  # no more threads to be had, or none any more
        return _alone(work)
    while not done.wait(0.5):  # a wait without an end cannot be interrupted on Windows
        pass
    if errors:
        raise errors[0]
    return results[0]


def _alone(work: Callable[[], Result]) -> Result:
    with _lock:
        return work()


def keep_over_forks(lock: AbstractContextManager[Any]) -> None:
    """A fork will also wait for this lock."""
    _other_locks.append(lock)


def _before_fork() -> None:
    _lock.acquire()
    for lock in list(_other_locks):
        _held.enter_context(lock)


def _after_fork() -> None:
    _held.close()
    _lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
