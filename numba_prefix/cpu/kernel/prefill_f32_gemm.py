"""The micro-kernel of path `vector`: a register-blocked product for any CPU that LLVM has vectors
for.

    C[i, lane] = (alpha[lane] * C[i, lane] +) sum over t of A[i, t] * B[t, lane]

A holds scalars to broadcast (keys of a score product, values of an output product), B and C hold
panels of 16 lanes, one query row a lane. MR scalars times NV panels of accumulators stay in
registers through the sum over t. Every sum starts at zero and what C held is added last: short
chains have a fraction of the rounding error of one long chain.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from numba_prefix.cpu.kernel.sizes import FLOAT, VECTOR_BYTES
from numba_prefix.cpu.simd.features import register_block
from numba_prefix.cpu.simd.lanes import F32, I64, LANES, call, f32x16, splat
from numba_prefix.cpu.simd.memory import pointer

MR, NV = register_block()


def multiply(builder: ir.IRBuilder, total: ir.Value, panel: ir.Value, scalar: ir.Value) -> ir.Value:
    """total + panel * scalar, the scalar in all lanes."""
    return call(builder, "llvm.fmuladd", panel, scalar, total)


def make_product(panels: int, finish: Any, multiply: Any = multiply) -> Any:
    """Makes a product of one kind (finish_scores or finish_output). multiply: what is done with its
    elements of 32 bits."""

    @intrinsic
    def product(
        typingctx: Any, a: Any, a_pitch: Any, b: Any, b_panel: Any, num_steps: Any, c: Any, c_panel: Any, old: Any
    ) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            finish(builder, args, panels, multiply)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), codegen

    return product


def _int64(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def _c_pointer(builder: ir.IRBuilder, c: ir.Value, c_panel: ir.Value, i: int, v: int) -> ir.Value:
    base = builder.add(c, builder.mul(c_panel, _int64(v)))
    return pointer(builder, builder.add(base, _int64(i * VECTOR_BYTES)), f32x16.llvm)


def _sums(
    builder: ir.IRBuilder, args: Any, panels: int, a_offset: list[ir.Value], a_step: ir.Value, multiply: Any
) -> dict[tuple[int, int], ir.Value]:
    """Emits the sums over t, in registers, by (scalar, panel). Row i of A is at a + a_offset[i],
    its terms a_step bytes apart."""
    a, _, b, b_panel, num_steps = args[:5]
    blocks = [(i, v) for i in range(MR) for v in range(panels)]
    b_offset = [builder.mul(b_panel, _int64(v)) for v in range(panels)]
    vector = f32x16.llvm
    zero = ir.Constant(vector, [ir.Constant(F32, 0.0)] * LANES)
    before = builder.block
    loop, after = builder.append_basic_block("product.loop"), builder.append_basic_block("product.after")
    builder.branch(loop)
    builder.position_at_end(loop)
    step, a_t, b_t = (builder.phi(I64) for _ in range(3))
    acc = {block: builder.phi(vector) for block in blocks}
    panels_t = [builder.load(pointer(builder, builder.add(b_t, b_offset[v]), vector), align=4) for v in range(panels)]
    total = {}
    for i in range(MR):
        scalar = splat(builder, builder.load(pointer(builder, builder.add(a_t, a_offset[i]), F32), align=4))
        for v in range(panels):
            total[i, v] = multiply(builder, acc[i, v], panels_t[v], scalar)
    next_step = builder.add(step, _int64(1))
    for phi, first, later in (
        (step, _int64(0), next_step),
        (a_t, a, builder.add(a_t, a_step)),
        (b_t, b, builder.add(b_t, _int64(VECTOR_BYTES))),
        *((acc[block], zero, total[block]) for block in blocks),
    ):
        phi.add_incoming(first, before)
        phi.add_incoming(later, loop)
    builder.cbranch(builder.icmp_signed("<", next_step, num_steps), loop, after)
    builder.position_at_end(after)
    return total


def finish_scores(builder: ir.IRBuilder, args: Any, panels: int, multiply: Any) -> None:
    _, a_pitch, _, _, _, c, c_panel, is_later = args
    a_offset = [builder.mul(a_pitch, _int64(i)) for i in range(MR)]
    total = _sums(builder, args, panels, a_offset, _int64(FLOAT), multiply)
    with builder.if_else(builder.icmp_signed("!=", is_later, _int64(0))) as (later, first):
        for branch, adds in ((later, True), (first, False)):
            with branch:
                for (i, v), value in total.items():
                    place = _c_pointer(builder, c, c_panel, i, v)
                    builder.store(builder.fadd(builder.load(place, align=4), value) if adds else value, place, align=4)


def finish_output(builder: ir.IRBuilder, args: Any, panels: int, multiply: Any) -> None:
    _, a_pitch, _, _, _, c, c_panel, alpha = args
    total = _sums(builder, args, panels, [_int64(i * FLOAT) for i in range(MR)], a_pitch, multiply)
    alpha_panel = [builder.add(alpha, _int64(v * VECTOR_BYTES)) for v in range(panels)]
    factor = [builder.load(pointer(builder, place, f32x16.llvm), align=4) for place in alpha_panel]
    for (i, v), value in total.items():
        place = _c_pointer(builder, c, c_panel, i, v)
        old = builder.load(place, align=4)
        builder.store(call(builder, "llvm.fmuladd", factor[v], old, value), place, align=4)


# (a, a_pitch, b, b_panel, num_steps, c, c_panel, old), all int64: byte addresses and strides, and
# num_steps > 0. Score product: A's row i is at a + i * a_pitch, t runs along it; old is 0, or 1 to
# add to C. Output product: A's row i is float i at a + t * a_pitch; old is the address of alpha,
# float32 [panels, 16].
score_product, score_product_1 = (make_product(panels, finish_scores) for panels in (NV, 1))
output_product, output_product_1 = (make_product(panels, finish_output) for panels in (NV, 1))
