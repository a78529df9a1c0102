"""The shared rules for the scalars of a CUDA thread: `masks`, `softmax` and `tiling` are
numba_prefix.rules' modules with each rule as a device function, in which the words of
elementwise.py mean PTX."""

from __future__ import annotations

import types as python
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import types
from numba.cuda.extending import intrinsic

from numba_prefix.cuda.kernel import ptx
from numba_prefix.cuda.kernel.jit import inline
from numba_prefix.rules import elementwise
from numba_prefix.rules import masks as masks_rules
from numba_prefix.rules import softmax as softmax_rules
from numba_prefix.rules import tiling as tiling_rules

__all__ = ["masks", "softmax", "tiling", "where"]


@intrinsic
def where(_: Any, condition: Any, yes: Any, no: Any) -> Any:
    kind = types.unliteral(yes) if types.unliteral(yes) == types.unliteral(no) else types.int64

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.select(*arguments)

    return kind(types.boolean, kind, kind), codegen


@intrinsic
def to_f32(_: Any, x: Any) -> Any:
    """Positions and distances fit 32 bits, whatever Numba widened them to; that conversion is the
    quick one."""
    x = types.unliteral(x)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = arguments[0]
        return builder.sitofp(builder.trunc(value, ir.IntType(32)) if x.bitwidth > 32 else value, ir.FloatType())

    return types.float32(x), codegen


@intrinsic
def maximum(_: Any, a: Any, b: Any) -> Any:
    """The larger of two float32 (the other one where one is NaN) or of two integers."""
    kind = types.float32 if types.unliteral(a) == types.float32 else types.int64

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, y = arguments
        if kind == types.float32:
            function = ir.FunctionType(ir.FloatType(), [ir.FloatType()] * 2)
            return builder.call(ir.InlineAsm(function, "max.f32 $0, $1, $2;", "=f,f,f"), arguments)
        return builder.select(builder.icmp_signed(">", y, x), y, x)

    return kind(kind, kind), codegen


@inline
def multiply_add(a: Any, b: Any, c: Any) -> Any:
    """One instruction: products and sums are contracted wherever they meet
    (compile/compiler.py)."""
    return a * b + c


@inline
def exp2_scaled(x: Any, scale: Any) -> Any:
    return ptx.exp2(x * scale)


_WORDS = {
    "where": where,
    "to_f32": to_f32,
    "maximum": maximum,
    "multiply_add": multiply_add,
    "exp2_scaled": exp2_scaled,
    "log2": ptx.log2,
    "sqrt": ptx.sqrt,
}
_done: dict[Callable[..., Any], Any] = {}


def _rule(function: python.FunctionType) -> Any:
    """A rule as a device function: its code unchanged, the words and the rules that it names
    replaced by this target's. Raises KeyError for a word that has no meaning here."""
    if function not in _done:
        names = dict(function.__globals__)
        for name in function.__code__.co_names:
            value = names.get(name)
            if isinstance(value, python.FunctionType):
                names[name] = _WORDS[name] if value.__module__ == elementwise.__name__ else _rule(value)
        _done[function] = inline(python.FunctionType(function.__code__, names, function.__name__))
    return _done[function]


def _bound(module: python.ModuleType) -> Any:
    """A module with all that another one has, its rules as device functions."""
    made = python.ModuleType(f"{module.__name__} (CUDA)")
    for name, value in vars(module).items():
        if not name.startswith("__"):
            is_rule = isinstance(value, python.FunctionType) and value.__module__ == module.__name__
            setattr(made, name, _rule(value) if is_rule else value)
    return made


if TYPE_CHECKING:  # for tools, which find the rules themselves
    from numba_prefix.rules import masks, softmax, tiling
else:
    masks, softmax, tiling = map(_bound, (masks_rules, softmax_rules, tiling_rules))
