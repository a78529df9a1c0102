"""What the kernel families do alike: which rows and keys a work item has, where they lie, their biases and their output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from numba_prefix.cuda.kernel import ptx, rules
from numba_prefix.cuda.kernel import spec as c
from numba_prefix.cuda.kernel.jit import inline
from numba_prefix.cuda.kernel.views import int64_table
from numba_prefix.rules.tiling import (
    KV_LEN,
    M_BLOCK,
    NUM_SPLITS,
    PARTIAL_OFFSET,
    Q_BEGIN,
    Q_LEN,
    RUN_COLUMNS,
    SEQUENCE,
    SEQUENCE_COLUMNS,
    SPLIT_IDX,
    WORK_COLUMNS,
)

ONE = np.float32(1.0)
ZERO = np.float32(0.0)


@inline
def bf16_of_f32(x: Any) -> Any:
    """Rounded to nearest, ties to even; a NaN stays one."""
    bits = ptx.bits_of_f32(x)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded = (np.uint32(bits) + np.uint32(0x7FFF) + (np.uint32(bits >> 16) & np.uint32(1))) >> 16
    return ptx.u16_of_i32(np.int32(rules.where(is_nan, np.int64(0x7FC0), np.int64(rounded))))


@inline
def f32_of_bf16(x: Any) -> Any:
    return ptx.f32_of_bits(np.int32(ptx.i32_of_u16(x) << 16))


@inline
def _load_f16(address: Any) -> Any:
    return ptx.f32_of_f16(ptx.load_u16(address))


@inline
def _load_bf16(address: Any) -> Any:
    return f32_of_bf16(ptx.load_u16(address))


@inline
def _store_f16(address: Any, x: Any) -> None:
    ptx.store_u16(address, ptx.f16_of_f32(x))


@inline
def _store_bf16(address: Any, x: Any) -> None:
    ptx.store_u16(address, bf16_of_f32(x))


LOADS = {"float16": _load_f16, "bfloat16": _load_bf16, "float32": ptx.load_f32}
STORES = {"float16": _store_f16, "bfloat16": _store_bf16, "float32": ptx.store_f32}


@inline
def work_of(call: Any, work: Any) -> Any:
    """This thread block's entry of a work list, its kv head and its sequence, and everybody's runs of held keys."""
    kv_head_num = np.uint32(call[c.KV_HEAD_NUM])
    entry = int64_table(work, WORK_COLUMNS)[np.uint32(cuda.blockIdx.x) // kv_head_num]
    kv_head = np.int64(np.uint32(cuda.blockIdx.x) % kv_head_num)
    sequence = int64_table(call[c.SEQUENCES], SEQUENCE_COLUMNS)[entry[SEQUENCE]]
    return entry, kv_head, sequence, int64_table(call[c.RUNS], RUN_COLUMNS)


@inline
def token_and_head(call: Any, q_begin: Any, row: Any, kv_head: Any) -> Any:
    """The token and the query head of a sequence's row."""
    group_size = np.uint32(call[c.GROUP_SIZE])
    q_idx = rules.q_idx_of_row(np.uint32(row), group_size)
    group_idx = np.uint32(row) - np.uint32(q_idx) * group_size
    return q_begin + np.int64(q_idx), kv_head * call[c.GROUP_SIZE] + np.int64(group_idx)


@inline
def slope_of(call: Any, q_head: Any) -> Any:
    slope = ONE
    if call[c.SLOPES] != 0:
        slope = ptx.load_f32(call[c.SLOPES] + 4 * q_head)
    return slope


@inline
def find_page(call: Any, b: Any, kv_pos: Any, is_held: Any) -> Any:
    """Physical block and slot of a key; block -1 for none, or one that the cache doesn't have: its table is flagged."""
    page, slot = np.int32(-1), np.int32(0)
    if is_held:
        block_size = np.uint32(call[c.BLOCK_SIZE])
        logical_block = rules.logical_block_of(np.uint32(kv_pos), block_size)
        given = ptx.load_i32(call[c.TABLES] + b * call[c.TABLE_ROW] + np.int64(logical_block) * call[c.TABLE_COLUMN])
        if given >= 0 and given < call[c.NUM_BLOCKS]:
            page = given
            slot = np.int32(np.uint32(kv_pos) - np.uint32(logical_block) * block_size)
        else:
            ptx.store_system_i32(call[c.STATUS], np.int32(1))
    return page, slot


@inline
def partial_address(call: Any, partial_offset: Any, split_idx: Any, kv_head: Any, rows: Any) -> Any:
    """Where a split leaves its state: acc [rows, partial_pitch], m_i [rows], l_i [rows], float32."""
    size = rules.partial_floats(rows, call[c.HEAD_SIZE])
    return call[c.PARTIALS] + 4 * (partial_offset + (split_idx * call[c.KV_HEAD_NUM] + kv_head) * size)


@inline
def partial_pitch(call: Any) -> Any:
    return rules.round_up(call[c.HEAD_SIZE], 16)


@inline
def store_sums(call: Any, address: Any, rows: Any, row: Any, m_i: Any, l_i: Any) -> None:
    """A row's running maximum and sum, behind the accumulators of a split's state."""
    lanes = rules.lane_rows(rows)
    ptx.store_f32(address + 4 * (lanes * partial_pitch(call) + row), m_i)
    ptx.store_f32(address + 4 * (lanes * partial_pitch(call) + lanes + row), l_i)


