"""Kernels as Numba and NVVM compile them, for old and new GPUs, against NumPy. They use the
project's own calling convention."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest

import ptx

pytest.importorskip("numba_cuda")

from llvmlite import ir
from numba import cuda, float32, int32, int64, types, uint32
from numba.core import cgutils
from numba.cuda.extending import intrinsic

RNG = np.random.default_rng(7)
ALL = [(7, 5), (8, 0), (9, 0), (10, 0), (12, 0)]
_I32, _F32 = ir.IntType(32), ir.FloatType()
CALL, FACTORS = types.UniTuple(types.int64, 8), types.UniTuple(types.float32, 2)


def _assembly(text: str, constraints: str, results: list[Any], arguments: list[Any]) -> Any:
    """An intrinsic for one PTX instruction."""
    kinds = {types.float32: _F32, types.uint32: _I32, types.int64: ir.IntType(64)}
    result = (
        types.void if not results else results[0] if len(results) == 1 else types.UniTuple(results[0], len(results))
    )

    def typer(context: Any, *given: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            inner = [kinds[kind] for kind in results]
            returned = ir.VoidType() if not inner else inner[0] if len(inner) == 1 else ir.LiteralStructType(inner)
            function = ir.FunctionType(returned, [kinds[kind] for kind in arguments])
            value = builder.call(ir.InlineAsm(function, text, constraints, side_effect=True), values)
            if not results:
                return context.get_dummy_value()
            if len(results) == 1:
                return value
            return cgutils.pack_array(builder, [builder.extract_value(value, i) for i in range(len(results))])

        return result(*arguments), codegen

    names = ", ".join(f"x{i}" for i in range(len(arguments)))
    space: dict[str, Any] = {"typer": typer}
    exec(f"def typed(context, {names}): return typer(context, {names})", space)
    return intrinsic(space["typed"])


load = _assembly("ld.global.f32 $0, [$1];", "=f,l", [types.float32], [types.int64])
store = _assembly("st.global.f32 [$0], $1;", "l,f,~{memory}", [], [types.int64, types.float32])
copy16 = _assembly("cp.async.cg.shared.global [$0], [$1], 16;", "r,l,~{memory}", [], [types.uint32, types.int64])
wait = _assembly("cp.async.wait_all;", "~{memory}", [], [])
ldmatrix4 = _assembly(
    *("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];", "=r,=r,=r,=r,r,~{memory}"),
    *([types.uint32] * 4, [types.uint32]),
)
ldmatrix2t = _assembly(
    "ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {$0,$1}, [$2];",
    "=r,=r,r,~{memory}",
    [types.uint32] * 2,
    [types.uint32],
)
mma = _assembly(
    *("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",),
    *("=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [types.float32] * 4, [types.uint32] * 6 + [types.float32] * 4),
)


@intrinsic
def shared_begin(context: Any, array: Any) -> Any:
    """The address of an array in shared memory."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, values[0]).data
        return builder.ptrtoint(builder.addrspacecast(data, ir.IntType(32).as_pointer(3)), _I32)

    return types.uint32(array), codegen


@functools.cache
def compiled(kernel: Any, cc: tuple[int, int], **options: Any) -> str:
    signature = types.void(CALL, FACTORS)
    text, _ = cuda.compile(kernel, signature, device=False, abi="numba", cc=cc, output="ptx", **options)
    return text if isinstance(text, str) else text.decode()


def launch(
    text: str, arrays: list[np.ndarray], counts: list[int], factors: list[float], **options: Any
) -> ptx.Statistics:
    memory = ptx.Memory()
    for i, array in enumerate(arrays):
        memory.add(f"array {i}", array, writable=i == len(arrays) - 1)
    call = [*(array.ctypes.data for array in arrays), *counts]
    call += [0] * (8 - len(call))
    return ptx.Module(text).run(None, arguments=[*call, *factors], memory=memory, **options)


