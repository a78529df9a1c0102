"""The threads that run a kernel together: plain Python threads, since the code holds no GIL.

Numba's own threading layers are not used, because they end processes: workqueue aborts when two
threads call in, and after a parallel region of GNU OpenMP a forked child is killed at its next one.
This team works from any thread and after any fork, leaves no thread count or mask changed, and
never waits for a helper that has not started: the threads that have started do the work.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from numba_prefix.runtime.signal_guard import start_thread


class _Job:
    """One call's work: helpers may join until it is closed; the caller waits for those inside."""

    def __init__(self, task: Callable[[int], None]) -> None:
        self.task = task
        self.lock = threading.Lock()
        self.done = threading.Lock()
        self.done.acquire()
        self.num_running = 0
        self.is_closed = False
        self.error: BaseException | None = None

    def help(self, worker: int) -> None:
        with self.lock:
            if self.is_closed:
                return
            self.num_running += 1
        try:
            self.task(worker)
        except BaseException as error:
            self.error = error
        with self.lock:
            self.num_running -= 1
            if self.is_closed and self.num_running == 0:
                self.done.release()

    def close(self) -> None:
        """Wait for the helpers that joined, even if an exception arrives (Ctrl-C interrupts a
        wait): they write to the caller's memory."""
        interruption: BaseException | None = None
        is_done = False
        while not is_done:
            try:
                with self.lock:
                    self.is_closed = True
                    is_done = self.num_running == 0
                # Asked again after an interruption, which may hide that the wait succeeded.
                if not is_done:
                    self.done.acquire()
            except BaseException as error:
                interruption = error
        if interruption is not None:
            raise interruption


class _Helper:
    """A sleeping thread; `wake` gives it one task, after which it goes back to the idle list."""

    def __init__(self) -> None:
        self.mail = threading.Lock()
        self.mail.acquire()
        self.job: _Job | None = None
        self.worker = 0
        start_thread(self._live, "numba_prefix")

    def wake(self, job: _Job, worker: int) -> None:
        self.job, self.worker = job, worker
        self.mail.release()

    def _live(self) -> None:
        while True:
            self.mail.acquire()
            job, self.job = self.job, None
            if job is not None:
                job.help(self.worker)
            del job
            _idle.append(self)


_idle: list[_Helper] = []


def _forget_helpers() -> None:
    """Empty the idle list of a forked child: its helpers do not exist."""
    _idle.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_helpers)


def run_together(task: Callable[[int], None], num_workers: int) -> None:
    """Run task(0) here and, as far as helpers are free in time, task(1) … task(num_workers - 1) on
    other threads.

    The result must be correct whichever of these run. Returns when all that started have ended;
    raises an exception of one of them.
    """
    if num_workers <= 1:
        task(0)
        return
    job = _Job(task)
    try:
        for worker in range(1, num_workers):
            try:
                helper = _idle.pop()
            except IndexError:
                try:
                    helper = _Helper()
                except RuntimeError:  # the process can't start another thread
                    break
            helper.wake(job, worker)
        task(0)
    finally:
        job.close()
    if job.error is not None:
        raise job.error
