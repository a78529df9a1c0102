"""Steps that all kernel families share: a work item's rows and keys, where they lie, their biases
and their output.

`params` is a Params (params.py) everywhere.

"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import cuda, types
from numba.cuda.extending import intrinsic
from numba.cuda.np.arrayobj import populate_array

from numba_prefix.cuda.kernel import ptx
from numba_prefix.cuda.kernel.jit import inline
from numba_prefix.cuda.kernel.rules import masks, softmax, tiling, where
from numba_prefix.cuda.kernel.spec import KernelSpec
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


@intrinsic
def int64_table(_: Any, address: Any, columns: Any) -> Any:
    """int64 [any number of rows, columns] at a byte address: an array, so that tiling's rules read
    it as on the host."""
    kind = types.Array(types.int64, 2, "C", readonly=True)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(kind)(context, builder)
        size = context.get_value_type(types.intp)
        item, unknown = ir.Constant(size, 8), ir.Constant(size, 1 << 40)
        populate_array(
            array,
            data=builder.inttoptr(arguments[0], array.data.type),
            shape=[unknown, arguments[1]],
            strides=[builder.mul(arguments[1], item), item],
            itemsize=item,
            meminfo=None,
        )
        return array._getvalue()

    return kind(types.int64, types.int64), codegen


@inline
def bf16_of_f32(x: Any) -> Any:
    """Rounded to nearest, ties to even; a NaN stays one."""
    bits = ptx.bits_of_f32(x)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded = (np.uint32(bits) + np.uint32(0x7FFF) + (np.uint32(bits >> 16) & np.uint32(1))) >> 16
    return ptx.u16_of_i32(np.int32(where(is_nan, np.int64(0x7FC0), np.int64(rounded))))


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
# From the bits of a 16-bit number.
WIDENS: dict[str, Any] = {"float16": ptx.f32_of_f16, "bfloat16": f32_of_bf16}
STORES = {"float16": _store_f16, "bfloat16": _store_bf16, "float32": ptx.store_f32}


@inline
def work_of(params: Any, list_ptr: Any) -> Any:
    """This thread block's work item of a list [work items, WORK_COLUMNS] and its kv head, the
    item's row of the table of sequences, and the table of runs (of all sequences)."""
    kv_head_num = np.uint32(params.kv_head_num)
    work_item = int64_table(list_ptr, WORK_COLUMNS)[np.uint32(cuda.blockIdx.x) // kv_head_num]
    kv_head = np.int64(np.uint32(cuda.blockIdx.x) % kv_head_num)
    sequence = int64_table(params.sequences_ptr, SEQUENCE_COLUMNS)[work_item[SEQUENCE]]
    return work_item, kv_head, sequence, int64_table(params.runs_ptr, RUN_COLUMNS)


@inline
def q_pos_of(params: Any, sequence: Any, row: Any) -> Any:
    """tiling.q_pos_of_row, by a division of 32 bits."""
    q_idx = tiling.q_idx_of_row(np.uint32(row), np.uint32(params.group_size))
    return sequence[KV_LEN] - sequence[Q_LEN] + np.int64(q_idx)


@inline
def token_and_head(params: Any, q_begin: Any, row: Any, kv_head: Any) -> Any:
    """The token and the query head of a sequence's row."""
    group_size = np.uint32(params.group_size)
    q_idx = tiling.q_idx_of_row(np.uint32(row), group_size)
    group_idx = np.uint32(row) - np.uint32(q_idx) * group_size
    return q_begin + np.int64(q_idx), kv_head * params.group_size + np.int64(group_idx)


@inline
def slope_of(params: Any, q_head: Any) -> Any:
    slope = ONE
    if params.slopes_ptr != 0:
        slope = ptx.load_f32(params.slopes_ptr + 4 * q_head)
    return slope


@inline
def find_page(params: Any, b: Any, kv_pos: Any, is_held: Any) -> Any:
    """Physical block and slot of a key. Block -1 where no key is held, and where the table names a
    block that the cache doesn't have, which sets the status flag."""
    page, slot = np.int32(-1), np.int32(0)
    if is_held:
        block_size = np.uint32(params.block_size)
        logical_block = tiling.logical_block_of(np.uint32(kv_pos), block_size)
        row = params.table_ptr + b * params.table_row_stride
        given = ptx.load_i32(row + np.int64(logical_block) * params.table_column_stride)
        if given >= 0 and given < params.num_blocks:
            page = given
            slot = np.int32(np.uint32(kv_pos) - np.uint32(logical_block) * block_size)
        else:
            ptx.store_system_i32(params.status_ptr, np.int32(1))
    return page, slot


@inline
def key_tile(runs: Any, sequence: Any, kv_idx: Any, n_end: Any, block_n: Any) -> Any:
    """tiling.key_tile in 32 bits: the position of the key kv_idx, and the keys of its tile."""
    kv_pos, num_keys = tiling.key_tile(runs, sequence, kv_idx, n_end, block_n)
    return np.int32(kv_pos), np.int32(num_keys)


@inline
def partial_address(params: Any, partial_offset: Any, split_idx: Any, kv_head: Any, rows: Any) -> Any:
    """Address of a split's state: acc [rows, partial_pitch], m_i [rows], l_i [rows], float32."""
    size = tiling.partial_floats(rows, params.head_size)
    return params.partials_ptr + 4 * (partial_offset + (split_idx * params.kv_head_num + kv_head) * size)


@inline
def partial_pitch(params: Any) -> Any:
    return tiling.round_up(params.head_size, 16)


@inline
def store_sums(params: Any, address: Any, rows: Any, row: Any, m_i: Any, l_i: Any) -> None:
    """A row's running maximum and sum, behind the accumulators of a split's state."""
    lanes = tiling.lane_rows(rows)
    ptx.store_f32(address + 4 * (lanes * partial_pitch(params) + row), m_i)
    ptx.store_f32(address + 4 * (lanes * partial_pitch(params) + lanes + row), l_i)


@inline
def store_lse(params: Any, token: Any, q_head: Any, m_i: Any, l_i: Any, bias_pos: Any) -> None:
    """m_i is without what left-aligned biases leave out; bias_pos is the position that they are
    relative to."""
    if params.lse_ptr != 0:
        if params.has_shift != 0:
            m_i = m_i + masks.left_align_shift(slope_of(params, q_head), np.int32(bias_pos))
        head_num = params.kv_head_num * params.group_size
        ptx.store_f32(params.lse_ptr + 4 * (token * head_num + q_head), softmax.log_sum_exp(m_i, l_i, params.unit))


@inline
def bias_pos_of(params: Any, runs: Any, sequence: Any, q_pos: Any) -> Any:
    """The position that a row's left-aligned biases are relative to."""
    bias_pos = q_pos
    if params.has_shift != 0:
        bias_pos = tiling.last_held(runs, sequence, q_pos)
    return bias_pos


@inline
def row_of(params: Any, runs: Any, sequence: Any, row: Any, kv_head: Any) -> Any:
    """A row's position and the one that its left-aligned biases are relative to, both int32; its
    slope, and the address of its head's mask."""
    _, q_head = token_and_head(params, sequence[Q_BEGIN], row, kv_head)
    q_pos = q_pos_of(params, sequence, row)
    bias_pos = bias_pos_of(params, runs, sequence, q_pos)
    mask_base = params.mask_ptr + q_head * params.mask_head_stride
    return np.int32(q_pos), np.int32(bias_pos), slope_of(params, q_head), mask_base


@inline
def keys_seen(sequence: Any, q_pos: Any, kv_pos: Any, num_keys: Any) -> Any:
    """The first key of a key tile that the query at q_pos sees and one past the last, as positions.
    Computed again for each key tile: both ends, kept for each row, would take registers that the
    products need."""
    begin, end = tiling.visible_begin(sequence, q_pos), tiling.visible_end(sequence, q_pos)
    return np.int32(max(begin, kv_pos)), np.int32(min(end, kv_pos + num_keys))


def finish_of(
    block_m: int, row_bits: int, store_state: Callable[..., Any], store_row: Callable[..., Any]
) -> Callable[..., Any]:
    """finish(…, row, i): writes row `row` of the tile, i of those of the thread, which 2**row_bits
    lanes share: the state of a split by store_state, or the output by store_row. acc, m_i, l_i and
    bias_pos are those of the thread's rows."""
    LANES = 1 << row_bits

    @inline
    def finish(
        params: Any, work_item: Any, q_begin: Any, kv_head: Any, rows: Any, acc: Any, m_i: Any, l_i: Any, bias_pos: Any,
        row: Any, i: Any,
    ) -> None:  # fmt: skip
        total = l_i[i]
        for bit in range(row_bits):
            total = total + ptx.butterfly_f32(total, np.int32(1 << bit))
        if row < rows:
            if work_item[NUM_SPLITS] > 1:
                state = partial_address(params, work_item[PARTIAL_OFFSET], work_item[SPLIT_IDX], kv_head, rows)
                store_state(params, acc, state, rows, row, i)
                if cuda.threadIdx.x & (LANES - 1) == 0:
                    store_sums(params, state, rows, row, m_i[i], total)
            else:
                token, q_head = token_and_head(params, q_begin, work_item[M_BLOCK] * block_m + row, kv_head)
                out = params.out_ptr + token * params.out_token_stride + q_head * params.out_head_stride
                store_row(params, acc, out, total, i)
                if cuda.threadIdx.x & (LANES - 1) == 0:
                    store_lse(params, token, q_head, m_i[i], total, bias_pos[i])

    return finish


def bias_of(spec: KernelSpec) -> Callable[..., Any]:
    """bias(params, mask_base, slope, q_pos, bias_pos, kv_pos) of a kind, a device function.
    Positions are int32. Raises KeyError for an unknown kind or dtype."""
    load = LOADS[spec.mask_dtype or spec.dtype]

    @inline
    def value_of(params: Any, mask_base: Any, row: Any, kv_pos: Any) -> Any:
        """The given mask's, at a row of it."""
        column = np.int64(kv_pos & 127) * params.mask_column_stride
        return load(mask_base + np.int64(row) * params.mask_row_stride + column)

    @inline
    def none(params: Any, mask_base: Any, slope: Any, q_pos: Any, bias_pos: Any, kv_pos: Any) -> Any:
        return ZERO

    @inline
    def linear(params: Any, mask_base: Any, slope: Any, q_pos: Any, bias_pos: Any, kv_pos: Any) -> Any:
        return masks.linear_bias(slope, q_pos, kv_pos)

    @inline
    def sqrt(params: Any, mask_base: Any, slope: Any, q_pos: Any, bias_pos: Any, kv_pos: Any) -> Any:
        return masks.sqrt_bias(slope, q_pos, kv_pos)

    @inline
    def left_align(params: Any, mask_base: Any, slope: Any, q_pos: Any, bias_pos: Any, kv_pos: Any) -> Any:
        return masks.left_align_bias(slope, bias_pos, kv_pos)

    @inline
    def template_linear(params: Any, mask_base: Any, slope: Any, q_pos: Any, bias_pos: Any, kv_pos: Any) -> Any:
        value = value_of(params, mask_base, masks.template_row(q_pos, kv_pos), kv_pos)
        return masks.template_linear_bias(slope, value, q_pos, kv_pos)

    @inline
    def template_sqrt(params: Any, mask_base: Any, slope: Any, q_pos: Any, bias_pos: Any, kv_pos: Any) -> Any:
        value = value_of(params, mask_base, masks.template_row(q_pos, kv_pos), kv_pos)
        return masks.template_sqrt_bias(slope, value, q_pos, kv_pos)

    @inline
    def template_left_align(params: Any, mask_base: Any, slope: Any, q_pos: Any, bias_pos: Any, kv_pos: Any) -> Any:
        value = value_of(params, mask_base, masks.template_row(q_pos, kv_pos), kv_pos)
        return masks.template_left_align_bias(slope, value, bias_pos, kv_pos)

    @inline
    def heads_mask(params: Any, mask_base: Any, slope: Any, q_pos: Any, bias_pos: Any, kv_pos: Any) -> Any:
        return value_of(params, mask_base, masks.heads_mask_row(q_pos, kv_pos), kv_pos)

    return {
        "none": none,
        "linear": linear,
        "sqrt": sqrt,
        "left_align": left_align,
        "template_linear": template_linear,
        "template_sqrt": template_sqrt,
        "template_left_align": template_left_align,
        "heads_mask": heads_mask,
    }[spec.bias]
