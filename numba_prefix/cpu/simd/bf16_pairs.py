"""Lanes as bfloat16 and as pairs of them, for the paths that multiply such pairs
(cpu/kernel/prefill_bf16.py).

A pair is an int32: its first element in the low half, its second in the high half.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from numba_prefix.cpu.simd.features import has_pairs
from numba_prefix.cpu.simd.lanes import I32, I64, LANES, constant, f32x16, i32x16
from numba_prefix.cpu.simd.memory import I16, I16X16, f32_to_bf16, pointer

HIGH = 0xFFFF0000


class BFloatType(ir.Type):
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloatType)

    def __hash__(self) -> int:
        return hash(BFloatType)


BF16X32 = ir.VectorType(BFloatType(), 2 * LANES)


def _lanes_function(emit: Any, result: Any, *given: Any) -> Any:
    @intrinsic
    def unary(typingctx: Any, a: Any) -> Any:
        return result(*given), lambda context, builder, sig, args: emit(builder, *args)

    @intrinsic
    def binary(typingctx: Any, a: Any, b: Any) -> Any:
        return result(*given), lambda context, builder, sig, args: emit(builder, *args)

    return unary if len(given) == 1 else binary


def _high_bits(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    return builder.lshr(builder.bitcast(x, i32x16.llvm), constant(i32x16, 16))


def first_half(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    return builder.bitcast(builder.shl(bits, constant(i32x16, 16)), f32x16.llvm)


def second_half(builder: ir.IRBuilder, pair: ir.Value) -> ir.Value:
    return builder.bitcast(builder.and_(pair, constant(i32x16, HIGH)), f32x16.llvm)


def _join(builder: ir.IRBuilder, first: ir.Value, second: ir.Value) -> ir.Value:
    return builder.or_(first, builder.shl(second, constant(i32x16, 16)))


def _rounded_pair(builder: ir.IRBuilder, first: ir.Value, second: ir.Value) -> ir.Value:
    if not has_pairs():
        bits = (builder.zext(f32_to_bf16(builder, x), i32x16.llvm) for x in (first, second))
        return _join(builder, *bits)
    kind = ir.FunctionType(BF16X32, [f32x16.llvm, f32x16.llvm])
    convert = builder.module.globals.get(_CONVERT) or ir.Function(builder.module, kind, _CONVERT)
    both = builder.bitcast(builder.call(convert, [second, first]), ir.VectorType(I16, 2 * LANES))
    order = [ir.Constant(I32, x // 2 + LANES * (x % 2)) for x in range(2 * LANES)]
    mixed = builder.shuffle_vector(both, both, ir.Constant(ir.VectorType(I32, 2 * LANES), order))
    return builder.bitcast(mixed, i32x16.llvm)


_CONVERT = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"

# f32x16 -> i32x16: the bits of the bfloat16 that is left when the rest is cut off
high_bits = _lanes_function(_high_bits, i32x16, f32x16)
# i32x16 -> f32x16: its reverse
from_bits = _lanes_function(first_half, f32x16, i32x16)
# i32x16 pairs -> f32x16: the first elements (from_bits, but for what the high halves hold) and the
# second ones
first_of_pairs = _lanes_function(first_half, f32x16, i32x16)
second_of_pairs = _lanes_function(second_half, f32x16, i32x16)
# two i32x16 of bits -> i32x16 pairs
join_pairs = _lanes_function(_join, i32x16, i32x16, i32x16)
# two f32x16 -> i32x16 pairs, rounded to nearest even; NaN stays NaN, subnormals may become 0
rounded_pairs = _lanes_function(_rounded_pair, i32x16, f32x16, f32x16)


@intrinsic
def store_16(typingctx: Any, address: Any, bits: Any) -> Any:
    """The low halves of 16 lanes, side by side."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store(builder.trunc(args[1], I16X16), pointer(builder, args[0], I16X16), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, i32x16), codegen


