"""Micro-kernels for few query rows (decode): lanes run along the head, so that no lane is empty.

With R rows (1, 4 or 8) a vector of scores holds 16 / R keys: lane = key * R + row. Keys and values are read where they
lie, in the caller's dtype, through a list of row addresses; head_size is a multiple of 16.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from numba_prefix.cpu.features import features
from numba_prefix.cpu.lanes import F32, I32, I64, LANES, call, f32x16, splat
from numba_prefix.cpu.memory import I16X16, bf16_to_f32, emit_prefetch, f16_to_f32, pointer

# Accumulators kept in registers at a time: 16 where there are 32 vector registers of 16 lanes, 4 elsewhere.
DOTS = 16 if "avx512f" in features() else 4
FOLD_ROWS = (1, 4, 8)  # as tiling.fold_rows
# Vectors of a value row that one wide pass over the keys takes.
VALUE_COLUMNS = {rows: max(1, min(4, DOTS // rows)) for rows in FOLD_ROWS}
ZERO = ir.Constant(f32x16.llvm, [ir.Constant(F32, 0.0)] * LANES)
DTYPES = ("float16", "bfloat16", "float32")


def _load_row(builder: ir.IRBuilder, dtype: str, address: ir.Value) -> ir.Value:
    if dtype == "float32":
        return builder.load(pointer(builder, address, f32x16.llvm), align=1)
    raw = builder.load(pointer(builder, address, I16X16), align=1)
    return (f16_to_f32 if dtype == "float16" else bf16_to_f32)(builder, raw)


def _count_loop(builder: ir.IRBuilder, count: ir.Value, start: list[ir.Value], body: Any) -> list[ir.Value]:
    """Runs body(i, values) -> values for i in range(count), count > 0; values are kept in phi nodes."""
    before = builder.block
    loop, after = builder.append_basic_block("dots.loop"), builder.append_basic_block("dots.after")
    builder.branch(loop)
    builder.position_at_end(loop)
    i = builder.phi(I64)
    phis = [builder.phi(value.type) for value in start]
    later = body(i, phis)
    following = builder.add(i, ir.Constant(I64, 1))
    for phi, first, last in ((i, ir.Constant(I64, 0), following), *zip(phis, start, later, strict=True)):
        phi.add_incoming(first, before)
        phi.add_incoming(last, loop)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
    builder.position_at_end(after)
    return later


def _sum_lanes(builder: ir.IRBuilder, vectors: list[ir.Value]) -> ir.Value:
    """16 vectors to one: lane x holds the sum of vector x. Each round adds halves of two vectors at a time."""
    distance = LANES // 2
    while len(vectors) > 1:
        half = len(vectors) // 2
        keep = [x if not x & distance else LANES + x - distance for x in range(LANES)]
        move = [x + distance if not x & distance else LANES + x for x in range(LANES)]
        order = [ir.Constant(ir.VectorType(I32, LANES), [ir.Constant(I32, x) for x in o]) for o in (keep, move)]
        vectors = [
            builder.fadd(*(builder.shuffle_vector(vectors[x], vectors[x + half], o) for o in order))
            for x in range(half)
        ]
        distance //= 2
    return vectors[0]


def _emit_scores(builder: ir.IRBuilder, args: Any, rows: int, dtype: str) -> None:
    keys, values, q, q_pitch, depth, s = args
    item = 64 if dtype == "float32" else 32
    offset = lambda base, i: builder.add(base, ir.Constant(I64, i))  # noqa: E731
    sources, asked_for = (
        [builder.load(pointer(builder, offset(listed, 8 * i), I64), align=8) for i in range(LANES // rows)]
        for listed in (keys, values)
    )
    q_rows = [builder.add(q, builder.mul(q_pitch, ir.Constant(I64, r))) for r in range(rows)]
    sums: list[ir.Value] = []
    for first in range(0, LANES, DOTS):
        lanes = range(first, first + DOTS)

        def body(i: ir.Value, acc: list[ir.Value], lanes: range = lanes) -> list[ir.Value]:
            at_k, at_q = (builder.mul(i, ir.Constant(I64, size)) for size in (item, 64))
            for x in sorted({x // rows for x in lanes}):
                emit_prefetch(builder, builder.add(asked_for[x], at_k))
            k = {x: _load_row(builder, dtype, builder.add(sources[x], at_k)) for x in {x // rows for x in lanes}}
            q = {r: _load_row(builder, "float32", builder.add(q_rows[r], at_q)) for r in {x % rows for x in lanes}}
            return [
                call(builder, "llvm.fmuladd", k[x // rows], q[x % rows], a) for x, a in zip(lanes, acc, strict=True)
            ]

        sums += _count_loop(builder, depth, [ZERO] * DOTS, body)
    builder.store(_sum_lanes(builder, sums), pointer(builder, s, f32x16.llvm), align=4)


def _emit_values(builder: ir.IRBuilder, args: Any, rows: int, dtype: str, columns: int) -> None:
    """As many rows at a time as the accumulators allow."""
    step = min(rows, max(1, DOTS // columns))
    for first in range(0, rows, step):
        _emit_value_rows(builder, args, rows, range(first, first + step), dtype, columns)


def _emit_value_rows(builder: ir.IRBuilder, args: Any, rows: int, some: range, dtype: str, columns: int) -> None:
    sources, next_keys, offset, p, num_keys, acc, acc_pitch, alpha = args
    item = 64 if dtype == "float32" else 32
    blocks = [(r, x) for r in some for x in range(columns)]
    constant = lambda value: ir.Constant(I64, value)  # noqa: E731

    def scalar(base: ir.Value, index: int) -> ir.Value:
        place = builder.add(base, constant(4 * index))
        return splat(builder, builder.load(pointer(builder, place, F32), align=4))

    def body(j: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
        row = builder.load(pointer(builder, builder.add(sources, builder.mul(j, constant(8))), I64), align=8)
        start = builder.add(row, offset)
        if 0 in some:
            asked_for = builder.load(
                pointer(builder, builder.add(next_keys, builder.mul(j, constant(8))), I64), align=8
            )
            for x in range(columns):
                emit_prefetch(builder, builder.add(builder.add(asked_for, offset), constant(item * x)))
        v = [_load_row(builder, dtype, builder.add(start, constant(item * x))) for x in range(columns)]
        p_row = builder.add(p, builder.mul(j, constant(4 * rows)))
        weights = {r: scalar(p_row, r) for r in some}
        return [call(builder, "llvm.fmuladd", v[x], weights[r], t) for (r, x), t in zip(blocks, totals, strict=True)]

    totals = _count_loop(builder, num_keys, [ZERO] * len(blocks), body)
    factor = {r: scalar(alpha, r) for r in some}
    for (r, x), total in zip(blocks, totals, strict=True):
        place = builder.add(acc, builder.add(builder.mul(acc_pitch, constant(r)), constant(64 * x)))
        target = pointer(builder, place, f32x16.llvm)
        old = builder.load(target, align=4)
        builder.store(call(builder, "llvm.fmuladd", factor[r], old, total), target, align=4)


def _switch(builder: ir.IRBuilder, code: ir.Value, emit: Any) -> None:
    """emit(rows, dtype) for the variant that `code` names (few.variant)."""
    after = builder.append_basic_block("dots.end")
    switch = builder.switch(code, after)
    for number, (rows, dtype) in enumerate((r, d) for r in FOLD_ROWS for d in DTYPES):
        block = builder.append_basic_block(f"dots.{rows}.{dtype}")
        switch.add_case(ir.Constant(I64, number), block)
        builder.position_at_end(block)
        emit(rows, dtype)
        builder.branch(after)
    builder.position_at_end(after)


@intrinsic
def score_vector(typingctx: Any, code: Any, keys: Any, values: Any, q: Any, q_pitch: Any, depth: Any, s: Any) -> Any:
    """The 16 products of 16 / R keys with all R rows, one vector at s.

    code: few.variant; keys: address of a list of row addresses; values: of rows that are needed next, which it asks for; q:
    float32 rows, q_pitch bytes apart; depth: head_size / 16.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _switch(builder, args[0], lambda rows, dtype: _emit_scores(builder, args[1:], rows, dtype))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), codegen


