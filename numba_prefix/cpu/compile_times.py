"""Kernels that were compiled or loaded while some code ran, and how long each took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from numba.core import event
from numba.core.registry import CPUDispatcher

from numba_prefix.cpu import isa, plan
from numba_prefix.cpu.paths import PATHS, kernel_of


@dataclass(frozen=True, slots=True)
class KernelTime:
    name: str
    seconds: float
    source: str  # "compiled", "cache" (loaded from disk) or "memory" (was ready before)


def kernels() -> list[Any]:
    own = [part for part in vars(plan).values() if isinstance(part, CPUDispatcher)]
    return own + [kernel_of(path) for path in PATHS if not isa.obstacle(path)]


def _counts(kernel: Any) -> tuple[int, int]:
    """Numbers of times that a kernel was loaded and compiled so far."""
    return sum(kernel.stats.cache_hits.values()), sum(kernel.stats.cache_misses.values())


class _FirstCalls(event.Listener):
    """Times Numba's compiler lock, which a kernel's first call holds while it is loaded or
    compiled."""

    def __init__(self) -> None:
        self.found: list[KernelTime] = []
        self.depth = 0
        self.began = 0.0
        self.before: list[tuple[Any, tuple[int, int]]] = []

    def on_start(self, _: Any) -> None:
        if self.depth == 0:
            self.before = [(kernel, _counts(kernel)) for kernel in kernels()]
            self.began = time.perf_counter()
        self.depth += 1

    def on_end(self, _: Any) -> None:
        self.depth -= 1
        if self.depth:
            return
        seconds = time.perf_counter() - self.began
        for kernel, (loaded, compiled) in self.before:
            now = _counts(kernel)
            if now != (loaded, compiled):
                source = "compiled" if now[1] > compiled else "cache"
                self.found.append(KernelTime(kernel.__name__, seconds, source))


@contextmanager
def kernel_times() -> Iterator[list[KernelTime]]:
    """The list that is yielded holds, after the block, every kernel that is ready by then."""
    listener = _FirstCalls()
    with event.install_listener("numba:compiler_lock", listener):
        yield listener.found
    named = {kernel.name for kernel in listener.found}
    ready = [kernel.__name__ for kernel in kernels() if kernel.overloads and kernel.__name__ not in named]
    listener.found += [KernelTime(name, 0.0, "memory") for name in ready]