@intrinsic
def store_i32(typingctx: Any, address: Any, lanes: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store(args[1], pointer(builder, args[0], i32x16.llvm), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, i32x16), codegen


@intrinsic
def copy_16(typingctx: Any, source: Any, target: Any) -> Any:
    """One element of 16 bits."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value = builder.load(pointer(builder, args[0], I16), align=1)
        builder.store(value, pointer(builder, args[1], I16), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


I16X8, I16X32 = ir.VectorType(I16, 8), ir.VectorType(I16, 2 * LANES)
KEYS, SUM_DIMS = 2 * LANES, 8


def _mixed(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, order: list[int]) -> ir.Value:
    return builder.shuffle_vector(
        a, b, ir.Constant(ir.VectorType(I32, len(order)), [ir.Constant(I32, i) for i in order])
    )


def _interleaved(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, unit: int) -> list[ir.Value]:
    """Emits, for each 128 bits of two I16X32, the lower halves and the upper halves, `unit`
    elements of either in turns."""
    orders = (
        [
            which + lane + half + first + i
            for lane in range(0, KEYS, 8)
            for first in range(0, 4, unit)
            for which in (0, KEYS)
            for i in range(unit)
        ]
        for half in (0, 4)
    )
    return [_mixed(builder, a, b, order) for order in orders]


@intrinsic
def transpose_chunk(typingctx: Any, rows: Any, offset: Any, target: Any, pitch: Any, most: Any) -> Any:
    """8 elements of 16 bits each, `offset` bytes into 32 rows listed by address, as 8 rows of 32;
    returns the larger of `most` and the elements' magnitudes (see holds_non_finite).

    Loads put 8 elements of four rows into a register: what is left is transposed within 128 bits,
    by 24 shuffles for 256 elements. Whole rows of pairs as 32-bit blocks (memory.transpose_block)
    take 56, and have to be joined first.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        rows, offset, target, pitch, most = args

        def chunk(row: int) -> ir.Value:
            listed = pointer(builder, builder.add(rows, ir.Constant(I64, 8 * row)), I64)
            address = builder.add(builder.load(listed, align=1), offset)
            return builder.load(pointer(builder, address, I16X8), align=1)

        x = []
        for i in range(SUM_DIMS):
            quarters = [chunk(i + SUM_DIMS * lane) for lane in range(4)]
            halves = [_mixed(builder, quarters[j], quarters[j + 1], list(range(16))) for j in (0, 2)]
            x.append(_mixed(builder, halves[0], halves[1], list(range(KEYS))))
        largest = builder.bitcast(most, I16X32)
        for row in x:
            magnitude = builder.and_(row, ir.Constant(I16X32, [ir.Constant(I16, 0x7FFF)] * KEYS))
            largest = builder.select(builder.icmp_unsigned(">", magnitude, largest), magnitude, largest)
        for unit in (1, 2, 4):
            x = [
                half for i in range(SUM_DIMS) if not i & unit for half in _interleaved(builder, x[i], x[i + unit], unit)
            ]
        for i, row in enumerate(x):
            place = builder.add(target, builder.mul(pitch, ir.Constant(I64, i)))
            builder.store(row, pointer(builder, place, I16X32), align=1)
        return builder.bitcast(largest, i32x16.llvm)

    return i32x16(types.int64, types.int64, types.int64, types.int64, i32x16), codegen


@intrinsic
def holds_non_finite(typingctx: Any, most: Any) -> Any:
    """Whether any of the magnitudes that transpose_chunk returned is that of a bfloat16 infinity or
    NaN."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], I16X32)
        non_finite = builder.icmp_unsigned(">=", bits, ir.Constant(I16X32, [ir.Constant(I16, 0x7F80)] * KEYS))
        return builder.icmp_unsigned("!=", builder.bitcast(non_finite, I32), ir.Constant(I32, 0))

    return types.boolean(i32x16), codegen


def dot_pairs(builder: ir.IRBuilder, total: ir.Value, panel: ir.Value, scalar: ir.Value) -> ir.Value:
    """total + the products of both elements of a panel's pairs with those of one pair in all lanes
    (vdpbf16ps).

    Takes the place of prefill_f32_gemm.multiply: float32 vectors, of which panel and scalar hold
    pairs.
    """
    kind = ir.FunctionType(f32x16.llvm, [f32x16.llvm, BF16X32, BF16X32])
    dot = builder.module.globals.get(_DOT) or ir.Function(builder.module, kind, _DOT)
    return builder.call(dot, [total, builder.bitcast(panel, BF16X32), builder.bitcast(scalar, BF16X32)])


_DOT = "llvm.x86.avx512bf16.dpbf16ps.512"