def softmax_rows(call: Any, factors: Any) -> None:
    """A row per block of 64 threads; maximum and sum by shuffles and through shared memory."""
    parts = cuda.shared.array(2, float32)
    thread, row, length = int32(cuda.threadIdx.x), int64(cuda.blockIdx.x), call[2]
    begin = call[0] + row * length * 4
    high = float32(-math.inf)
    for i in range(int64(thread), length, int64(64)):
        high = max(high, load(begin + i * 4) * factors[0])
    for step in range(5):
        high = max(high, cuda.shfl_xor_sync(0xFFFFFFFF, high, 1 << step))
    if thread & 31 == 0:
        parts[thread >> 5] = high
    cuda.syncthreads()
    high = max(parts[0], parts[1])
    cuda.syncthreads()
    total = float32(0)
    for i in range(int64(thread), length, int64(64)):
        total += math.exp(load(begin + i * 4) * factors[0] - high)
    for step in range(5):
        total += cuda.shfl_xor_sync(0xFFFFFFFF, total, 1 << step)
    if thread & 31 == 0:
        parts[thread >> 5] = total
    cuda.syncthreads()
    total = parts[0] + parts[1]
    out = call[1] + row * length * 4
    for i in range(int64(thread), length, int64(64)):
        store(out + i * 4, math.exp(load(begin + i * 4) * factors[0] - high) / total)


@pytest.mark.parametrize("is_fast", [False, True])
@pytest.mark.parametrize("cc", ALL)
def test_softmax_of_rows(cc: tuple[int, int], is_fast: bool) -> None:
    scores = RNG.normal(size=(5, 150)).astype(np.float32) * 4
    out = np.zeros_like(scores)
    statistics = launch(
        compiled(softmax_rows, cc, fastmath=is_fast), [scores, out], [150], [0.7, 0.0], grid=5, block=64
    )
    weights = np.exp((scores - scores.max(axis=1, keepdims=True)).astype(np.float64) * 0.7)
    np.testing.assert_allclose(out, weights / weights.sum(axis=1, keepdims=True), rtol=1e-5 if is_fast else 2e-6)
    assert statistics.instructions["shfl.sync.bfly.b32"] == 5 * 2 * 10


def softmax_without_a_barrier(call: Any, factors: Any) -> None:
    """Each warp's maximum is read by both, the second time with nothing between its reads and the
    next store."""
    parts = cuda.shared.array(2, float32)
    thread = int32(cuda.threadIdx.x)
    if thread & 31 == 0:
        parts[thread >> 5] = float32(thread)
    cuda.syncthreads()
    high = max(parts[0], parts[1])
    if thread & 31 == 0:
        parts[thread >> 5] = high + float32(thread)
    cuda.syncthreads()
    store(call[1] + thread * 4, parts[0] + parts[1])


def test_a_forgotten_barrier_of_a_compiled_kernel_is_found() -> None:
    out = np.zeros(64, np.float32)
    with pytest.raises(ptx.SharedRace, match="is written, a thread of warp 1 read it"):
        launch(compiled(softmax_without_a_barrier, (8, 0)), [out, out.copy()], [], [1.0, 0.0], grid=1, block=64)


def products(call: Any, factors: Any) -> None:
    """A warp multiplies 16 x 16 by 16 x 8: copies, fragments from shared memory, tensor cores."""
    shared = cuda.shared.array(0, uint32, alignment=16)
    lane = int32(cuda.threadIdx.x)
    base = shared_begin(shared)
    copy16(base + uint32(lane * 16), call[0] + lane * 16)
    if lane < 16:
        copy16(base + uint32(512 + lane * 16), call[1] + lane * 16)
    wait()
    cuda.syncthreads()
    a = ldmatrix4(base + uint32((lane & 15) * 32 + (lane >> 4) * 16))
    b = ldmatrix2t(base + uint32(512 + (lane & 15) * 16))
    zero = float32(0)
    c = mma(a[0], a[1], a[2], a[3], b[0], b[1], zero, zero, zero, zero)
    out = call[2] + int64((lane >> 2) * 32 + (lane & 3) * 8)
    store(out, c[0])
    store(out + 4, c[1])
    store(out + 256, c[2])
    store(out + 260, c[3])


@pytest.mark.parametrize("cc", ALL[1:])
def test_tensor_cores(cc: tuple[int, int]) -> None:
    a, b = RNG.integers(-5, 6, (16, 16)).astype(np.float16), RNG.integers(-5, 6, (16, 8)).astype(np.float16)
    out = np.zeros((16, 8), np.float32)
    launch(compiled(products, cc), [a, b, out], [], [0.0, 0.0], grid=1, block=32, shared_bytes=768)
    np.testing.assert_array_equal(out, a.astype(np.float32) @ b.astype(np.float32))
