"""Rows between the caller's arrays and a worker's scratch: the walk along a block table, widening
to float32 and narrowing back."""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_prefix.cpu.compile.jit import device_function, inline
from numba_prefix.cpu.kernel import params as c
from numba_prefix.cpu.simd.memory import (
    any_lane,
    gather_bf16,
    gather_f16,
    gather_f32,
    is_not_finite,
    load1_bf16,
    load1_f16,
    load1_f32,
    load1_i32,
    load1_i64,
    load_bf16,
    load_f16,
    load_f32,
    prefetch,
    store1_bf16,
    store1_f16,
    store1_f32,
    store1_i64,
    store_bf16,
    store_f16,
    store_f32,
)
from numba_prefix.rules.tiling import SEQUENCE, logical_block_of

ZERO = np.float32(0.0)
ONE = np.float32(1.0)


@inline
def load_lanes(dtype: Any, address: Any) -> Any:
    if dtype == c.FLOAT16:
        return load_f16(address)
    if dtype == c.BFLOAT16:
        return load_bf16(address)
    return load_f32(address)


@device_function
def load_any(dtype: Any, address: Any) -> Any:
    """load_lanes where the dtype is known only at run time, and speed does not matter."""
    if dtype == c.FLOAT16:
        return load_f16(address)
    if dtype == c.BFLOAT16:
        return load_bf16(address)
    return load_f32(address)


@inline
def load_one(dtype: Any, address: Any) -> Any:
    if dtype == c.FLOAT16:
        return load1_f16(address)
    if dtype == c.BFLOAT16:
        return load1_bf16(address)
    return load1_f32(address)


@inline
def gather_lanes(dtype: Any, addresses: Any) -> Any:
    if dtype == c.FLOAT16:
        return gather_f16(addresses)
    if dtype == c.BFLOAT16:
        return gather_bf16(addresses)
    return gather_f32(addresses)


@inline
def store_lanes(dtype: Any, address: Any, lanes: Any) -> None:
    if dtype == c.FLOAT16:
        store_f16(address, lanes)
    elif dtype == c.BFLOAT16:
        store_bf16(address, lanes)
    else:
        store_f32(address, lanes)


@inline
def store_one(dtype: Any, address: Any, value: Any) -> None:
    if dtype == c.FLOAT16:
        store1_f16(address, value)
    elif dtype == c.BFLOAT16:
        store1_bf16(address, value)
    else:
        store1_f32(address, value)


@inline
def item_bytes(dtype: Any) -> Any:
    return 4 if dtype == c.FLOAT32 else 2


@inline
def widen_rows_of(
    dtype: Any, source_ptr: Any, source_pitch: Any, target_ptr: Any, pitch: Any, num_rows: Any, size: Any
) -> None:
    item = item_bytes(dtype)
    whole = size // 16 * 16
    for row in range(num_rows):
        start_ptr, to_ptr = source_ptr + row * source_pitch, target_ptr + row * pitch
        for i in range(0, whole, 16):
            store_f32(to_ptr + 4 * i, load_lanes(dtype, start_ptr + item * i))
        if whole < size:
            for i in range(whole, size):
                store1_f32(to_ptr + 4 * i, load_one(dtype, start_ptr + item * i))
            for i in range(size, whole + 16):
                store1_f32(to_ptr + 4 * i, ZERO)


@device_function
def widen_rows(
    dtype: Any, source_ptr: Any, source_pitch: Any, target_ptr: Any, pitch: Any, num_rows: Any, size: Any
) -> None:
    """Rows of `size` elements as float32, filled up with zeros to whole vectors; nothing past a row
    is read."""
    if dtype == c.FLOAT16:
        widen_rows_of(c.FLOAT16, source_ptr, source_pitch, target_ptr, pitch, num_rows, size)
    elif dtype == c.BFLOAT16:
        widen_rows_of(c.BFLOAT16, source_ptr, source_pitch, target_ptr, pitch, num_rows, size)
    else:
        widen_rows_of(c.FLOAT32, source_ptr, source_pitch, target_ptr, pitch, num_rows, size)


@device_function
def load_query(params: Any, source_ptr: Any, target_ptr: Any) -> None:
    """A query row as float32, times qk_scale's sign."""
    widen_rows(params.q_dtype, source_ptr, 0, target_ptr, 0, 1, params.head_size)
    sign = params.q_sign
    if sign != ONE:
        for i in range(0, params.head_size, 16):
            store_f32(target_ptr + 4 * i, load_f32(target_ptr + 4 * i) * sign)


