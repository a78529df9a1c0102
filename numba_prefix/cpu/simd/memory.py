"""Moving lanes between registers and memory: loads, stores, 16-bit conversion, transposition,
atomics.

Addresses are int64 byte addresses. Nothing assumes an alignment: a caller's buffer may start
anywhere.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from numba_prefix.cpu.simd.features import has_half_conversion, is_arm64, is_x86
from numba_prefix.cpu.simd.lanes import F32, I32, I64, LANES, b1x16, constant, f32x16, i32x16, i64x16, splat

I16, HALF = ir.IntType(16), ir.HalfType()
I16X16 = ir.VectorType(I16, LANES)


def pointer(builder: ir.IRBuilder, address: ir.Value, to: ir.Type) -> ir.Value:
    return builder.inttoptr(address, to.as_pointer())


def _make_load(result: types.Type, memory: ir.Type, convert: Any = None) -> Any:
    @intrinsic
    def load(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            value = builder.load(pointer(builder, args[0], memory), align=1)
            return convert(builder, value) if convert else value

        return result(types.int64), codegen

    return load


def _make_store(given: types.Type, memory: ir.Type, convert: Any = None) -> Any:
    @intrinsic
    def store(typingctx: Any, address: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            value = convert(builder, args[1]) if convert else args[1]
            builder.store(value, pointer(builder, args[0], memory), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, given), codegen

    return store


# --- 16-bit floats, as vectors or scalars


def _like(value: ir.Value, element: ir.Type) -> ir.Type:
    return ir.VectorType(element, value.type.count) if isinstance(value.type, ir.VectorType) else element


def _const(like: ir.Value, element: ir.Type, value: Any) -> ir.Constant:
    kind = _like(like, element)
    one = ir.Constant(element, value)
    return ir.Constant(kind, [one] * kind.count) if isinstance(kind, ir.VectorType) else one


def bf16_to_f32(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    wide = builder.shl(builder.zext(bits, _like(bits, I32)), _const(bits, I32, 16))
    return builder.bitcast(wide, _like(bits, F32))


def f32_to_bf16(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Round to nearest even; a NaN keeps its upper payload and becomes quiet."""
    bits = builder.bitcast(value, _like(value, I32))
    odd = builder.and_(builder.lshr(bits, _const(value, I32, 16)), _const(value, I32, 1))
    rounded = builder.add(bits, builder.add(odd, _const(value, I32, 0x7FFF)))
    quiet = builder.or_(bits, _const(value, I32, 0x400000))
    is_nan = builder.fcmp_unordered("uno", value, value)
    kept = builder.lshr(builder.select(is_nan, quiet, rounded), _const(value, I32, 16))
    return builder.trunc(kept, _like(value, I16))


