"""Rows between the caller's arrays and a worker's scratch: the page walk, widening to float32 and narrowing back."""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_prefix.cpu.compile.jit import inline, part
from numba_prefix.cpu.kernel import params as c
from numba_prefix.cpu.simd.memory import (
    any_lane,
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
from numba_prefix.rules.tiling import logical_block_of

ZERO = np.float32(0.0)
ONE = np.float32(1.0)


@inline
def load_lanes(dtype: Any, address: Any) -> Any:
    if dtype == c.FLOAT16:
        return load_f16(address)
    if dtype == c.BFLOAT16:
        return load_bf16(address)
    return load_f32(address)


@part
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
    dtype: Any, source: Any, source_pitch: Any, target: Any, pitch: Any, num_rows: Any, size: Any
) -> None:
    item = item_bytes(dtype)
    whole = size // 16 * 16
    for row in range(num_rows):
        start, to = source + row * source_pitch, target + row * pitch
        for i in range(0, whole, 16):
            store_f32(to + 4 * i, load_lanes(dtype, start + item * i))
        if whole < size:
            for i in range(whole, size):
                store1_f32(to + 4 * i, load_one(dtype, start + item * i))
            for i in range(size, whole + 16):
                store1_f32(to + 4 * i, ZERO)


@part
def widen_rows(dtype: Any, source: Any, source_pitch: Any, target: Any, pitch: Any, num_rows: Any, size: Any) -> None:
    """Rows of `size` elements as float32, filled up with zeros to whole vectors; nothing past a row is read."""
    if dtype == c.FLOAT16:
        widen_rows_of(c.FLOAT16, source, source_pitch, target, pitch, num_rows, size)
    elif dtype == c.BFLOAT16:
        widen_rows_of(c.BFLOAT16, source, source_pitch, target, pitch, num_rows, size)
    else:
        widen_rows_of(c.FLOAT32, source, source_pitch, target, pitch, num_rows, size)


@part
def load_query(params: Any, source: Any, target: Any) -> None:
    """A query row as float32, times qk_scale's sign."""
    widen_rows(params.dtype, source, 0, target, 0, 1, params.head_size)
    sign = params.q_sign
    if sign != ONE:
        for i in range(0, params.head_size, 16):
            store_f32(target + 4 * i, load_f32(target + 4 * i) * sign)


@inline
def narrow_row_of(dtype: Any, source: Any, target: Any, size: Any) -> None:
    item = item_bytes(dtype)
    whole = size // 16 * 16
    for i in range(0, whole, 16):
        store_lanes(dtype, target + item * i, load_f32(source + 4 * i))
    for i in range(whole, size):
        store_one(dtype, target + item * i, load1_f32(source + 4 * i))


@part
def narrow_row(dtype: Any, source: Any, target: Any, size: Any) -> None:
    """A float32 row as `size` elements of dtype, rounded to nearest even."""
    if dtype == c.FLOAT16:
        narrow_row_of(c.FLOAT16, source, target, size)
    elif dtype == c.BFLOAT16:
        narrow_row_of(c.BFLOAT16, source, target, size)
    else:
        narrow_row_of(c.FLOAT32, source, target, size)


@part
def load_pages(
    params: Any, cache: Any, block_stride: Any, slot_stride: Any, table: Any, kv_pos: Any, num_keys: Any, target: Any
) -> None:
    """Widens the rows of num_keys keys from kv_pos on, page by page; a tile may span pages and a page may span tiles."""
    block_size = params.block_size
    done = 0
    while done < num_keys:
        logical_block = logical_block_of(kv_pos + done, block_size)
        slot = kv_pos + done - logical_block * block_size
        count = min(block_size - slot, num_keys - done)
        physical_block = np.int64(load1_i32(table + logical_block * params.table_column_stride))
        source = cache + physical_block * block_stride + slot * slot_stride
        widen_rows(
            params.dtype,
            source,
            slot_stride,
            target + done * params.row_pitch,
            params.row_pitch,
            count,
            params.head_size,
        )
        done += count


@part
def list_rows(
    params: Any,
    cache: Any,
    block_stride: Any,
    slot_stride: Any,
    table: Any,
    kv_pos: Any,
    num_keys: Any,
    length: Any,
    target: Any,
) -> None:
    """Addresses int64 of the rows of num_keys keys from kv_pos on, then up to `length` the last one again (or the cache
    itself, if there is none)."""
    block_size = params.block_size
    done = 0
    address = cache
    while done < num_keys:
        logical_block = logical_block_of(kv_pos + done, block_size)
        slot = kv_pos + done - logical_block * block_size
        page_keys = min(block_size - slot, num_keys - done)
        physical_block = np.int64(load1_i32(table + logical_block * params.table_column_stride))
        address = cache + physical_block * block_stride + slot * slot_stride
        for i in range(page_keys):
            store1_i64(target + 8 * (done + i), address + i * slot_stride)
        address += (page_keys - 1) * slot_stride
        done += page_keys
    for i in range(done, length):
        store1_i64(target + 8 * i, address)


@inline
def prefetch_rows(rows: Any, count: Any, row_bytes: Any) -> None:
    """Asks for listed rows: those of one head are too far apart for the hardware to see them coming."""
    for j in range(count):
        row = load1_i64(rows + 8 * j)
        for offset in range(0, row_bytes, 64):
            prefetch(row + offset)


@part
def has_special(rows: Any, pitch: Any, num_rows: Any, size: Any) -> Any:
    """Whether any of the widened rows holds an infinity or a NaN."""
    for row in range(num_rows):
        for i in range(0, size, 16):
            if any_lane(is_not_finite(load_f32(rows + row * pitch + 4 * i))):
                return True
    return False