@inline
def narrow_row_of(dtype: Any, source_ptr: Any, target_ptr: Any, size: Any) -> None:
    item = item_bytes(dtype)
    whole = size // 16 * 16
    for i in range(0, whole, 16):
        store_lanes(dtype, target_ptr + item * i, load_f32(source_ptr + 4 * i))
    for i in range(whole, size):
        store_one(dtype, target_ptr + item * i, load1_f32(source_ptr + 4 * i))


@device_function
def narrow_row(dtype: Any, source_ptr: Any, target_ptr: Any, size: Any) -> None:
    """A float32 row as `size` elements of dtype, rounded to nearest even."""
    if dtype == c.FLOAT16:
        narrow_row_of(c.FLOAT16, source_ptr, target_ptr, size)
    elif dtype == c.BFLOAT16:
        narrow_row_of(c.BFLOAT16, source_ptr, target_ptr, size)
    else:
        narrow_row_of(c.FLOAT32, source_ptr, target_ptr, size)


@inline
def blocks_of(params: Any, work_item: Any, kv_head: Any) -> Any:
    """Blocks of keys and of values of a work item's sequence and one kv head: for each of them the
    address of the head in the cache, its byte strides from block to block and from slot to
    slot, and the address of the sequence's block table."""
    table_ptr = params.table_ptr + work_item[SEQUENCE] * params.table_row_stride
    k_ptr = params.k_ptr + kv_head * params.k_head_stride
    v_ptr = params.v_ptr + kv_head * params.v_head_stride
    return (
        (k_ptr, params.k_block_stride, params.k_slot_stride, table_ptr),
        (v_ptr, params.v_block_stride, params.v_slot_stride, table_ptr),
    )


@inline
def rows_in_block(params: Any, blocks: Any, kv_pos: Any, num_keys: Any) -> Any:
    """Address of the row of the key at kv_pos, and how many of num_keys rows from there on lie in
    the same block."""
    cache_ptr, block_stride, slot_stride, table_ptr = blocks
    logical_block = logical_block_of(kv_pos, params.block_size)
    slot = kv_pos - logical_block * params.block_size
    physical_block = np.int64(load1_i32(table_ptr + logical_block * params.table_column_stride))
    return cache_ptr + physical_block * block_stride + slot * slot_stride, min(params.block_size - slot, num_keys)


@device_function
def load_rows(params: Any, blocks: Any, kv_pos: Any, num_keys: Any, rows_ptr: Any) -> None:
    """Widens the rows of num_keys keys from kv_pos on, block by block; a tile may span blocks
    and a block may span tiles."""
    slot_stride, done = blocks[2], 0
    while done < num_keys:
        source_ptr, count = rows_in_block(params, blocks, kv_pos + done, num_keys - done)
        target_ptr = rows_ptr + done * params.row_pitch
        widen_rows(params.kv_dtype, source_ptr, slot_stride, target_ptr, params.row_pitch, count, params.head_size)
        done += count


@device_function
def list_rows(params: Any, blocks: Any, kv_pos: Any, num_keys: Any, length: Any, list_ptr: Any) -> None:
    """Lists the addresses (int64) of the rows of num_keys keys from kv_pos on, then up to `length`
    the last one again (or the cache itself, if there is none)."""
    slot_stride, done = blocks[2], 0
    row_ptr = blocks[0]
    while done < num_keys:
        row_ptr, count = rows_in_block(params, blocks, kv_pos + done, num_keys - done)
        for i in range(count):
            store1_i64(list_ptr + 8 * (done + i), row_ptr + i * slot_stride)
        row_ptr += (count - 1) * slot_stride
        done += count
    for i in range(done, length):
        store1_i64(list_ptr + 8 * i, row_ptr)


@inline
def prefetch_rows(list_ptr: Any, count: Any, row_bytes: Any) -> None:
    """Asks for listed rows: those of one head are too far apart for the hardware to see them
    coming."""
    for j in range(count):
        row = load1_i64(list_ptr + 8 * j)
        for offset in range(0, row_bytes, 64):
            prefetch(row + offset)


@device_function
def has_non_finite(rows_ptr: Any, pitch: Any, num_rows: Any, size: Any) -> Any:
    """Whether any of the widened rows holds an infinity or a NaN."""
    for row in range(num_rows):
        for i in range(0, size, 16):
            if any_lane(is_not_finite(load_f32(rows_ptr + row * pitch + 4 * i))):
                return True
    return False
