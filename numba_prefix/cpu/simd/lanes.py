"""A vector of 16 lanes as a Numba type, with the operators and functions that rules and kernels
use.

`f32x16`, `i32x16`, `i64x16` and the mask `b1x16` are LLVM vectors held in registers; LLVM splits
them to what the CPU has (1 x 512, 2 x 256 or 4 x 128 bits), so one source serves AVX-512, AVX2 and
NEON. Operators take a lane vector with a lane vector or with a scalar, which is broadcast.
Everything is lowered straight to LLVM instructions: no nested compilation, no float64, no
fast-math. cpu/simd/memory.py moves lanes between registers and memory.
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import models, register_model

from numba_prefix.rules import elementwise

LANES = 16

F32 = ir.FloatType()
I1, I32, I64 = ir.IntType(1), ir.IntType(32), ir.IntType(64)


class LanesType(types.Type):
    """16 values of one LLVM element type."""

    def __init__(self, name: str, element: ir.Type, scalar: types.Type) -> None:
        self.element, self.scalar = element, scalar
        super().__init__(name=name)

    @property
    def llvm(self) -> ir.VectorType:
        return ir.VectorType(self.element, LANES)

    def __reduce__(self) -> Any:
        return _lanes_by_name, (self.name,)


@register_model(LanesType)
class LanesModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: LanesType) -> None:
        super().__init__(dmm, fe_type, fe_type.llvm)


f32x16 = LanesType("f32x16", F32, types.float32)
i32x16 = LanesType("i32x16", I32, types.int32)
i64x16 = LanesType("i64x16", I64, types.int64)
b1x16 = LanesType("b1x16", I1, types.boolean)
_ALL = {t.name: t for t in (f32x16, i32x16, i64x16, b1x16)}


def _lanes_by_name(name: str) -> LanesType:
    return _ALL[name]


def constant(lanes: LanesType, value: Any) -> ir.Constant:
    return ir.Constant(lanes.llvm, [ir.Constant(lanes.element, value)] * LANES)


def splat(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """A scalar in every lane."""
    vector = ir.VectorType(value.type, LANES)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(I32, 0))
    zeros = ir.Constant(ir.VectorType(I32, LANES), [ir.Constant(I32, 0)] * LANES)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)


def widen(context: Any, builder: ir.IRBuilder, value: ir.Value, given: types.Type, wanted: LanesType) -> ir.Value:
    """A lane vector as it is, a scalar cast to the element type and broadcast."""
    if isinstance(given, LanesType):
        return value
    return splat(builder, context.cast(builder, value, given, wanted.scalar))


def call(builder: ir.IRBuilder, name: str, *args: ir.Value) -> ir.Value:
    """An LLVM intrinsic overloaded on the type of its first argument."""
    vector = args[0].type
    suffix = f"v{vector.count}{'f32' if vector.element == F32 else str(vector.element)}"
    function = builder.module.declare_intrinsic(f"{name}.{suffix}", (), ir.FunctionType(vector, [a.type for a in args]))
    return builder.call(function, args)


# --- operators


def _pair(args: tuple[types.Type, ...], allowed: tuple[LanesType, ...]) -> LanesType | None:
    """The lane type that a binary operation works in, or None if it is not ours."""
    lanes = {a for a in args if isinstance(a, LanesType)}
    if len(args) != 2 or len(lanes) != 1:
        return None
    (wanted,) = lanes
    ok = all(isinstance(a, (LanesType, types.Integer, types.Boolean)) or wanted is f32x16 for a in args)
    return wanted if wanted in allowed and ok else None


def _binary(op: Any, float_op: str | None, int_op: str | None) -> None:
    allowed = ((f32x16,) if float_op else ()) + ((i32x16, i64x16, b1x16) if int_op else ())

    class Typing(AbstractTemplate):
        def generic(self, args: Any, kws: Any) -> Any:
            wanted = _pair(args, allowed)
            return signature(wanted, *args) if wanted is not None else None

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        wanted = sig.return_type
        a, b = (widen(context, builder, v, t, wanted) for v, t in zip(args, sig.args, strict=True))
        return getattr(builder, str(float_op if wanted is f32x16 else int_op))(a, b)

    _register(op, Typing, lower)


def _compare(op: Any, predicate: str) -> None:
    class Typing(AbstractTemplate):
        def generic(self, args: Any, kws: Any) -> Any:
            wanted = _pair(args, (f32x16, i32x16, i64x16))
            return signature(b1x16, *args) if wanted is not None else None

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        wanted = _pair(sig.args, (f32x16, i32x16, i64x16))
        assert wanted is not None
        a, b = (widen(context, builder, v, t, wanted) for v, t in zip(args, sig.args, strict=True))
        if wanted is f32x16:
            return (builder.fcmp_unordered if predicate == "!=" else builder.fcmp_ordered)(predicate, a, b)
        return builder.icmp_signed(predicate, a, b)

    _register(op, Typing, lower)


def _register(op: Any, typing: Any, lower: Any) -> None:
    infer_global(op)(typing)
    for pattern in ((LanesType, LanesType), (LanesType, types.Any), (types.Any, LanesType)):
        lower_builtin(op, *pattern)(lower)


for _op, _float_op, _int_op in (
    (operator.add, "fadd", "add"),
    (operator.sub, "fsub", "sub"),
    (operator.mul, "fmul", "mul"),
    (operator.truediv, "fdiv", None),
    (operator.and_, None, "and_"),
    (operator.or_, None, "or_"),
    (operator.lshift, None, "shl"),
    (operator.rshift, None, "ashr"),
):
    _binary(_op, _float_op, _int_op)

for _op, _predicate in (
    (operator.lt, "<"),
    (operator.le, "<="),
    (operator.gt, ">"),
    (operator.ge, ">="),
    (operator.eq, "=="),
    (operator.ne, "!="),
):
    _compare(_op, _predicate)


@infer_global(operator.neg)
class _NegTyping(AbstractTemplate):
    def generic(self, args: Any, kws: Any) -> Any:
        return signature(f32x16, f32x16) if args == (f32x16,) else None


@lower_builtin(operator.neg, LanesType)
def _lower_neg(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return builder.fneg(args[0])


# --- the vocabulary of rules


@infer_global(elementwise.where)
class _WhereTyping(AbstractTemplate):
    """where(lane mask or scalar condition, a, b): lanes if either a or b is a lane vector."""

    def generic(self, args: Any, kws: Any) -> Any:
        if len(args) != 3:
            return None
        lanes = next((a for a in args[1:] if isinstance(a, LanesType)), None)
        if lanes is None:
            scalar = self.context.unify_types(*args[1:])
            lanes = {types.float32: f32x16, types.int32: i32x16}.get(scalar) if args[0] is b1x16 else scalar
        return signature(lanes, *args) if lanes is not None else None


def _lower_where(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    condition, wanted = args[0], sig.return_type
    if sig.args[0] is not b1x16:
        condition = context.cast(builder, condition, sig.args[0], types.boolean)
    if isinstance(wanted, LanesType):
        yes, no = (widen(context, builder, v, t, wanted) for v, t in zip(args[1:], sig.args[1:], strict=True))
    else:
        yes, no = (context.cast(builder, v, t, wanted) for v, t in zip(args[1:], sig.args[1:], strict=True))
    return builder.select(condition, yes, no)


lower_builtin(elementwise.where, types.Any, types.Any, types.Any)(_lower_where)


@infer_global(elementwise.maximum)
class _MaximumTyping(AbstractTemplate):
    def generic(self, args: Any, kws: Any) -> Any:
        wanted = _pair(args, (f32x16, i32x16, i64x16))
        return signature(wanted, *args) if wanted is not None else None


def _lower_maximum(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    wanted = sig.return_type
    a, b = (widen(context, builder, v, t, wanted) for v, t in zip(args, sig.args, strict=True))
    larger = builder.fcmp_ordered(">", b, a) if wanted is f32x16 else builder.icmp_signed(">", b, a)
    return builder.select(larger, b, a)


for _pattern in ((LanesType, LanesType), (LanesType, types.Any), (types.Any, LanesType)):
    lower_builtin(elementwise.maximum, *_pattern)(_lower_maximum)


def _unary(function: Any, given: tuple[LanesType, ...], lower: Any) -> None:
    class Typing(AbstractTemplate):
        def generic(self, args: Any, kws: Any) -> Any:
            return signature(f32x16, *args) if len(args) == 1 and args[0] in given else None

    infer_global(function)(Typing)
    lower_builtin(function, LanesType)(lower)


@infer_global(elementwise.multiply_add)
class _MultiplyAddTyping(AbstractTemplate):
    def generic(self, args: Any, kws: Any) -> Any:
        return signature(f32x16, *args) if args == (f32x16,) * 3 else None


def _lower_multiply_add(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    """One rounding where the CPU has the instruction, as in the micro-kernels."""
    return call(builder, "llvm.fmuladd", *args)


def _lower_to_f32(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return builder.sitofp(args[0], f32x16.llvm)


def _lower_sqrt(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return call(builder, "llvm.sqrt", args[0])


def polynomial(builder: ir.IRBuilder, x: ir.Value, coefficients: tuple[float, ...]) -> ir.Value:
    """Horner's rule, highest power first; fused multiply-adds where the CPU has them."""
    value = constant(f32x16, coefficients[0])
    for c in coefficients[1:]:
        value = call(builder, "llvm.fmuladd", value, x, constant(f32x16, c))
    return value


