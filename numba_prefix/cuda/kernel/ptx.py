"""Instructions that kernels write as PTX: typed memory accesses, tensor-core products, copies in
flight, shuffles.

All of it inlines: a plain device function could not be compiled without a driver. Operands have
exactly the types named: global addresses int64, shared ones int32 (bytes, from shared_base on),
16-bit floats their bits as uint16, or two of them in an int32.

"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core.errors import TypingError
from numba.cuda.extending import intrinsic

u16, i32, i64, f32 = types.uint16, types.int32, types.int64, types.float32
_LLVM = {u16: ir.IntType(16), i32: ir.IntType(32), i64: ir.IntType(64), f32: ir.FloatType()}
_LETTERS = {u16: "h", i32: "r", i64: "l", f32: "f"}
_SHARED_SPACE = 3
_SHARED_ALIGNMENT = 128


def _typed(name: str, results: tuple[Any, ...], operands: tuple[Any, ...], emit: Any) -> Any:
    """An intrinsic of exactly these operands; emit(builder, module, values) gives LLVM's values of
    the results."""

    def typed(_: Any, *given: Any) -> Any:
        if tuple(types.unliteral(t) for t in given) != operands:
            raise TypingError(f"{name}: got {given}, expected {operands}")
        returned = types.none
        if results:
            returned = results[0] if len(results) == 1 else types.UniTuple(results[0], len(results))

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            values = [builder.extract_value(arguments[0], i) for i in range(len(operands))] if operands else []
            made = emit(builder, values)
            if not results:
                return context.get_dummy_value()
            return made[0] if len(results) == 1 else context.make_tuple(builder, signature.return_type, made)

        return (returned(types.StarArgTuple(operands)) if operands else returned(types.StarArgTuple(()))), codegen

    typed.__name__ = typed.__qualname__ = name
    return intrinsic(typed)


def _asm(
    name: str,
    text: str,
    results: tuple[Any, ...],
    operands: tuple[Any, ...] = (),
    *,
    is_ordered: bool = False,
    is_converged: bool = False,
) -> Any:
    """One piece of PTX; `text` numbers results first ($0, $1, …), then operands.

    is_ordered: it reads or writes memory that others write, so it stays in its place. is_converged:
    all lanes of a warp have to execute it together.
    """
    constraints = [*("=" + _LETTERS[t] for t in results), *(_LETTERS[t] for t in operands)]
    if is_ordered:
        constraints.append("~{memory}")
    llvm = [_LLVM[t] for t in results]
    returned: Any = ir.VoidType() if not llvm else llvm[0] if len(llvm) == 1 else ir.LiteralStructType(llvm)
    function_type = ir.FunctionType(returned, [_LLVM[t] for t in operands])

    def emit(builder: Any, values: list[Any]) -> list[Any]:
        asm = ir.InlineAsm(function_type, text, ",".join(constraints), side_effect=is_ordered or is_converged)
        call = builder.call(asm, values)
        if is_converged:
            call.attributes.add("convergent")
        return [call] if len(llvm) < 2 else [builder.extract_value(call, i) for i in range(len(llvm))]

    return _typed(name, results, operands, emit)


# --- numbers

# Denormal results are 0, as the rules want; -inf gives 0 and NaN stays NaN.
exp2 = _asm("exp2", "ex2.approx.ftz.f32 $0, $1;", (f32,), (f32,))
log2 = _asm("log2", "lg2.approx.ftz.f32 $0, $1;", (f32,), (f32,))
sqrt = _asm("sqrt", "sqrt.approx.f32 $0, $1;", (f32,), (f32,))

f32_of_f16 = _asm("f32_of_f16", "cvt.f32.f16 $0, $1;", (f32,), (u16,))
f16_of_f32 = _asm("f16_of_f32", "cvt.rn.f16.f32 $0, $1;", (u16,), (f32,))
f32_of_bits = _typed("f32_of_bits", (f32,), (i32,), lambda b, v: [b.bitcast(v[0], _LLVM[f32])])
bits_of_f32 = _typed("bits_of_f32", (i32,), (f32,), lambda b, v: [b.bitcast(v[0], _LLVM[i32])])
u16_of_i32 = _typed("u16_of_i32", (u16,), (i32,), lambda b, v: [b.trunc(v[0], _LLVM[u16])])
i32_of_u16 = _typed("i32_of_u16", (i32,), (u16,), lambda b, v: [b.zext(v[0], _LLVM[i32])])

# The first operand goes to the lower half.
pack_f16 = _asm("pack_f16", "cvt.rn.f16x2.f32 $0, $2, $1;", (i32,), (f32, f32))
pack_bf16 = _asm("pack_bf16", "cvt.rn.bf16x2.f32 $0, $2, $1;", (i32,), (f32, f32))  # sm_80


# --- memory


def _load(name: str, ptx: str, kind: Any, address: Any, count: int = 1) -> Any:
    wide = "" if count == 1 else f".v{count}"
    names = ", ".join(f"${i}" for i in range(count))
    target = names if count == 1 else "{" + names + "}"
    return _asm(
        name, f"ld.{ptx.replace('*', wide)} {target}, [${count}];", (kind,) * count, (address,), is_ordered=True
    )


def _store(name: str, ptx: str, kind: Any, address: Any, count: int = 1) -> Any:
    wide = "" if count == 1 else f".v{count}"
    names = ", ".join(f"${i + 1}" for i in range(count))
    source = names if count == 1 else "{" + names + "}"
    return _asm(name, f"st.{ptx.replace('*', wide)} [$0], {source};", (), (address, *(kind,) * count), is_ordered=True)


load_u16 = _load("load_u16", "global.u16", u16, i64)
load_i32 = _load("load_i32", "global.b32", i32, i64)
load_f32 = _load("load_f32", "global.f32", f32, i64)
load4_i32 = _load("load4_i32", "global*.b32", i32, i64, 4)
load4_f32 = _load("load4_f32", "global*.f32", f32, i64, 4)
store_u16 = _store("store_u16", "global.u16", u16, i64)
store_f32 = _store("store_f32", "global.f32", f32, i64)
store2_f32 = _store("store2_f32", "global*.f32", f32, i64, 2)
# Memory of the host that the device sees: the host may be looking.
store_system_i32 = _store("store_system_i32", "volatile.global.b32", i32, i64)

load_shared_i32 = _load("load_shared_i32", "shared.b32", i32, i32)
load_shared4_f32 = _load("load_shared4_f32", "shared*.f32", f32, i32, 4)
load_shared4_i32 = _load("load_shared4_i32", "shared*.b32", i32, i32, 4)
store_shared_f32 = _store("store_shared_f32", "shared.f32", f32, i32)
store_shared4_f32 = _store("store_shared4_f32", "shared*.f32", f32, i32, 4)
store_shared4_i32 = _store("store_shared4_i32", "shared*.b32", i32, i32, 4)


@intrinsic
def shared_base(_: Any) -> Any:
    """The first byte of the block's dynamic shared memory, at a multiple of 128 bytes."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        name = "numba_prefix_shared"
        memory = builder.module.globals.get(name)
        if memory is None:
            memory = ir.GlobalVariable(builder.module, ir.ArrayType(ir.IntType(8), 0), name, _SHARED_SPACE)
            memory.linkage = "external"
            memory.align = _SHARED_ALIGNMENT
        return builder.ptrtoint(memory, _LLVM[i32])

    return i32(), codegen


