"""Plans of the CUDA target: the work of a call, cut into a kernel's tiles and uploaded to the
GPU."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from numba_prefix.cuda.device.gpu import Device, DeviceAllocation
from numba_prefix.cuda.kernels import Kernel
from numba_prefix.inputs.arrays import ITEM_BYTES, Tensor, as_numpy, contiguous_strides, span
from numba_prefix.inputs.lengths import check_block_ids
from numba_prefix.inputs.problem import Problem
from numba_prefix.planning.work import Cutter, cut_work
from numba_prefix.planning.workspace import partials_bytes
from numba_prefix.rules.tiling import NUM_SPLITS, SPLIT_IDX, SPLIT_TILE, round_up

MAX_GRID = 2**31 - 1
TABLE_ALIGNMENT = 8  # int64 that tables begin at multiples of
# Tables that a flag may be about, when a plan is bound to others before it is looked at: more are
# not kept alive.
MAX_WATCHED = 8


@dataclass(frozen=True, slots=True)
class Tables:
    """A call's work in tiles of one size, on the GPU: addresses and counts."""

    work: int
    merge: int
    sequences: int
    runs: int
    work_items: int
    split_tiles: int
    workspace_bytes: int


@dataclass(frozen=True, slots=True)
class Watched:
    """A table of block ids that has been run with."""

    problem: Problem
    table: Tensor


class CudaPlan:
    """Everything about a run that does not depend on where the arrays are, with what it has
    allocated on the GPU."""

    def __init__(
        self,
        device: Device,
        problem: Problem,
        lengths: tuple[NDArray[np.int64], NDArray[np.int64]],
        held_blocks: NDArray[np.bool_] | None,
        is_part: bool,
        validate: str,
        cut_tiles: Cutter,
    ) -> None:
        """Lengths are int64 [batch], held_blocks bool [batch, max_block_num] (None: all), checked.
        is_part: lse leaves out what kv_runs.part_shift says. The device's context is current."""
        self.device, self.problem, self.is_part, self.validate = device, problem, is_part, validate
        self.allocation: DeviceAllocation = device.allocate()
        self._lengths, self._held_blocks, self._cut_tiles = lengths, held_blocks, cut_tiles
        self._tables: dict[tuple[int, int], Tables] = {}
        self._slopes: dict[bytes, int] = {}
        self._watched: deque[Watched] = deque(maxlen=MAX_WATCHED)
        self.workspace_bytes = 0  # of the tiles cut last

    @property
    def is_empty(self) -> bool:
        return self.problem.num_tokens == 0

    def tables(self, kernel: Kernel) -> Tables:
        """Cut and uploaded at the first call for its tile size."""
        size = kernel.block_m, kernel.block_n
        tables = self._tables.get(size)
        if tables is None:
            tables = self._tables[size] = self._cut(*size)
        self.workspace_bytes = tables.workspace_bytes
        return tables

    def _cut(self, block_m: int, block_n: int) -> Tables:
        heads = self.problem.kv_head_num
        cut = cut_work(self.problem, *self._lengths, self._held_blocks, block_m, block_m, block_n, self._cut_tiles)
        if len(cut.work) * heads > MAX_GRID:
            raise ValueError(f"seq_len: got {len(cut.work)} tiles of {heads} heads, expected at most {MAX_GRID} in all")
        merge = cut.work[(cut.work[:, NUM_SPLITS] > 1) & (cut.work[:, SPLIT_IDX] == 0)]
        parts = (cut.work, merge[np.argsort(merge[:, SPLIT_TILE])], cut.sequences, cut.runs)
        ends = np.cumsum([round_up(part.size, TABLE_ALIGNMENT) for part in parts]).tolist()
        begins = [0, *ends[:-1]]
        packed = np.zeros(ends[-1], np.int64)
        for part, begin in zip(parts, begins, strict=True):
            packed[begin : begin + part.size] = part.ravel()
        base = self.allocation.upload(packed)
        work, merge_list, sequences, runs = (base + 8 * begin for begin in begins)
        workspace_bytes = partials_bytes(cut.partial_f32 * heads)
        return Tables(work, merge_list, sequences, runs, len(cut.work), len(merge), workspace_bytes)

    def device_slopes(self, slopes: Tensor) -> int:
        """The address of a copy of slopes in host memory."""
        values = np.ascontiguousarray(as_numpy(slopes), np.float32)
        address = self._slopes.get(values.tobytes())
        if address is None:
            address = self._slopes[values.tobytes()] = self.allocation.upload(values)
        return address

    def watch(self, problem: Problem, table: Tensor) -> None:
        """Runs with this table are about to be launched."""
        self._watched.append(Watched(problem, table))

    def raise_pending(self) -> None:
        """Raise the error of a bad block id that a kernel has met so far; asks the GPU for nothing
        if none has."""
        flag = self.allocation.flag
        if self.validate != "shape" and flag.is_set:
            flag.clear()
            raise self._bad_block_error()

    def _bad_block_error(self) -> ValueError:
        for watched in reversed(list(self._watched)):
            table = self._on_host(watched.table)
            try:
                check_block_ids(watched.problem, table, *self._lengths, self._held_blocks)
            except ValueError as error:
                return error
        num_blocks = self.problem.num_blocks
        return ValueError(
            f"block_tables: got, in an earlier run, a block that does not exist (the table has been changed since), "
            f"expected 0 to {num_blocks - 1}"
        )

    def _on_host(self, t: Tensor) -> Tensor:
        """A copy of a table as it is now."""
        driver, stream = self.device.driver, self.device.stream
        first, end = span(t.shape, t.strides)
        item = ITEM_BYTES[t.dtype]
        memory = np.empty(end - first, t.dtype)
        with self.device.current(may_capture=True):
            driver.to_host(memory.ctypes.data, t.address + first * item, memory.nbytes, stream)
            driver.synchronize(stream)
        view = np.lib.stride_tricks.as_strided(memory[-first:], t.shape, [stride * item for stride in t.strides])
        copy = np.ascontiguousarray(view)
        strides = contiguous_strides(t.shape)
        return Tensor(t.name, t.owner, t.kind, copy.ctypes.data, t.dtype, t.shape, strides, "cpu", False, copy)
