"""A problem that is run to be judged: random or somebody's inputs, poisoned outputs, the oracle's
verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_prefix.front.operation import Context, Op
from numba_prefix.front.targets import cuda_target
from numba_prefix.inputs.arrays import bits, describe
from numba_prefix.inputs.lengths import check_held_blocks, check_lengths
from numba_prefix.inputs.mask_types import MaskType, alibi_slopes
from numba_prefix.inputs.problem import FLOAT_DTYPES, Problem, static_problem
from numba_prefix.reference.oracle import Budget, budget, naive, reference

_NAN_BITS = {"float16": 0x7E00, "bfloat16": 0x7FC0}
_SPARE_BLOCKS = 2  # that no table names


@dataclass(frozen=True, slots=True)
class Inputs:
    """The arguments of prefix_encoder that say what is to be computed."""

    query: Any
    key: Any
    value: Any
    block_tables: Any
    seq_len: Any
    kv_seq_len: Any
    mask_type: Any = "causal"
    mask: Any = None
    slopes: Any = None
    head_num: Any = None
    kv_head_num: Any = None
    qk_scale: Any = 1.0

    def arguments(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    def plan(self, context: Context, path: str | None = None, held_blocks: Any = None) -> tuple[Op, Any]:
        """An operation with lse, and its output; both are poisoned. For target "cuda" all arrays
        are copied to a GPU, on which the outputs are. path: the CPU's instruction-set path to take.
        held_blocks: as of prefix_encoder. Raises what that would, and ValueError for a path that
        cannot be taken."""
        arguments = self.arguments()
        lengths = arguments.pop("seq_len"), arguments.pop("kv_seq_len")
        q = describe(self.query, "query")
        out = empty(q.shape, q.dtype, "out") if q.dtype in FLOAT_DTYPES else None
        if out is not None:
            poison(out)
        problem, operands = static_problem(**arguments, out=out)
        if context.target == "cuda":
            arguments, out = _on_gpu(arguments, out)
            problem, operands = static_problem(**arguments, out=out)
        checked, held = check_lengths(problem, *lengths), check_held_blocks(problem, held_blocks)
        op = Op(problem, operands, checked, context, return_lse=True, held_blocks=held, path=path)
        if op.target == "cuda":
            op.lse.set(np.full(op.lse.shape, np.nan, np.float32))
        else:
            poison(op.lse)
        return op, out

    def judge(self, out: Any, lse: Any) -> tuple[Budget, Budget]:
        """The errors of out and lse against the oracle, with what is allowed."""
        ref, ref_lse = reference(**self.arguments(), return_lse=True)
        plain, plain_lse = naive(**self.arguments(), return_lse=True)
        return budget(on_host(out), ref, plain), budget(on_host(lse), ref_lse, plain_lse)


def _on_gpu(arguments: dict[str, Any], out: Any) -> tuple[dict[str, Any], Any]:
    cuda_target().available("cpu")
    from numba_prefix.cuda.device.array import GpuArray

    moved = {name: GpuArray.of(arguments[name]) for name in ("query", "key", "value", "block_tables")}
    if arguments["mask"] is not None:
        moved["mask"] = GpuArray.of(arguments["mask"])
    return arguments | moved, None if out is None else GpuArray.of(out)


def with_heads(inputs: Inputs) -> Inputs:
    """The same problem with a 3-D query. Raises ValueError if head_num does not fit."""
    shape = describe(inputs.query, "query").shape
    if len(shape) != 2:
        return inputs
    heads = inputs.head_num
    if heads is None or heads < 1 or shape[1] % heads:
        raise ValueError(f"head_num: got {heads}, expected a divisor of query's {shape[1]} columns")
    return replace(inputs, query=inputs.query.reshape(shape[0], heads, shape[1] // heads))


def on_host(array: Any) -> Any:
    """An output of plan's operation, in CPU memory."""
    return array.get() if hasattr(array, "get") else array


def bfloat16_array(stored: NDArray[np.uint16], name: str) -> Any:
    """bfloat16 given by its bits, as an argument: without a copy, and also where ml_dtypes is not
    installed."""
    try:
        import ml_dtypes
    except ImportError:
        return replace(describe(stored, name), dtype="bfloat16")
    return stored.view(ml_dtypes.bfloat16)


def empty(shape: tuple[int, ...], dtype: str, name: str) -> Any:
    return bfloat16_array(np.empty(shape, np.uint16), name) if dtype == "bfloat16" else np.empty(shape, dtype)


def stored_bits(array: Any) -> NDArray[Any]:
    """A view of an array's memory: float32 as it is, 16-bit floats as uint16."""
    return bits(describe(array, "array"))


def poison(array: Any) -> None:
    """Fill with NaN, so that an element that is never written shows."""
    stored_bits(array)[...] = _NAN_BITS.get(describe(array, "array").dtype, math.nan)


