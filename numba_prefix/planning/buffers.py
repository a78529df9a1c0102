"""The memory of a workspace: the caller's buffer, or one that is kept for each thread."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_prefix.inputs.arrays import as_numpy, data_address, describe


class _Kept(threading.local):
    """A thread's buffer between calls. A call takes it and gives it back at its end: one that a signal handler makes
    meanwhile gets another, and so does the call after one that was interrupted."""

    buffer: NDArray[np.uint8] | None = None


_kept = _Kept()
KEPT_BYTES = 64 << 20  # larger ones are not kept after the call


def take(given: Any, size: int) -> tuple[int, Any]:
    """Address of at least `size` writable bytes, and what keeps them alive: the caller's workspace or, for None, this
    thread's. Raises TypeError and ValueError for an unfit one."""
    if given is None:
        buffer, _kept.buffer = _kept.buffer, None
        if buffer is None or buffer.nbytes < size:
            buffer = np.empty(size, np.uint8)
        return data_address(buffer), buffer
    view = _bytes_of(given)
    if view.nbytes < size:
        raise ValueError(f"workspace: got {view.nbytes} bytes, expected at least {size}")
    return data_address(view), view


def give_back(buffer: NDArray[np.uint8]) -> None:
    """Keep a buffer that `take` made for this thread's next call."""
    if buffer.nbytes <= KEPT_BYTES:
        _kept.buffer = buffer


def _bytes_of(given: Any) -> NDArray[np.uint8]:
    expected = "a writable contiguous buffer in CPU memory"
    if isinstance(given, (bytearray, memoryview)):
        if memoryview(given).readonly or not memoryview(given).c_contiguous:
            raise ValueError(f"workspace: got a read-only or strided {type(given).__name__}, expected {expected}")
        return np.frombuffer(given, np.uint8)
    if isinstance(given, bytes):
        raise ValueError(f"workspace: got bytes, which are read-only, expected {expected}")
    t = describe(given, "workspace")
    if t.device != "cpu" or not t.is_writable:
        raise ValueError(f"workspace: got {'read-only memory' if t.device == 'cpu' else t.device}, expected {expected}")
    view = as_numpy(t)
    if not view.flags.c_contiguous:
        raise ValueError(f"workspace: got an array with strides {t.strides}, expected {expected}")
    return view.reshape(-1).view(np.uint8)
