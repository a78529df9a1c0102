"""The shared rules, bound to scalars of a CUDA thread: masks, softmax and tiling say what, vocabulary's words mean PTX here."""

from __future__ import annotations

import types as python
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.cuda.extending import intrinsic

from numba_prefix.cuda.kernel import ptx
from numba_prefix.cuda.kernel.jit import inline
from numba_prefix.rules import masks, softmax, tiling


@intrinsic
def where(_: Any, condition: Any, yes: Any, no: Any) -> Any:
    kind = types.unliteral(yes) if types.unliteral(yes) == types.unliteral(no) else types.int64

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.select(*arguments)

    return kind(types.boolean, kind, kind), codegen


@intrinsic
def to_f32(_: Any, x: Any) -> Any:
    """Positions and distances fit 32 bits, whatever Numba widened them to; that conversion is the quick one."""
    x = types.unliteral(x)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = arguments[0]
        return builder.sitofp(builder.trunc(value, ir.IntType(32)) if x.bitwidth > 32 else value, ir.FloatType())

    return types.float32(x), codegen


@intrinsic
def maximum(_: Any, a: Any, b: Any) -> Any:
    """Of two float32 (the other one where one is NaN) or of two integers."""
    kind = types.float32 if types.unliteral(a) == types.float32 else types.int64

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, y = arguments
        if kind == types.float32:
            function = ir.FunctionType(ir.FloatType(), [ir.FloatType()] * 2)
            return builder.call(ir.InlineAsm(function, "max.f32 $0, $1, $2;", "=f,f,f"), arguments)
        return builder.select(builder.icmp_signed(">", y, x), y, x)

    return kind(kind, kind), codegen


@inline
def exp2_scaled(x: Any, scale: Any) -> Any:
    return ptx.exp2(x * scale)


_WORDS = {
    "where": where,
    "to_f32": to_f32,
    "maximum": maximum,
    "exp2_scaled": exp2_scaled,
    "log2": ptx.log2,
    "sqrt": ptx.sqrt,
}
_done: dict[Callable[..., Any], Any] = {}


def rule(function: Callable[..., Any]) -> Any:
    """A rule as a device function: its code unchanged, the words and the rules that it names replaced by this target's."""
    if function not in _done:
        names = dict(function.__globals__)
        for name in function.__code__.co_names:
            if name in _WORDS:
                names[name] = _WORDS[name]
            elif isinstance(names.get(name), python.FunctionType):
                names[name] = rule(names[name])
        _done[function] = inline(python.FunctionType(function.__code__, names, function.__name__))
    return _done[function]


def _rules(*functions: Callable[..., Any]) -> list[Any]:
    return [rule(function) for function in functions]


running_max, shift_of, rescale = _rules(softmax.running_max, softmax.shift_of, softmax.rescale)
weight, normalize, log_sum_exp = _rules(softmax.weight, softmax.normalize, softmax.log_sum_exp)
weighted = rule(softmax.weighted)
last_visible, is_visible = _rules(masks.last_visible, masks.is_visible)
left_align_shift = rule(masks.left_align_shift)
linear_bias, sqrt_bias, left_align_bias = _rules(masks.linear_bias, masks.sqrt_bias, masks.left_align_bias)
template_row, heads_mask_row = _rules(masks.template_row, masks.heads_mask_row)
template_linear_bias, template_sqrt_bias = _rules(masks.template_linear_bias, masks.template_sqrt_bias)
template_left_align_bias = rule(masks.template_left_align_bias)
rows_in_tile, q_idx_of_row = _rules(tiling.rows_in_tile, tiling.q_idx_of_row)
run_of_key, kv_pos_of_key, keys_in_block = _rules(tiling.run_of_key, tiling.kv_pos_of_key, tiling.keys_in_block)
last_held, logical_block_of, partial_floats = _rules(tiling.last_held, tiling.logical_block_of, tiling.partial_floats)
lane_rows, round_up = _rules(tiling.lane_rows, tiling.round_up)
