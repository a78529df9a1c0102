"""Kernels in NumPy that obey the launch ABI of the CUDA target to the letter: a launch's parameters
are all that they know.

Through them a test sees the parameters that the host gave to the GPU: addresses, strides, tables,
factors, splits and the flag.
"""

from __future__ import annotations

import ast
from typing import Any

import ml_dtypes
import numpy as np
from ptx import Memory
from ptx.device import Launched

from numba_prefix.cuda.compile.compiler import Compiled
from numba_prefix.cuda.kernel.spec import KernelSpec
from numba_prefix.planning.params import FACTORS
from numba_prefix.rules import masks, softmax, tiling

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "": np.float32}
BLOCKS = {"mma": (64, 64), "fma": (32, 32), "merge": (0, 0)}
SHARED_BYTES = {"mma": 100 << 10, "fma": 40 << 10, "merge": 0}
THREADS = {"mma": 128, "fma": 64, "merge": 32}
F32 = np.float32


def compile_kernel(spec: KernelSpec, cc: tuple[int, int]) -> Compiled:
    """Replacement of numba_prefix.cuda.compile.cubins.kernel."""
    fields = {name: getattr(spec, name) for name in KernelSpec.__slots__} | {"cc": cc}
    block_m, block_n = BLOCKS[spec.family]
    return Compiled(
        name=spec.name, cc=cc, cubin=repr(fields).encode(), threads=THREADS[spec.family],
        shared_bytes=SHARED_BYTES[spec.family], block_m=block_m, block_n=block_n, registers=0, spill_bytes=0,
        local_bytes=0, mma_count=0,
    )  # fmt: skip


def execute(launched: Launched, memory: Memory) -> None:
    """Run a launch, for FakeDriver(execute=...)."""
    fields = ast.literal_eval(launched.cubin.decode())
    del fields["cc"]
    spec = KernelSpec(**fields)
    assert (launched.block, launched.shared_bytes) == (THREADS[spec.family], SHARED_BYTES[spec.family])
    kernel = _Kernel(spec, launched, memory)
    for block in range(launched.grid):
        kernel.run(*divmod(block, launched.params.kv_head_num))