@intrinsic
def add_values(
    typingctx: Any, code: Any, sources: Any, next_keys: Any, offset: Any, p: Any, num_keys: Any, acc: Any, acc_pitch: Any,
    alpha: Any, is_wide: Any,
) -> Any:  # fmt: skip
    """acc[row, x] = alpha[row] * acc[row, x] + sum over keys of p[key, row] * V[key, x], for 16 x; if wide, for
    VALUE_COLUMNS[R] times as many.

    code: few.variant; sources: address of a list of row addresses; next_keys: of rows that are needed next, which it asks for;
    offset: bytes into each row; p: float32 [num_keys, R]; alpha: float32 [R]. The sum over keys starts at zero, as in
    cpu/vector.py.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        wide, narrow, after = (builder.append_basic_block(f"values.{name}") for name in ("wide", "narrow", "end"))
        builder.cbranch(args[9], wide, narrow)
        for block, columns in ((wide, VALUE_COLUMNS), (narrow, dict.fromkeys(FOLD_ROWS, 1))):
            builder.position_at_end(block)

            def emit(rows: int, dtype: str, columns: dict[int, int] = columns) -> None:
                _emit_values(builder, args[1:9], rows, dtype, columns[rows])

            _switch(builder, args[0], emit)
            builder.branch(after)
        builder.position_at_end(after)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9, types.boolean), codegen