def f16_to_f32(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    if has_half_conversion():
        return builder.fpext(builder.bitcast(bits, _like(bits, HALF)), _like(bits, F32))
    wide = builder.zext(bits, _like(bits, I32))
    magnitude = builder.and_(wide, _const(bits, I32, 0x7FFF))
    sign = builder.shl(builder.and_(wide, _const(bits, I32, 0x8000)), _const(bits, I32, 16))
    # Normals: rebias the exponent. Subnormals: an exact integer times 2**-24. Infinities and NaN:
    # all exponent bits.
    moved = builder.shl(magnitude, _const(bits, I32, 13))
    normal = builder.add(moved, _const(bits, I32, 112 << 23))
    small = builder.fmul(builder.uitofp(magnitude, _like(bits, F32)), _const(bits, F32, 2.0**-24))
    special = builder.or_(moved, _const(bits, I32, 0x7F800000))
    value = builder.select(builder.icmp_unsigned("<", magnitude, _const(bits, I32, 0x400)),
                           builder.bitcast(small, _like(bits, I32)), normal)  # fmt: skip
    value = builder.select(builder.icmp_unsigned(">=", magnitude, _const(bits, I32, 0x7C00)), special, value)
    return builder.bitcast(builder.or_(value, sign), _like(bits, F32))


def _f32_to_f16(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Round to nearest even; overflow to infinity, subnormals kept, NaN stays NaN."""
    if has_half_conversion():
        return builder.bitcast(builder.fptrunc(value, _like(value, HALF)), _like(value, I16))
    bits = builder.bitcast(value, _like(value, I32))
    sign = builder.and_(builder.lshr(bits, _const(value, I32, 16)), _const(value, I32, 0x8000))
    magnitude = builder.and_(bits, _const(value, I32, 0x7FFFFFFF))
    odd = builder.and_(builder.lshr(magnitude, _const(value, I32, 13)), _const(value, I32, 1))
    rebias = _const(value, I32, (0xFFF - (112 << 23)) & 0xFFFFFFFF)
    normal = builder.lshr(builder.add(builder.add(magnitude, rebias), odd), _const(value, I32, 13))
    # Subnormal results: adding 1/2 aligns 2**-24 with the last mantissa bit, so the addition itself
    # rounds.
    aligned = builder.fadd(builder.bitcast(magnitude, _like(value, F32)), _const(value, F32, 0.5))
    small = builder.sub(builder.bitcast(aligned, _like(value, I32)), _const(value, I32, 0x3F000000))
    is_small = builder.icmp_unsigned("<", magnitude, _const(value, I32, 113 << 23))
    overflows = builder.icmp_unsigned(">=", magnitude, _const(value, I32, 0x477FF000))
    is_nan = builder.icmp_unsigned(">", magnitude, _const(value, I32, 0x7F800000))
    result = builder.select(is_small, small, normal)
    result = builder.select(overflows, _const(value, I32, 0x7C00), result)
    result = builder.select(is_nan, _const(value, I32, 0x7E00), result)
    return builder.trunc(builder.or_(result, sign), _like(value, I16))


load_f32 = _make_load(f32x16, f32x16.llvm)
load_f16 = _make_load(f32x16, I16X16, f16_to_f32)
load_bf16 = _make_load(f32x16, I16X16, bf16_to_f32)
load_i32 = _make_load(i32x16, i32x16.llvm)
load_i64 = _make_load(i64x16, i64x16.llvm)
store_f32 = _make_store(f32x16, f32x16.llvm)
store_f16 = _make_store(f32x16, I16X16, _f32_to_f16)
store_bf16 = _make_store(f32x16, I16X16, f32_to_bf16)
store_i64 = _make_store(i64x16, i64x16.llvm)

load1_f32 = _make_load(types.float32, F32)
load1_f16 = _make_load(types.float32, I16, f16_to_f32)
load1_bf16 = _make_load(types.float32, I16, bf16_to_f32)
load1_i32 = _make_load(types.int32, I32)
load1_i64 = _make_load(types.int64, I64)
store1_f32 = _make_store(types.float32, F32)
store1_f16 = _make_store(types.float32, I16, _f32_to_f16)
store1_bf16 = _make_store(types.float32, I16, f32_to_bf16)
store1_i32 = _make_store(types.int32, I32)
store1_i64 = _make_store(types.int64, I64)


# --- gathers: one address per lane


def _make_gather(memory: ir.Type, convert: Any) -> Any:
    @intrinsic
    def gather(typingctx: Any, addresses: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            value = ir.Constant(ir.VectorType(memory, LANES), ir.Undefined)
            for lane in range(LANES):
                index = ir.Constant(I32, lane)
                source = pointer(builder, builder.extract_element(args[0], index), memory)
                value = builder.insert_element(value, builder.load(source, align=1), index)
            return convert(builder, value) if convert else value

        return f32x16(i64x16), codegen

    return gather


gather_f32 = _make_gather(F32, None)
gather_f16 = _make_gather(I16, f16_to_f32)
gather_bf16 = _make_gather(I16, bf16_to_f32)


# --- lanes themselves


@intrinsic
def splat_f32(typingctx: Any, value: Any) -> Any:
    """f32x16 with a float32 in every lane."""
    return f32x16(types.float32), lambda context, builder, sig, args: splat(builder, args[0])


@intrinsic
def splat_i32(typingctx: Any, value: Any) -> Any:
    """i32x16 with an integer, taken modulo 2**32, in every lane."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return splat(builder, builder.trunc(args[0], I32))

    return i32x16(types.int64), codegen


@intrinsic
def to_i64(typingctx: Any, lanes: Any) -> Any:
    return i64x16(i32x16), lambda context, builder, sig, args: builder.sext(args[0], i64x16.llvm)


@intrinsic
def is_not_finite(typingctx: Any, lanes: Any) -> Any:
    """b1x16: infinite or NaN."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        exponent = builder.and_(builder.bitcast(args[0], i32x16.llvm), constant(i32x16, 0x7F800000))
        return builder.icmp_unsigned("==", exponent, constant(i32x16, 0x7F800000))

    return b1x16(f32x16), codegen


@intrinsic
def any_lane(typingctx: Any, mask: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.icmp_unsigned("!=", builder.bitcast(args[0], I16), ir.Constant(I16, 0))

    return types.boolean(b1x16), codegen


@intrinsic
def fold_lanes(typingctx: Any, lanes: Any, distance: Any) -> Any:
    """The vector rotated down by 8, 4, 2 or 1 lanes (a literal), to fold lanes onto each other."""
    if not isinstance(distance, types.IntegerLiteral):
        return None
    by = distance.literal_value

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        order = [ir.Constant(I32, (lane + by) % LANES) for lane in range(LANES)]
        return builder.shuffle_vector(args[0], args[0], ir.Constant(ir.VectorType(I32, LANES), order))

    return lanes(lanes, distance), codegen


# --- blocks


@intrinsic
def transpose_block(typingctx: Any, source: Any, source_pitch: Any, target: Any, target_pitch: Any) -> Any:
    """Transposes float32 [16, 16] from `source` to `target`; pitches are bytes from row to row."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        source, source_pitch, target, target_pitch = args

        def row_pointer(base: ir.Value, pitch: ir.Value, row: int) -> ir.Value:
            offset = builder.mul(pitch, ir.Constant(I64, row))
            return pointer(builder, builder.add(base, offset), f32x16.llvm)

        rows = [builder.load(row_pointer(source, source_pitch, i), align=1) for i in range(LANES)]
        # Four rounds of exchanging half blocks between rows that differ in one bit of their number.
        for distance in (8, 4, 2, 1):
            low = [lane if not lane & distance else LANES + lane - distance for lane in range(LANES)]
            high = [lane + distance if not lane & distance else LANES + lane for lane in range(LANES)]
            order = [ir.Constant(ir.VectorType(I32, LANES), [ir.Constant(I32, i) for i in o]) for o in (low, high)]
            for i in range(LANES):
                if not i & distance:
                    a, b = rows[i], rows[i + distance]
                    rows[i], rows[i + distance] = (builder.shuffle_vector(a, b, o) for o in order)
        for i, row in enumerate(rows):
            builder.store(row, row_pointer(target, target_pitch, i), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def atomic_add(typingctx: Any, address: Any, value: Any) -> Any:
    """Adds to the int64 at an 8-byte aligned address, as one step among all threads; returns what
    was there."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", pointer(builder, args[0], I64), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def enter_float_mode(typingctx: Any) -> Any:
    """Sets this thread to round to nearest and to keep subnormals, whatever its host set; returns
    the mode before.

    A helper thread inherits the mode of whoever started it: without this, bits would depend on who
    helps."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if is_x86():
            old = _mxcsr(builder, "stmxcsr")
            _mxcsr(builder, "ldmxcsr", ir.Constant(I32, 0x1F80))
            return builder.zext(old, I64)
        if is_arm64():
            old = builder.call(_fpcr(builder, "get", ir.FunctionType(I64, [])), [])
            builder.call(_fpcr(builder, "set", ir.FunctionType(ir.VoidType(), [I64])), [ir.Constant(I64, 0)])
            return old
        return ir.Constant(I64, 0)

    return types.int64(), codegen


@intrinsic
def leave_float_mode(typingctx: Any, mode: Any) -> Any:
    """Back to what enter_float_mode returned."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if is_x86():
            _mxcsr(builder, "ldmxcsr", builder.trunc(args[0], I32))
        elif is_arm64():
            builder.call(_fpcr(builder, "set", ir.FunctionType(ir.VoidType(), [I64])), [args[0]])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


def _mxcsr(builder: ir.IRBuilder, instruction: str, value: ir.Value | None = None) -> ir.Value:
    """x86's control word of vector arithmetic, stored to or loaded from memory."""
    byte = ir.IntType(8).as_pointer()
    place = cgutils.alloca_once(builder, I32)
    if value is not None:
        builder.store(value, place)
    kind = ir.FunctionType(ir.VoidType(), [byte])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.sse.{instruction}")
    builder.call(function, [builder.bitcast(place, byte)])
    return builder.load(place)


def _fpcr(builder: ir.IRBuilder, verb: str, kind: ir.FunctionType) -> ir.Value:
    return cgutils.get_or_insert_function(builder.module, kind, f"llvm.aarch64.{verb}.fpcr")


def emit_prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Asks for the cache line at an address, to be read; never faults."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
    function = builder.module.declare_intrinsic("llvm.prefetch", (byte,), kind)
    builder.call(function, [builder.inttoptr(address, byte), *(ir.Constant(I32, v) for v in (0, 3, 1))])


@intrinsic
def prefetch(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        emit_prefetch(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), codegen