# 16 bytes from global to shared memory, of which the last operand's number are read and the rest
# are zeros; both aligned.
copy16 = _asm("copy16", "cp.async.cg.shared.global [$0], [$1], 16, $2;", (), (i32, i64, i32), is_ordered=True)
commit = _asm("commit", "cp.async.commit_group;", (), is_ordered=True)
wait_all = _asm("wait_all", "cp.async.wait_group 0;", (), is_ordered=True)


# --- warps


def _shuffle(name: str, mode: str, kind: Any, letter: str) -> Any:
    text = f"shfl.sync.{mode}.b32 $0, $1, $2, 31, -1;"
    return _asm(name, text, (kind,), (kind, i32), is_ordered=True, is_converged=True)


butterfly_f32 = _shuffle("butterfly_f32", "bfly", f32, "f")
from_lane_i32 = _shuffle("from_lane_i32", "idx", i32, "r")

# Four 8 x 8 matrices of 16-bit numbers from shared memory; lane i names the address of row i % 8 of
# matrix i // 8.
_MATRICES = "ldmatrix.sync.aligned.m8n8.x4{}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
load_matrices = _asm("load_matrices", _MATRICES.format(""), (i32,) * 4, (i32,), is_ordered=True, is_converged=True)
load_matrices_transposed = _asm(
    "load_matrices_transposed", _MATRICES.format(".trans"), (i32,) * 4, (i32,), is_ordered=True, is_converged=True
)


def _mma(dtype: str) -> Any:
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    return _asm(f"mma_{dtype}", text, (f32,) * 4, (i32,) * 6 + (f32,) * 4, is_converged=True)


# c + a·b of a 16 x 16 and a 16 x 8 matrix, spread over the lanes as the PTX manual draws it
# (mma.m16n8k16).
mma_f16 = _mma("f16")
mma_bf16 = _mma("bf16")
