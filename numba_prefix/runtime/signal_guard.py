"""Runs imports and first compilations so that neither Ctrl-C nor fork can leave Numba
half-initialised.

A signal handler's exception (Ctrl-C) can strike between any two bytecodes of the main thread, also
where Numba, LLVM's locks or the import system are in the middle of a change. So such work runs in
another thread, where signals raise nothing, while the main thread waits. Locks that another thread
holds during a fork are never released in the child, those of modules being imported included. So a
fork waits until such work is done.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401
import logging  # noqa: F401
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

# concurrent.futures.thread and logging are imported early because they register fork hooks: if
# Numba imported them while a fork waits here, only their after-fork hook would run at that fork.
Result = TypeVar("Result")
ENOUGH_STACK = 8 << 20  # a main thread's usual size: LLVM recurses deeply
_lock = threading.RLock()
_other_locks: list[AbstractContextManager[Any]] = []
_taken = ExitStack()


def uninterrupted(work: Callable[[], Result]) -> Result:
    """Return or raise the outcome of work(), run without interruption: one work at a time, and no
    fork meanwhile.

    A signal handler's exception is raised here soon, while the work goes on to its end: asking for
    the same work again must be safe.
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
    except RuntimeError:  # the process can't start another thread
        return _alone(work)
    while not done.wait(0.5):  # on Windows a wait without a timeout cannot be interrupted
        pass
    if errors:
        raise errors[0]
    return results[0]


def _alone(work: Callable[[], Result]) -> Result:
    with _lock:
        return work()


def keep_over_forks(lock: AbstractContextManager[Any]) -> None:
    """Make forks wait for this lock too."""
    _other_locks.append(lock)


def _before_fork() -> None:
    _lock.acquire()
    for lock in list(_other_locks):
        _taken.enter_context(lock)


def _after_fork() -> None:
    _taken.close()
    _lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
