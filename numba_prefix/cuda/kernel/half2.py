"""Pairs of 16-bit floats in an int32, as tensor cores take them: tested and taken apart bitwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from numba_prefix.cuda.kernel import ptx
from numba_prefix.cuda.kernel.common import WIDENS
from numba_prefix.cuda.kernel.jit import inline


@dataclass(frozen=True, slots=True)
class Halves:
    """Device functions over pairs of a 16-bit float type, the lower half first."""

    mma: Any  # c + a·b, see ptx
    pack: Any  # two float32, rounded to nearest
    nonfinite: Any  # bits 15 and 31, where a half is an infinity or a NaN
    finite: Any  # the pair, 0 in place of infinities and NaNs
    rest: Any  # what `finite` leaves out, as two float32
    signed: Any  # the pair times a float32 sign of 1, -1 or 0


def halves_of(dtype: str) -> Halves:
    """Raises KeyError for a dtype that is no 16-bit float."""
    widen, is_f16 = WIDENS[dtype], dtype == "float16"
    exponent = np.int32(0x7C007C00 if is_f16 else 0x7F807F80)
    carry = np.int32(0x04000400 if is_f16 else 0x00800080)
    pack = ptx.pack_f16 if is_f16 else ptx.pack_bf16
    top = np.int32(-0x7FFF8000)  # 0x80008000

    @inline
    def nonfinite(pair: Any) -> Any:
        return np.int32(np.int32((pair & exponent) + carry) & top)

    @inline
    def all_ones_where(flags: Any) -> Any:
        return np.int32(np.uint32(np.uint32(flags) >> 15) * np.uint32(0xFFFF))

    @inline
    def finite(pair: Any) -> Any:
        return np.int32(pair & ~all_ones_where(nonfinite(pair)))

    @inline
    def rest(pair: Any) -> Any:
        left = np.int32(pair & all_ones_where(nonfinite(pair)))
        return widen(ptx.u16_of_i32(left)), widen(ptx.u16_of_i32(np.int32(left >> 16)))

    @inline
    def signed(pair: Any, sign: Any) -> Any:
        if sign < np.float32(0.0):
            pair = np.int32(pair ^ top)
        if sign == np.float32(0.0):
            pair = np.int32(all_ones_where(nonfinite(pair)) & 0x7FFF7FFF)
        return pair

    return Halves(ptx.mma_f16 if is_f16 else ptx.mma_bf16, pack, nonfinite, finite, rest, signed)