@inline
def store_lse(call: Any, token: Any, q_head: Any, m_i: Any, l_i: Any, unit: Any, origin: Any) -> None:
    """m_i is without what left-aligned biases leave out; origin is what they are relative to."""
    if call[c.LSE] != 0:
        if call[c.HAS_SHIFT] != 0:
            m_i = m_i + rules.left_align_shift(slope_of(call, q_head), np.int32(origin))
        head_num = call[c.KV_HEAD_NUM] * call[c.GROUP_SIZE]
        ptx.store_f32(call[c.LSE] + 4 * (token * head_num + q_head), rules.log_sum_exp(m_i, l_i, unit))


@inline
def origin_of(call: Any, runs: Any, sequence: Any, q_pos: Any) -> Any:
    """What a row's left-aligned biases are relative to."""
    origin = q_pos
    if call[c.HAS_SHIFT] != 0:
        origin = rules.last_held(runs, sequence, q_pos)
    return origin


@inline
def row_of(call: Any, runs: Any, sequence: Any, row: Any, kv_head: Any, is_causal: Any) -> Any:
    """Of a sequence's row: its position, what its left-aligned biases are relative to, the last position that it sees, its
    slope, and where its mask lies."""
    token, q_head = token_and_head(call, sequence[Q_BEGIN], row, kv_head)
    pos = sequence[KV_LEN] - sequence[Q_LEN] + token - sequence[Q_BEGIN]
    origin, last = origin_of(call, runs, sequence, pos), rules.last_visible(is_causal, pos, sequence[KV_LEN])
    mask_base = call[c.MASK] + q_head * call[c.MASK_HEAD]
    return np.int32(pos), np.int32(origin), np.int32(last), slope_of(call, q_head), mask_base


def finish_of(
    block_m: int, row_bits: int, store_state: Callable[..., Any], store_row: Callable[..., Any]
) -> Callable[..., Any]:
    """finish(…, row, i): writes row `row` of the tile, i of those of the thread, which 2**row_bits lanes share: the state of
    a split by store_state, or the output by store_row."""
    LANES = 1 << row_bits

    @inline
    def finish(
        call: Any, entry: Any, q_begin: Any, kv_head: Any, rows: Any, acc: Any, m_i: Any, l_i: Any, unit: Any,
        origin: Any, row: Any, i: Any,
    ) -> None:  # fmt: skip
        total = l_i[i]
        for bit in range(row_bits):
            total = total + ptx.butterfly_f32(total, np.int32(1 << bit))
        if row < rows:
            if entry[NUM_SPLITS] > 1:
                state = partial_address(call, entry[PARTIAL_OFFSET], entry[SPLIT_IDX], kv_head, rows)
                store_state(call, acc, state, rows, row, i)
                if cuda.threadIdx.x & (LANES - 1) == 0:
                    store_sums(call, state, rows, row, m_i[i], total)
            else:
                token, q_head = token_and_head(call, q_begin, entry[M_BLOCK] * block_m + row, kv_head)
                store_row(call, acc, call[c.OUT] + token * call[c.OUT_TOKEN] + q_head * call[c.OUT_HEAD], total, i)
                if cuda.threadIdx.x & (LANES - 1) == 0:
                    store_lse(call, token, q_head, m_i[i], total, unit, origin[i])

    return finish


def bias_of(spec: c.KernelSpec) -> Callable[..., Any]:
    """bias(call, mask_base, slope, q_pos, origin, kv_pos) of a kind, a device function. Positions are int32."""
    load = LOADS[spec.mask_dtype or spec.dtype]

    @inline
    def entry_of(call: Any, mask_base: Any, row: Any, kv_pos: Any) -> Any:
        return load(mask_base + np.int64(row) * call[c.MASK_ROW] + np.int64(kv_pos & 127) * call[c.MASK_COLUMN])

    @inline
    def none(call: Any, mask_base: Any, slope: Any, q_pos: Any, origin: Any, kv_pos: Any) -> Any:
        return ZERO

    @inline
    def linear(call: Any, mask_base: Any, slope: Any, q_pos: Any, origin: Any, kv_pos: Any) -> Any:
        return rules.linear_bias(slope, q_pos, kv_pos)

    @inline
    def sqrt(call: Any, mask_base: Any, slope: Any, q_pos: Any, origin: Any, kv_pos: Any) -> Any:
        return rules.sqrt_bias(slope, q_pos, kv_pos)

    @inline
    def left_align(call: Any, mask_base: Any, slope: Any, q_pos: Any, origin: Any, kv_pos: Any) -> Any:
        return rules.left_align_bias(slope, origin, kv_pos)

    @inline
    def template_linear(call: Any, mask_base: Any, slope: Any, q_pos: Any, origin: Any, kv_pos: Any) -> Any:
        entry = entry_of(call, mask_base, rules.template_row(q_pos, kv_pos), kv_pos)
        return rules.template_linear_bias(slope, entry, q_pos, kv_pos)

    @inline
    def template_sqrt(call: Any, mask_base: Any, slope: Any, q_pos: Any, origin: Any, kv_pos: Any) -> Any:
        entry = entry_of(call, mask_base, rules.template_row(q_pos, kv_pos), kv_pos)
        return rules.template_sqrt_bias(slope, entry, q_pos, kv_pos)

    @inline
    def template_left_align(call: Any, mask_base: Any, slope: Any, q_pos: Any, origin: Any, kv_pos: Any) -> Any:
        entry = entry_of(call, mask_base, rules.template_row(q_pos, kv_pos), kv_pos)
        return rules.template_left_align_bias(slope, entry, origin, kv_pos)

    @inline
    def heads_mask(call: Any, mask_base: Any, slope: Any, q_pos: Any, origin: Any, kv_pos: Any) -> Any:
        return entry_of(call, mask_base, rules.heads_mask_row(q_pos, kv_pos), kv_pos)

    kinds = (none, linear, sqrt, left_align, template_linear, template_sqrt, template_left_align, heads_mask)
    return kinds[c.BIASES.index(spec.bias)]
