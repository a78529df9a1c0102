"""Byte-exact layout of the workspace: accumulators of split tiles, arrival counters, and each worker's scratch.

One buffer, laid out from its first 64-byte boundary, so that any alignment works. On the CPU:

    queue counter | arrival counters [split tiles, kv_head_num] int64 | split state float32 | scratch [num_workers, …]

On a GPU there is only the split state.
"""

from __future__ import annotations

from dataclasses import dataclass

from numba_prefix.rules.tiling import round_up

ALIGNMENT = 64
INT64_BYTES = 8
F32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Layout:
    """Byte offsets from the first aligned byte, and the bytes that a buffer of any alignment needs."""

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
