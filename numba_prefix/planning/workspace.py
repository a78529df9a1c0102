"""The workspace: its byte-exact layout (accumulators of split tiles, arrival counters, scratch of
each worker) and its memory, the caller's buffer or one that is kept for each thread.

It is one buffer, laid out from its first 64-byte boundary, so that any alignment works. On the CPU:

    queue counter | arrival counters [split tiles, kv_head_num] int64 | split state float32 |
    scratch [num_workers, …]

On a GPU there is only the split state.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_prefix.inputs.arrays import as_numpy, data_address, describe
from numba_prefix.rules.tiling import round_up

ALIGNMENT = 64
INT64_BYTES = 8
F32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Layout:
    """Byte offsets from the first aligned byte, and the bytes of a buffer of any alignment."""

    arrivals: int
    partials: int
    scratch: int
    scratch_bytes: int
    num_workers: int
    total_bytes: int


def workspace_layout(
    split_tiles: int, partial_f32: int, scratch_bytes: int, num_workers: int, num_items: int
) -> Layout:
    """Counts are for all kv heads. A problem without work needs no workspace."""
    if num_items == 0:
        return Layout(0, 0, 0, 0, 0, 0)
    arrivals = ALIGNMENT
    partials = arrivals + round_up(split_tiles * INT64_BYTES, ALIGNMENT)
    scratch = partials + round_up(partial_f32 * F32_BYTES, ALIGNMENT)
    each = round_up(scratch_bytes, ALIGNMENT)
    total = scratch + each * num_workers + ALIGNMENT - 1
    return Layout(arrivals, partials, scratch, each, num_workers, total)


def partials_bytes(partial_f32: int) -> int:
    """Bytes of a buffer of any alignment for the split state alone, of all kv heads."""
    return partial_f32 * F32_BYTES + ALIGNMENT - 1 if partial_f32 else 0


class _Kept(threading.local):
    """A thread's buffer between calls. A call takes it and gives it back at its end: a call that a
    signal handler makes meanwhile allocates another, and so does the call after an interrupted
    one."""

    buffer: NDArray[np.uint8] | None = None


_kept = _Kept()
KEPT_BYTES = 64 << 20  # larger ones are not kept after the call


def take(given: Any, size: int) -> tuple[int, Any]:
    """Address of at least `size` writable bytes, and the object that keeps them alive: the caller's
    workspace or, for None, this thread's.

    Raises TypeError and ValueError for an unfit workspace.
    """
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