class _Kernel:
    def __init__(self, spec: KernelSpec, launched: Launched, memory: Memory) -> None:
        self.spec, self.params, self.memory = spec, launched.params, memory
        self.scale, self.unit, self.unit_log2, self.sign = (F32(getattr(self.params, name)) for name in FACTORS)
        self.block_m = BLOCKS[spec.family][0] or self.params.tile_rows
        assert self.params.tile_rows == self.block_m
        self.sequences = self.table(self.params.sequences_ptr, tiling.SEQUENCE_COLUMNS)
        self.runs = self.table(self.params.runs_ptr, tiling.RUN_COLUMNS)

    def view(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Memory of one registered region; anything else is a fault."""
        reach = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
        first = address + sum(r for r in reach if r < 0)
        last = address + sum(r for r in reach if r > 0) + np.dtype(dtype).itemsize - 1
        region = self.memory.find(first)
        if region is None or last >= region.end:
            raise AssertionError(f"bytes {first:#x} to {last:#x}: {self.memory.nearest(first)}")
        at = first - region.origin
        raw = region.bytes[at : last - region.origin + 1]
        return np.ndarray(shape, dtype, raw, address - first, strides)

    def scalar(self, address: int, dtype: Any) -> Any:
        return self.view(address, (1,), (1,), dtype)[0]

    def table(self, address: int, columns: int) -> _Table:
        return _Table(self, address, columns)

    def run(self, item_idx: int, kv_head: int) -> None:
        is_merge = self.spec.family == "merge"
        work = self.params.merge_ptr if is_merge else self.params.work_ptr
        work_item = self.table(work, tiling.WORK_COLUMNS)[item_idx]
        sequence = self.sequences[work_item[tiling.SEQUENCE]]
        q_len, group = sequence[tiling.Q_LEN], self.params.group_size
        rows = tiling.rows_in_tile(q_len, group, work_item[tiling.M_BLOCK], self.block_m)
        first_row = work_item[tiling.M_BLOCK] * self.block_m
        if is_merge:
            assert work_item[tiling.SPLIT_IDX] == 0
            m_i, l_i, acc = self.merged(work_item, kv_head, rows)
        else:
            m_i, l_i, acc = self.attended(work_item, sequence, kv_head, first_row, rows)
            if work_item[tiling.NUM_SPLITS] > 1:
                places = self.partial(work_item, work_item[tiling.SPLIT_IDX], kv_head, rows)
                for place, part in zip(places, (acc, m_i, l_i), strict=True):
                    place[...] = part
                return
        self.store(sequence, kv_head, first_row, m_i, l_i, acc)

    def attended(self, work_item: Any, sequence: Any, kv_head: int, first_row: int, rows: int) -> Any:
        head_size, group = self.params.head_size, self.params.group_size
        kv_pos, keys, values = self.keys(work_item, sequence, kv_head)
        m_i, l_i, acc = np.full(rows, -np.inf, F32), np.zeros(rows, F32), np.zeros((rows, head_size), F32)
        for i in range(rows):
            q_idx, head = divmod(first_row + i, group)
            q_pos = sequence[tiling.KV_LEN] - sequence[tiling.Q_LEN] + q_idx
            q = self.query(sequence[tiling.Q_BEGIN] + q_idx, kv_head * group + head)
            begin, end = tiling.visible_begin(sequence, q_pos), tiling.visible_end(sequence, q_pos)
            seen = masks.is_visible(kv_pos, begin, end)
            score = keys[seen] @ (q * self.sign)
            if self.spec.bias != "none":
                bias_pos = tiling.last_held(self.runs, sequence, q_pos) if self.params.has_shift else q_pos
                score = score * self.scale + self.bias(kv_head * group + head, q_pos, bias_pos, kv_pos[seen])
            if len(score):
                m_i[i] = score.max()
                weight = softmax.exp_score(score, softmax.shift_of(m_i[i]), self.unit_log2)
                l_i[i], acc[i] = weight.sum(), weight @ values[seen]
        return m_i, l_i, acc

    def keys(self, work_item: Any, sequence: Any, kv_head: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Positions, keys and values of a work item's range; a block that does not exist is flagged
        and counts as zeros."""
        params, head_size = self.params, self.params.head_size
        dtype = DTYPES[self.spec.dtype]
        count = work_item[tiling.N_END] - work_item[tiling.N_BEGIN]
        kv_pos = np.zeros(count, np.int32)
        found = np.zeros((2, count, head_size), F32)
        for i in range(count):
            kv_idx = work_item[tiling.N_BEGIN] + i
            kv_pos[i], num_keys = tiling.key_tile(self.runs, sequence, kv_idx, kv_idx + 1, 1)
            assert num_keys == 1
            column, slot = divmod(int(kv_pos[i]), params.block_size)
            place = (
                params.table_ptr
                + work_item[tiling.SEQUENCE] * params.table_row_stride
                + column * params.table_column_stride
            )
            block = int(self.scalar(place, np.int32))
            if not 0 <= block < params.num_blocks:
                self.view(params.status_ptr, (1,), (4,), np.int32)[0] = 1
                continue
            for which, (base, block_stride, slot_stride, head_stride) in enumerate(
                (
                    (params.k_ptr, params.k_block_stride, params.k_slot_stride, params.k_head_stride),
                    (params.v_ptr, params.v_block_stride, params.v_slot_stride, params.v_head_stride),
                )
            ):
                address = base + block * block_stride + slot * slot_stride + kv_head * head_stride
                found[which, i] = self.view(address, (head_size,), (np.dtype(dtype).itemsize,), dtype)
        return kv_pos, found[0], found[1]

    def query(self, token: int, head: int) -> np.ndarray:
        dtype = np.dtype(DTYPES[self.spec.dtype])
        address = self.params.q_ptr + token * self.params.q_token_stride + head * self.params.q_head_stride
        if self.spec.is_aligned:
            assert address % 16 == 0
        return self.view(address, (self.params.head_size,), (dtype.itemsize,), dtype).astype(F32)

    def slope(self, head: int) -> Any:
        return F32(1) if not self.params.slopes_ptr else self.scalar(self.params.slopes_ptr + 4 * head, F32)

    def value(self, head: int, row: np.ndarray, kv_pos: np.ndarray) -> np.ndarray:
        params, dtype = self.params, DTYPES[self.spec.mask_dtype]
        base = params.mask_ptr + head * params.mask_head_stride
        pairs = zip(row.tolist(), (kv_pos % 128).tolist(), strict=True)
        read = [self.scalar(base + r * params.mask_row_stride + k * params.mask_column_stride, dtype) for r, k in pairs]
        return np.array(read, F32)

    def bias(self, head: int, q_pos: int, bias_pos: int, kv_pos: np.ndarray) -> np.ndarray:
        q, last = np.full(len(kv_pos), q_pos, np.int32), np.full(len(kv_pos), bias_pos, np.int32)
        slope, kind = np.full(len(kv_pos), self.slope(head), F32), self.spec.bias
        if kind == "heads_mask":
            return self.value(head, masks.heads_mask_row(q, kv_pos), kv_pos)
        if kind == "linear":
            return masks.linear_bias(slope, q, kv_pos)
        if kind == "sqrt":
            return masks.sqrt_bias(slope, q, kv_pos)
        if kind == "left_align":
            return masks.left_align_bias(slope, last, kv_pos)
        value = self.value(head, masks.template_row(q, kv_pos), kv_pos)
        if kind == "template_linear":
            return masks.template_linear_bias(slope, value, q, kv_pos)
        if kind == "template_sqrt":
            return masks.template_sqrt_bias(slope, value, q, kv_pos)
        assert kind == "template_left_align"
        return masks.template_left_align_bias(slope, value, last, kv_pos)

    def partial(self, work_item: Any, split_idx: int, kv_head: int, rows: int) -> tuple[np.ndarray, ...]:
        """acc [rows, head_size], m_i [rows], l_i [rows]."""
        params, head_size = self.params, self.params.head_size
        size = tiling.partial_floats(rows, head_size)
        offset = work_item[tiling.PARTIAL_OFFSET] + (split_idx * params.kv_head_num + kv_head) * size
        whole = self.view(params.partials_ptr + 4 * offset, (size,), (4,), F32)
        assert (params.partials_ptr + 4 * offset) % 64 == 0
        pitch = tiling.round_up(head_size, 16)
        acc = whole[: rows * pitch].reshape(rows, pitch)[:, :head_size]
        return acc, whole[-2 * rows : -rows], whole[-rows:]

    def merged(self, work_item: Any, kv_head: int, rows: int) -> Any:
        parts = [self.partial(work_item, i, kv_head, rows) for i in range(work_item[tiling.NUM_SPLITS])]
        m_i = np.max([m for _, m, _ in parts], 0)
        shift = softmax.shift_of(m_i)
        alphas = [softmax.rescale(m, shift, self.unit_log2) for _, m, _ in parts]
        l_i = sum(part_l * alpha for (_, _, part_l), alpha in zip(parts, alphas, strict=True))
        acc = F32(0)
        for (part, _, _), alpha in zip(parts, alphas, strict=True):
            acc = softmax.add_part(acc, part, alpha[:, None])
        return m_i, l_i, acc

    def store(self, sequence: Any, kv_head: int, first_row: int, m_i: Any, l_i: Any, acc: Any) -> None:
        params, group = self.params, self.params.group_size
        dtype = np.dtype(DTYPES[self.spec.out_dtype])
        for i in range(len(m_i)):
            q_idx, head_of_group = divmod(first_row + i, group)
            token, head = sequence[tiling.Q_BEGIN] + q_idx, kv_head * group + head_of_group
            address = params.out_ptr + token * params.out_token_stride + head * params.out_head_stride
            out = self.view(address, (params.head_size,), (dtype.itemsize,), dtype)
            out[:] = softmax.normalize(acc[i], l_i[i]).astype(dtype)
            if params.lse_ptr:
                top = m_i[i]
                if params.has_shift:
                    q_pos = sequence[tiling.KV_LEN] - sequence[tiling.Q_LEN] + q_idx
                    bias_pos = tiling.last_held(self.runs, sequence, q_pos)
                    top = top + masks.left_align_shift(self.slope(head), np.int32(bias_pos))
                lse = self.view(params.lse_ptr + 4 * (token * params.kv_head_num * group + head), (1,), (4,), F32)
                lse[0] = softmax.log_sum_exp(top, l_i[i], self.unit)


class _Table:
    """int64 [any number of rows, columns], each row checked when it is read."""

    def __init__(self, kernel: _Kernel, address: int, columns: int) -> None:
        self._kernel, self._address, self._columns = kernel, address, columns
        self._rows: dict[int, list[int]] = {}

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, tuple):
            row, column = index
            return self[row][column]
        if index not in self._rows:
            place = self._address + int(index) * 8 * self._columns
            self._rows[index] = self._kernel.view(place, (self._columns,), (8,), np.int64).tolist()
        return self._rows[index]
