"""Keys and values as bfloat16 in a worker's scratch, laid out as the bfloat16 paths want them
(scratch.bf16_scratch).

A bfloat16 stays what it is. A float16 becomes the sum of two, exactly: `high`, what is left of it
when its last bits are cut off, and `low`, the rest, kept apart in a second plane. Infinities and
NaN are all in the high plane.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_prefix.cpu.compile.jit import device_function, inline
from numba_prefix.cpu.kernel import params as c
from numba_prefix.cpu.kernel.paged_kv import load_lanes
from numba_prefix.cpu.kernel.sizes import BFLOAT, PAIR_DIMS
from numba_prefix.cpu.simd.bf16_pairs import copy_16, from_bits, high_bits, join_pairs, store_16, store_i32
from numba_prefix.cpu.simd.memory import (
    any_lane,
    is_not_finite,
    load1_i64,
    splat_f32,
    store1_f32,
    store1_i64,
    store_f32,
)
from numba_prefix.rules.elementwise import where
from numba_prefix.rules.tiling import round_up

ZERO = np.float32(0.0)


@inline
def low_of(x: Any) -> Any:
    """The rest of a float16 without its high bfloat16."""
    return where(is_not_finite(x), ZERO, x - from_bits(high_bits(x)))


@device_function
def load_tail(dtype: Any, address: Any, count: Any, spare_ptr: Any) -> Any:
    """Loads the last `count` elements of a row, fewer than 16, as lanes, the others 0; nothing past
    them is read."""
    for i in range(0, 32, 4):
        store1_f32(spare_ptr + i, ZERO)
    for i in range(count):
        copy_16(address + BFLOAT * i, spare_ptr + BFLOAT * i)
    return load_lanes(c.FLOAT16, spare_ptr) if dtype == c.FLOAT16 else load_lanes(c.BFLOAT16, spare_ptr)


@inline
def store_planes(planes: Any, x: Any, target_ptr: Any, to_low: Any) -> None:
    store_16(target_ptr, high_bits(x))
    if planes == 2:
        store_16(target_ptr + to_low, high_bits(low_of(x)))


@inline
def fill_row(planes: Any, size: Any, target_ptr: Any, to_low: Any) -> None:
    """Stores zeros from a row's last whole vector on to a whole number of tiles."""
    if round_up(size, 16) < round_up(size, PAIR_DIMS):
        store_planes(planes, splat_f32(ZERO), target_ptr + BFLOAT * round_up(size, 16), to_low)


@inline
def pack_rows_of(
    dtype: Any,
    planes: Any,
    is_clean: Any,
    list_ptr: Any,
    num_rows: Any,
    size: Any,
    target_ptr: Any,
    pitch: Any,
    spare_ptr: Any,
) -> Any:
    to_low = BFLOAT * round_up(size, PAIR_DIMS)
    whole = size // 16 * 16
    non_finite = splat_f32(ZERO) != ZERO
    for j in range(num_rows):
        source_ptr, to_ptr = load1_i64(list_ptr + 8 * j), target_ptr + j * pitch
        for i in range(0, round_up(size, 16), 16):
            at_ptr = source_ptr + BFLOAT * i
            x = load_lanes(dtype, at_ptr) if i < whole else load_tail(dtype, at_ptr, size - i, spare_ptr)
            if is_clean:
                x = where(is_not_finite(x), ZERO, x)
            elif planes == 2:
                non_finite = non_finite | is_not_finite(x)
            store_planes(planes, x, to_ptr + BFLOAT * i, to_low)
        fill_row(planes, size, to_ptr, to_low)
    return any_lane(non_finite)


@device_function
def pack_rows(params: Any, is_clean: Any, list_ptr: Any, num_rows: Any, target_ptr: Any, spare_ptr: Any) -> Any:
    """Packs listed rows as [plane][dimension], k_pitch bytes from one to the next. Infinities and
    NaN become 0 if is_clean; otherwise returns whether there are any in float16 rows."""
    a = list_ptr, num_rows, params.head_size, target_ptr, params.k_pitch, spare_ptr
    if params.planes == 2:
        return pack_rows_of(c.FLOAT16, 2, True, *a) if is_clean else pack_rows_of(c.FLOAT16, 2, False, *a)
    return pack_rows_of(c.BFLOAT16, 1, True, *a) if is_clean else pack_rows_of(c.BFLOAT16, 1, False, *a)


@device_function
def pack_query(params: Any, row_ptr: Any, target_ptr: Any) -> Any:
    """Packs a float32 row as bfloat16; returns whether it holds infinities or NaN."""
    size = params.head_size
    to_low = BFLOAT * round_up(size, PAIR_DIMS)
    non_finite = splat_f32(ZERO) != ZERO
    for i in range(0, size, 16):
        x = load_lanes(c.FLOAT32, row_ptr + 4 * i)
        non_finite = non_finite | is_not_finite(x)
        if params.planes == 2:
            store_planes(2, x, target_ptr + BFLOAT * i, to_low)
        else:
            store_planes(1, x, target_ptr + BFLOAT * i, to_low)
    if params.planes == 2:
        fill_row(2, size, target_ptr, to_low)
    else:
        fill_row(1, size, target_ptr, to_low)
    return any_lane(non_finite)


@inline
def join_rows_of(is_clean: Any, first_ptr: Any, second_ptr: Any, size: Any, target_ptr: Any, spare_ptr: Any) -> Any:
    whole = size // 16 * 16
    non_finite = splat_f32(ZERO) != ZERO
    for i in range(0, round_up(size, 16), 16):
        if i < whole:
            a, b = load_lanes(c.BFLOAT16, first_ptr + BFLOAT * i), load_lanes(c.BFLOAT16, second_ptr + BFLOAT * i)
        else:
            a = load_tail(c.BFLOAT16, first_ptr + BFLOAT * i, size - i, spare_ptr)
            b = load_tail(c.BFLOAT16, second_ptr + BFLOAT * i, size - i, spare_ptr)
        if is_clean:
            a, b = where(is_not_finite(a), ZERO, a), where(is_not_finite(b), ZERO, b)
        else:
            non_finite = non_finite | is_not_finite(a) | is_not_finite(b)
        store_i32(target_ptr + 4 * i, join_pairs(high_bits(a), high_bits(b)))
    return any_lane(non_finite)


@device_function
def join_rows(params: Any, is_clean: Any, first_ptr: Any, second_ptr: Any, target_ptr: Any, spare_ptr: Any) -> Any:
    """Packs two bfloat16 value rows as one of pairs; returns whether they hold infinities or NaN,
    which become 0 if is_clean."""
    a = first_ptr, second_ptr, params.head_size, target_ptr, spare_ptr
    return join_rows_of(True, *a) if is_clean else join_rows_of(False, *a)


@inline
def list_zeros(list_ptr: Any, num_rows: Any, length: Any, zero_row_ptr: Any) -> None:
    """Lets a list of rows name a row of zeros past its end."""
    for j in range(num_rows, length):
        store1_i64(list_ptr + 8 * j, zero_row_ptr)


@inline
def clear_row(params: Any, scratch_ptr: Any) -> None:
    """Fills the row of zeros."""
    for i in range(0, round_up(params.head_size, PAIR_DIMS) * BFLOAT, 64):
        store_f32(scratch_ptr + params.zero_row_offset + i, splat_f32(ZERO))
