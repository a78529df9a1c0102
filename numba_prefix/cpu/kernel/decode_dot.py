"""Micro-kernels for few query rows (decode): lanes run along the head, so that no lane is empty.

With R rows (1, 4 or 8) a vector of scores holds 16 / R keys: lane = key * R + row. Keys and values
are read where they lie, in the caller's dtype, through a list of row addresses; head_size is a
multiple of 16.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from numba_prefix.cpu.kernel.params import DTYPE_CODES
from numba_prefix.cpu.simd.features import features
from numba_prefix.cpu.simd.lanes import F32, I32, I64, LANES, call, f32x16, splat
from numba_prefix.cpu.simd.memory import I16, bf16_to_f32, emit_prefetch, f16_to_f32, pointer
from numba_prefix.inputs.arrays import ITEM_BYTES

# Accumulators of 16 lanes kept in registers at a time: 16 where there are 32 vector registers of 16
# lanes, 4 elsewhere.
DOTS = 16 if "avx512f" in features() else 4
# Lanes and number of a score's sums, in registers as wide as the CPU's: with 8 of 8 lanes (2 keys
# times 4 rows) there are 6 loads for 8 multiply-adds; 4 of 16 lanes had 10.
WIDTH, SUMS = (16, 16) if "avx512f" in features() else (8, 8) if "avx" in features() else (4, 8)
GROUP = 4  # sums that become one vector, by additions across its lanes
FOLD_ROWS = (1, 4, 8)  # as tiling.fold_rows
# Vectors of a value row that one wide pass over the keys takes.
VALUE_PANELS = {rows: max(1, min(4, DOTS // rows)) for rows in FOLD_ROWS}
ZERO = ir.Constant(f32x16.llvm, [ir.Constant(F32, 0.0)] * LANES)
DTYPES = tuple(DTYPE_CODES)
# Elements as they are stored, and what makes float32 of them.
WIDENED: dict[str, tuple[ir.Type, Any]] = {
    "float16": (I16, f16_to_f32),
    "bfloat16": (I16, bf16_to_f32),
    "float32": (F32, None),
}
NUM_DTYPES = len(DTYPES)


def _load_row(builder: ir.IRBuilder, dtype: str, address: ir.Value, count: int = LANES) -> ir.Value:
    element, widen = WIDENED[dtype]
    stored = builder.load(pointer(builder, address, ir.VectorType(element, count)), align=1)
    return stored if widen is None else widen(builder, stored)


def _count_loop(builder: ir.IRBuilder, count: ir.Value, start: list[ir.Value], body: Any) -> list[ir.Value]:
    """Runs body(i, values) -> values for i in range(count), count > 0; values are kept in phi
    nodes."""
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


def _pick(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, lanes: list[int]) -> ir.Value:
    """Lanes of a, then of b."""
    order = [ir.Constant(I32, lane) for lane in lanes]
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), order))


def _sum_lanes(builder: ir.IRBuilder, vectors: list[ir.Value]) -> ir.Value:
    """Sums as many vectors as they have lanes into one, whose lane x holds the sum of vector x.

    Each round adds halves of two vectors.
    """
    lanes = len(vectors)
    distance = lanes // 2
    while len(vectors) > 1:
        half = len(vectors) // 2
        keep = [x if not x & distance else lanes + x - distance for x in range(lanes)]
        move = [x + distance if not x & distance else lanes + x for x in range(lanes)]
        pairs = zip(vectors[:half], vectors[half:], strict=True)
        vectors = [builder.fadd(_pick(builder, a, b, keep), _pick(builder, a, b, move)) for a, b in pairs]
        distance //= 2
    return vectors[0]


def _sum_group(builder: ir.IRBuilder, vectors: list[ir.Value]) -> ir.Value:
    """Sums GROUP vectors into one of GROUP lanes: upper halves are added to lower ones first."""
    while (count := vectors[0].type.count) > GROUP:
        lower, upper = list(range(count // 2)), list(range(count // 2, count))
        vectors = [builder.fadd(_pick(builder, v, v, lower), _pick(builder, v, v, upper)) for v in vectors]
    return _sum_lanes(builder, vectors)


def _joined(builder: ir.IRBuilder, vectors: list[ir.Value]) -> ir.Value:
    """All lanes side by side."""
    while len(vectors) > 1:
        both = list(range(2 * vectors[0].type.count))
        vectors = [_pick(builder, a, b, both) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


def _emit_scores(builder: ir.IRBuilder, args: Any, rows: int, dtype: str) -> None:
    keys, values, q, q_pitch, depth, s = args
    item = ITEM_BYTES[dtype]
    offset = lambda base, i: builder.add(base, ir.Constant(I64, i))  # noqa: E731
    num_keys = LANES // rows
    sources, asked_for = (
        [builder.load(pointer(builder, offset(listed, 8 * i), I64), align=8) for i in range(num_keys)]
        for listed in (keys, values)
    )
    q_rows = [builder.add(q, builder.mul(q_pitch, ir.Constant(I64, r))) for r in range(rows)]
    key_block = min(num_keys, SUMS // min(rows, GROUP))
    row_block = min(rows, SUMS // key_block)
    zero = ir.Constant(ir.VectorType(F32, WIDTH), [ir.Constant(F32, 0.0)] * WIDTH)
    sums: dict[int, ir.Value] = {}  # by lane, of groups by their first
    for first_key, first_row in ((k, r) for k in range(0, num_keys, key_block) for r in range(0, rows, row_block)):
        some_keys, some_rows = range(first_key, first_key + key_block), range(first_row, first_row + row_block)
        blocks = [(k, r) for k in some_keys for r in some_rows]

        def body(
            i: ir.Value,
            acc: list[ir.Value],
            some_keys: range = some_keys,
            some_rows: range = some_rows,
            blocks: list[tuple[int, int]] = blocks,
        ) -> list[ir.Value]:
            at_k, at_q = (builder.mul(i, ir.Constant(I64, size * LANES)) for size in (item, 4))
            for k in some_keys if some_rows[0] == 0 else ():
                emit_prefetch(builder, builder.add(asked_for[k], at_k))
            sum_of = dict(zip(blocks, acc, strict=True))
            # One row's parts stay in registers while its keys come one after the other; with all
            # first parts before all second ones, one sum of 8 went through the stack (Haswell).
            # Several rows' parts serve all keys in turn.
            at_x = range(0, LANES, WIDTH)
            order = [(x, k) for x in at_x for k in some_keys]
            if len(some_rows) == 1:
                order.sort(key=lambda place: place[1])
            row: dict[tuple[int, int], ir.Value] = {}
            for x, k in order:
                for r in some_rows:
                    if (x, r) not in row:
                        place = offset(builder.add(q_rows[r], at_q), 4 * x)
                        row[x, r] = _load_row(builder, "float32", place, WIDTH)
                # Each key loaded where it is used: together they would take too many registers.
                key = _load_row(builder, dtype, offset(builder.add(sources[k], at_k), item * x), WIDTH)
                for r in some_rows:
                    sum_of[k, r] = call(builder, "llvm.fmuladd", key, row[x, r], sum_of[k, r])
            return list(sum_of.values())

        totals = _count_loop(builder, depth, [zero] * len(blocks), body)
        size = 1 if WIDTH == LANES else GROUP
        for x in range(0, len(blocks), size):
            key, row = blocks[x]
            sums[key * rows + row] = totals[x] if size == 1 else _sum_group(builder, totals[x : x + size])
    ordered = [sums[lane] for lane in sorted(sums)]
    total = _sum_lanes(builder, ordered) if WIDTH == LANES else _joined(builder, ordered)
    builder.store(total, pointer(builder, s, f32x16.llvm), align=4)


def _emit_values(builder: ir.IRBuilder, args: Any, rows: int, dtype: str, num_vectors: int) -> None:
    """Emits passes over as many rows at once as the accumulators allow."""
    step = min(rows, max(1, DOTS // num_vectors))
    for first in range(0, rows, step):
        _emit_value_rows(builder, args, rows, range(first, first + step), dtype, num_vectors)


def _emit_value_rows(builder: ir.IRBuilder, args: Any, rows: int, some: range, dtype: str, num_vectors: int) -> None:
    sources, next_keys, offset, p, num_keys, acc, acc_pitch, alpha = args
    item = LANES * ITEM_BYTES[dtype]
    blocks = [(r, x) for r in some for x in range(num_vectors)]
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
            for x in range(num_vectors):
                emit_prefetch(builder, builder.add(builder.add(asked_for, offset), constant(item * x)))
        v = [_load_row(builder, dtype, builder.add(start, constant(item * x))) for x in range(num_vectors)]
        p_row = builder.add(p, builder.mul(j, constant(4 * rows)))
        p_of = {r: scalar(p_row, r) for r in some}
        return [call(builder, "llvm.fmuladd", v[x], p_of[r], t) for (r, x), t in zip(blocks, totals, strict=True)]

    totals = _count_loop(builder, num_keys, [ZERO] * len(blocks), body)
    factor = {r: scalar(alpha, r) for r in some}
    for (r, x), total in zip(blocks, totals, strict=True):
        place = builder.add(acc, builder.add(builder.mul(acc_pitch, constant(r)), constant(64 * x)))
        target = pointer(builder, place, f32x16.llvm)
        old = builder.load(target, align=4)
        builder.store(call(builder, "llvm.fmuladd", factor[r], old, total), target, align=4)


def _switch(builder: ir.IRBuilder, code: ir.Value, emit: Any) -> None:
    """emit(rows, dtype) for the variant that `code` names (decode.micro_kernel_code)."""
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

    code: decode.micro_kernel_code; keys: address of a list of row addresses; values: of rows that
    are needed next, which it asks for; q:
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
    """acc[row, x] = alpha[row] * acc[row, x] + sum over keys of p[key, row] * V[key, x], for 16 x;
    if wide, for VALUE_COLUMNS[R] times as many.

    code: decode.micro_kernel_code; sources: address of a list of row addresses; next_keys: of rows
    that are needed next, which it asks for; offset: bytes into each row; p: float32 [num_keys, R];
    alpha: float32 [R]. The sum over keys starts at zero, as in cpu/kernel/prefill_f32_gemm.py.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        wide, narrow, after = (builder.append_basic_block(f"values.{name}") for name in ("wide", "narrow", "end"))
        builder.cbranch(args[9], wide, narrow)
        for block, num_vectors in ((wide, VALUE_PANELS), (narrow, dict.fromkeys(FOLD_ROWS, 1))):
            builder.position_at_end(block)

            def emit(rows: int, dtype: str, num_vectors: dict[int, int] = num_vectors) -> None:
                _emit_values(builder, args[1:9], rows, dtype, num_vectors[rows])

            _switch(builder, args[0], emit)
            builder.branch(after)
        builder.position_at_end(after)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9, types.boolean), codegen
