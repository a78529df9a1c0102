"""The targets, imported when they are first asked for: `import numba_prefix` brings neither Numba nor a driver."""

from __future__ import annotations

import functools
from typing import Any

from numba_prefix.runtime.signal_guard import uninterrupted


@functools.cache
def cpu_target() -> Any:
    return uninterrupted(_cpu)


@functools.cache
def cuda_target() -> Any:
    return uninterrupted(_cuda)


def _cpu() -> Any:
    from numba_prefix.cpu import target

    return target


def _cuda() -> Any:
    from numba_prefix.cuda import target

    return target
