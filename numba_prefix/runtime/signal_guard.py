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
_starting = threading.Lock()
_other_locks: list[AbstractContextManager[Any]] = [_starting]
_taken = ExitStack()
_at_work: set[int] = set()  # the thread inside such work


def uninterrupted(work: Callable[[], Result]) -> Result:
    """Return or raise the outcome of work(), run without interruption and with enough stack: one
    work at a time, and no fork meanwhile.

    A signal handler's exception is raised here soon, while the work goes on to its end: asking for
    the same work again must be safe.
    """
    if threading.get_ident() in _at_work:
        return work()
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
        start_thread(task, "numba_prefix first call")
    except RuntimeError:  # the process can't start another thread
        return _alone(work)
    while not done.wait(0.5):  # on Windows a wait without a timeout cannot be interrupted
        pass
    if errors:
        raise errors[0]
    return results[0]


def start_thread(task: Callable[[], None], name: str) -> None:
    """Start a daemon thread with ENOUGH_STACK, whatever the host has set for its own. Raises
    RuntimeError where the process can't start another."""
    with _starting:
        size = threading.stack_size()
        if size < ENOUGH_STACK:
            threading.stack_size(ENOUGH_STACK)
        try:
            threading.Thread(target=task, name=name, daemon=True).start()
        finally:
            if size < ENOUGH_STACK:
                threading.stack_size(size)


def _alone(work: Callable[[], Result]) -> Result:
    with _lock:
        _at_work.add(threading.get_ident())
        try:
            return work()
        finally:
            _at_work.discard(threading.get_ident())


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
