"""The record of an instruction-set path: everything that the target has to know of one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

# Byte offsets of a worker's scratch by name (kernel/params.py), and bytes of one kv head's.
Scratch = tuple[Mapping[str, int], int]
# kernel(block, sequences, runs, work, worker, max_items) -> whether items are left
# (kernel/work_loop.py)
Kernel = Callable[..., Any]


class MicroKernels(NamedTuple):
    """The loops that a kernel is made of (kernel/work_loop.py): device functions."""

    load_queries: Any  # lays out the query rows of a tile
    attend_keys: Any  # adds the keys of a work item to the state of its rows
    enter: Any  # what a thread has to do before
    leave: Any  # and after
    steps: tuple[Any, ...] = ()  # of the bfloat16 paths: what attend_keys is made of (prefill_bf16.make_attend)


@dataclass(frozen=True, slots=True, eq=False)
class Path:
    """An instruction-set path. Its module imports the micro-kernels only when they are asked for:
    the compiler of a CPU that lacks the instructions may refuse what they name."""

    name: str
    dtypes: tuple[str, ...]
    missing: Callable[[], str]  # why this machine or system cannot run it; "" if it can
    micro_kernels: Callable[[], MicroKernels]
    scratch: Callable[[str, int, int], Scratch]  # of (dtype, head_size, tile_rows)
    tile_heights: tuple[int, ...]  # rows that tiles may have beside BLOCK_M, ascending
    tiles_per_thread: int  # with fewer, threads would wait for the last one longer than tall tiles save
    guessed_speed: float  # beside `vector`, for work per thread and for how soon Ctrl-C is seen
    is_exact: bool = (
        False  # whether it computes as the float32 reference does, on any CPU: the one that needs no self test
    )


@functools.cache
def kernel_of(path: Path) -> Kernel:
    from numba_prefix.cpu.kernel.work_loop import make_drain

    load_queries, attend_keys, enter, leave, _ = path.micro_kernels()
    name = "drain" if path.is_exact else f"drain_{path.name}"
    return make_drain(name, load_queries, attend_keys, enter, leave)