def has_nan(array: Any) -> bool:
    t = describe(array, "array")
    stored = bits(t)
    if t.dtype == "float32":
        return bool(np.isnan(stored).any())
    infinity = 0x7C00 if t.dtype == "float16" else 0x7F80
    return bool(((stored & 0x7FFF) > infinity).any())


def visible_pairs(mask_type: MaskType, q_len: Sequence[int], kv_len: Sequence[int]) -> int:
    """Pairs of a query token and a key that it sees, over all sequences."""
    pairs = zip(map(int, q_len), map(int, kv_len), strict=True)
    if mask_type is MaskType.NONE:
        return sum(q * kv for q, kv in pairs)
    return sum(q * (kv - q) + q * (q + 1) // 2 for q, kv in pairs)


def flops(problem: Problem, q_len: Sequence[int], kv_len: Sequence[int]) -> float:
    """4 * head_size (a multiplication and an addition in each product) for every head and visible
    pair."""
    return 4.0 * problem.head_size * problem.head_num * visible_pairs(problem.mask_type, q_len, kv_len)


def random_inputs(
    q_len: Sequence[int],
    kv_len: Sequence[int],
    *,
    head_num: int,
    kv_head_num: int,
    head_size: int,
    block_size: int,
    dtype: str,
    mask_type: Any,
    qk_scale: float | None = None,
    seed: int = 0,
) -> Inputs:
    """Normally distributed data in shuffled pages; every slot that no sequence addresses is NaN.
    ALiBi kinds get the paper's slopes. qk_scale None: 1 / sqrt(head_size). dtype: "float16",
    "bfloat16" or "float32"."""
    rng = np.random.default_rng(seed)
    kind = MaskType.parse(mask_type)
    num_pages = [-(-kv // block_size) for kv in kv_len]
    num_blocks = sum(num_pages) + _SPARE_BLOCKS
    pages = rng.permutation(num_blocks).astype(np.int32)
    tables = np.full((len(q_len), max(num_pages, default=0)), -1, np.int32)
    is_used = np.zeros((num_blocks, block_size), bool)
    start = 0
    for row, kv, count in zip(tables, kv_len, num_pages, strict=True):
        row[:count] = pages[start : start + count]
        is_used[row[:count]] = np.arange(count * block_size).reshape(count, block_size) < kv
        start += count
    cache = (num_blocks, block_size, kv_head_num, head_size)
    key, value = (_normal(rng, cache, dtype, name) for name in ("key", "value"))
    for array in (key, value):
        stored_bits(array)[~is_used] = _NAN_BITS.get(dtype, math.nan)
    return Inputs(
        query=_normal(rng, (sum(q_len), head_num, head_size), dtype, "query"),
        key=key,
        value=value,
        block_tables=tables,
        seq_len=list(q_len),
        kv_seq_len=list(kv_len),
        mask_type=kind,
        slopes=alibi_slopes(head_num) if kind.is_alibi else None,
        qk_scale=1 / math.sqrt(head_size) if qk_scale is None else qk_scale,
    )


def _normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, name: str) -> Any:
    x = rng.standard_normal(shape, np.float32)
    if dtype != "bfloat16":
        return x.astype(dtype, copy=False)
    wide = x.view(np.uint32)
    wide += 0x7FFF + ((wide >> 16) & 1)  # to nearest, ties to even
    return bfloat16_array((wide >> 16).astype(np.uint16), name)


def sample_rows(inputs: Inputs, problem: Problem, max_rows: int, seed: int = 0) -> tuple[NDArray[np.int64], Inputs]:
    """Some rows of a problem with a 3-D query (its first and last among them), and the smaller
    problem that they are: each row a sequence of one token."""
    q_len, kv_len = np.asarray(inputs.seq_len, np.int64), np.asarray(inputs.kv_seq_len, np.int64)
    total = int(q_len.sum())
    inner = np.random.default_rng(seed).integers(0, total, max(0, max_rows - 2))
    rows = np.unique(np.concatenate([[0, total - 1], inner]).astype(np.int64))
    sequence = np.searchsorted(np.cumsum(q_len), rows, side="right")
    q_idx = rows - (np.cumsum(q_len) - q_len)[sequence]
    q_pos = kv_len[sequence] - q_len[sequence] + q_idx
    seen = kv_len[sequence] if problem.mask_type is MaskType.NONE else q_pos + 1
    return rows, replace(
        inputs,
        query=take_rows(inputs.query, rows),
        block_tables=inputs.block_tables[sequence],
        seq_len=[1] * len(rows),
        kv_seq_len=seen.tolist(),
    )


def take_rows(array: Any, rows: NDArray[np.int64]) -> Any:
    """A copy of some rows of an array of any dtype."""
    t = describe(array, "array")
    picked = bits(t)[rows]
    return bfloat16_array(picked, t.name) if t.dtype == "bfloat16" else picked.view(t.dtype)