# 2**f on [-1/2, 1/2], fitted for the relative error: 2e-8 with these rounded coefficients. Degree
# 6, because degree 5 (1e-7) shows in a float32 output and saves one instruction of eighteen.
EXP2_COEFFICIENTS = (0.00015353720, 0.0013398877, 0.0096184378, 0.055503324, 0.24022648, 0.69314718, 1.0)

# Adding 1.5 * 2**23 + 127 leaves the nearest integer, biased like an exponent, in the low mantissa
# bits. Up to 1 there the result is 0: below it could be subnormal.
EXP2_MAGIC = 12582912.0 + 127.0
EXP2_LEAST = 12582912.0 + 1.0


@infer_global(elementwise.exp2_scaled)
class _Exp2Typing(AbstractTemplate):
    def generic(self, args: Any, kws: Any) -> Any:
        wanted = _pair(args, (f32x16,))
        return signature(wanted, *args) if wanted is not None else None


def _lower_exp2(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    x, scale = (widen(context, builder, v, t, f32x16) for v, t in zip(args, sig.args, strict=True))
    shifted = call(builder, "llvm.fmuladd", x, scale, constant(f32x16, EXP2_MAGIC))
    whole = builder.fsub(shifted, constant(f32x16, EXP2_MAGIC))
    fraction = call(builder, "llvm.fmuladd", x, scale, builder.fneg(whole))
    power = builder.shl(builder.bitcast(shifted, i32x16.llvm), constant(i32x16, 23))
    # A product, not an integer addition to the exponent: a NaN stays NaN whatever its payload.
    value = builder.fmul(polynomial(builder, fraction, EXP2_COEFFICIENTS), builder.bitcast(power, f32x16.llvm))
    underflows = builder.fcmp_ordered("<=", shifted, constant(f32x16, EXP2_LEAST))
    return builder.select(underflows, constant(f32x16, 0.0), value)


# log2(1 + f) / f on [sqrt(1/2) - 1, sqrt(2) - 1], fitted like the above: relative error 2e-8.
LOG2_COEFFICIENTS = (
    *(-0.10993927, 0.18616934, -0.19106429, 0.20460166, -0.23961733),
    *(0.28856733, -0.36069664, 0.48089823, -0.72134733, 1.4426950),
)
SQRT_HALF_BITS = 0x3F3504F3


def _lower_log2(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    """For normal x > 0; NaN stays NaN."""
    (x,) = args
    offset = builder.sub(builder.bitcast(x, i32x16.llvm), constant(i32x16, SQRT_HALF_BITS))
    exponent = builder.ashr(offset, constant(i32x16, 23))
    mantissa = builder.add(builder.and_(offset, constant(i32x16, 0x7FFFFF)), constant(i32x16, SQRT_HALF_BITS))
    f = builder.fsub(builder.bitcast(mantissa, f32x16.llvm), constant(f32x16, 1.0))
    log_mantissa = builder.fmul(f, polynomial(builder, f, LOG2_COEFFICIENTS))
    whole = builder.fadd(builder.sitofp(exponent, f32x16.llvm), log_mantissa)
    return builder.fadd(whole, builder.fsub(x, x))


_unary(elementwise.to_f32, (i32x16, i64x16), _lower_to_f32)
_unary(elementwise.sqrt, (f32x16,), _lower_sqrt)
for _pattern in ((LanesType, LanesType), (LanesType, types.Any)):
    lower_builtin(elementwise.exp2_scaled, *_pattern)(_lower_exp2)
_unary(elementwise.log2, (f32x16,), _lower_log2)
lower_builtin(elementwise.multiply_add, LanesType, LanesType, LanesType)(_lower_multiply_add)
