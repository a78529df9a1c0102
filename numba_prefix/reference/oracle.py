"""The float64 oracle: the operator written down plainly in NumPy, sharing no rule with the kernels.

Everything is computed from the stored values. `naive` is the same computation in float32 with the
result rounded to the output's dtype; `budget` turns both into the error that a kernel is allowed to
make.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_prefix.inputs.arrays import Tensor, bits, describe
from numba_prefix.inputs.lengths import check_block_ids, check_held_blocks, check_lengths
from numba_prefix.inputs.mask_types import MaskType
from numba_prefix.inputs.problem import Operands, Problem, static_problem

# Query rows are taken in chunks of about this many scores, which bounds memory.
_SCORES_AT_ONCE = 1 << 20
_TEMPLATE_BLOCK = 128
_EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23}

_Floats = NDArray[Any]  # of float32 or float64


@dataclass(frozen=True, slots=True)
class Budget:
    """An output's distance from the oracle and the allowed distance, over the elements that are
    finite in the oracle."""

    max_error: float  # inf where NaNs or infinities are not where the oracle has them
    max_allowed: float
    mean_error: float
    mean_allowed: float
    ok: bool


def reference(
    query: Any,
    key: Any,
    value: Any,
    block_tables: Any,
    seq_len: Any,
    kv_seq_len: Any,
    *,
    mask_type: Any = "causal",
    mask: Any = None,
    slopes: Any = None,
    head_num: Any = None,
    kv_head_num: Any = None,
    qk_scale: Any = 1.0,
    return_lse: bool = False,
    held_blocks: Any = None,
) -> Any:
    """The operator in float64; arguments and errors are those of prefix_encoder.

    Returns float64, shaped as query; with return_lse also float64 [num_tokens, head_num]: the
    natural log of sum_j exp(score). A row without a visible score above -inf is 0, its lse -inf. A
    score of NaN or +inf makes its row (and lse) NaN. Tensors on a GPU are copied to the host.
    """
    inputs = (query, key, value, block_tables, mask, slopes, held_blocks)
    out, lse = _attend(inputs, seq_len, kv_seq_len, (mask_type, head_num, kv_head_num, qk_scale), np.float64)
    out = out.reshape(describe(query, "query").shape)
    return (out, lse) if return_lse else out


def naive(
    query: Any,
    key: Any,
    value: Any,
    block_tables: Any,
    seq_len: Any,
    kv_seq_len: Any,
    *,
    mask_type: Any = "causal",
    mask: Any = None,
    slopes: Any = None,
    head_num: Any = None,
    kv_head_num: Any = None,
    qk_scale: Any = 1.0,
    return_lse: bool = False,
    held_blocks: Any = None,
) -> Any:
    """The computation of `reference` in float32, rounded (to nearest even) to query's dtype.

    The rounded values are returned as float32, which holds each of them exactly; lse is float32,
    not rounded further.
    """
    inputs = (query, key, value, block_tables, mask, slopes, held_blocks)
    out, lse = _attend(inputs, seq_len, kv_seq_len, (mask_type, head_num, kv_head_num, qk_scale), np.float32)
    q = describe(query, "query")
    out = _rounded(out, q.dtype).reshape(q.shape)
    return (out, lse) if return_lse else out


def budget(out: Any, ref: NDArray[np.float64], naive: NDArray[Any]) -> Budget:
    """Compare `out` (float16, bfloat16 or float32 array) with `ref`, given the errors of `naive`,
    all of one shape.

    Allowed are max|out - ref| <= 2 * max|naive - ref| + 2 * eps * max|ref| and mean|out - ref| <=
    mean|naive - ref| + eps * mean|ref|, eps being the spacing of out's dtype at 1. NaNs have to be
    where ref has them, and infinities too, with their signs.
    """
    t = describe(_to_host(out), "out")
    if t.dtype not in _EPS:
        raise TypeError(f"out: got dtype {t.dtype}, expected {', '.join(_EPS)}")
    if not t.shape == ref.shape == naive.shape:
        raise ValueError(f"out: got shape {t.shape}, expected that of ref {ref.shape} and of naive {naive.shape}")
    eps = _EPS[t.dtype]
    got, baseline = _widen(t, np.float64), np.asarray(naive, np.float64)
    is_finite = np.isfinite(ref)
    agrees = np.array_equal(got[~is_finite], ref[~is_finite], equal_nan=True) and np.isfinite(got[is_finite]).all()
    finite_ref = ref[is_finite]
    error = np.abs(got[is_finite] - finite_ref) if agrees else np.array([math.inf])
    naive_error = np.abs(baseline[is_finite] - finite_ref)
    naive_error = naive_error[np.isfinite(naive_error)]
    size = np.abs(finite_ref)
    max_error, max_allowed = _max(error), 2 * _max(naive_error) + 2 * eps * _max(size)
    mean_error, mean_allowed = _mean(error), _mean(naive_error) + eps * _mean(size)
    is_ok = bool(agrees) and max_error <= max_allowed and mean_error <= mean_allowed
    return Budget(max_error, max_allowed, mean_error, mean_allowed, is_ok)


def _attend(
    inputs: tuple[Any, ...], seq_len: Any, kv_seq_len: Any, scalars: tuple[Any, Any, Any, Any], precision: Any
) -> tuple[_Floats, _Floats]:
    """Output [num_tokens, head_num, head_size] and lse [num_tokens, head_num] in `precision`."""
    query, key, value, block_tables, mask, slopes, held_blocks = map(_to_host, inputs)
    mask_type, head_num, kv_head_num, qk_scale = scalars
    problem, operands = static_problem(
        query,
        key,
        value,
        block_tables,
        mask=mask,
        slopes=slopes,
        mask_type=mask_type,
        head_num=head_num,
        kv_head_num=kv_head_num,
        qk_scale=qk_scale,
    )
    q_lens, kv_lens = check_lengths(problem, seq_len, kv_seq_len)
    held = check_held_blocks(problem, held_blocks)
    check_block_ids(problem, operands.block_tables, q_lens, kv_lens, held)
    if held is None:
        held = np.ones((problem.batch, problem.max_block_num), np.bool_)

    out = np.zeros((problem.num_tokens, problem.head_num, problem.head_size), precision)
    lse = np.full((problem.num_tokens, problem.head_num), -np.inf, precision)
    biases = _Biases(problem, operands, precision)
    first_row, block_size = 0, problem.block_size
    with np.errstate(all="ignore"):
        for sequence, (q_len, kv_len) in enumerate(zip(q_lens.tolist(), kv_lens.tolist(), strict=True)):
            if q_len:
                rows = slice(first_row, first_row + q_len)
                kv_pos = np.flatnonzero(np.repeat(held[sequence, : -(-kv_len // block_size)], block_size)[:kv_len])
                _attend_sequence(problem, operands, biases, sequence, kv_len, kv_pos, out[rows], lse[rows], first_row)
            first_row += q_len
    return out, lse


def _attend_sequence(
    problem: Problem,
    operands: Operands,
    biases: _Biases,
    sequence: int,
    kv_len: int,
    held_pos: NDArray[np.int64],
    out: _Floats,
    lse: _Floats,
    first_row: int,
) -> None:
    """Fill `out` [q_len, head_num, head_size] and `lse` [q_len, head_num] of one sequence, from its
    keys at held_pos."""
    precision = out.dtype
    q_len = len(out)
    is_causal = problem.mask_type != MaskType.NONE
    q = bits(operands.q)[first_row : first_row + q_len]
    column, slots = np.divmod(held_pos, problem.block_size)
    physical_blocks = bits(operands.block_tables)[sequence, column]
    chunk = max(1, _SCORES_AT_ONCE // max(kv_len, 1))
    for kv_head in range(problem.kv_head_num):
        keys = _gather(operands.k_cache, physical_blocks, slots, kv_head, precision)
        values = _gather(operands.v_cache, physical_blocks, slots, kv_head, precision)
        for start in range(0, q_len, chunk):
            rows = slice(start, min(start + chunk, q_len))
            q_pos = (kv_len - q_len + np.arange(rows.start, rows.stop))[:, None]
            num_keys = int(np.count_nonzero(held_pos <= q_pos[-1, 0])) if is_causal else len(held_pos)
            if num_keys == 0:
                continue
            kv_pos = held_pos[None, :num_keys]  # the keys that some row sees
            visible = (kv_pos <= q_pos) if is_causal else np.ones((len(q_pos), num_keys), bool)
            distances = biases.distances(q_pos, kv_pos)
            for head in range(kv_head * problem.group_size, (kv_head + 1) * problem.group_size):
                scores = _product(_widen_bits(q[rows, head], problem.dtype, precision), keys[:num_keys].T)
                scores *= precision.type(problem.qk_scale)
                biases.add(scores, head, distances, q_pos, kv_pos)
                out[rows, head], lse[rows, head] = _softmax_average(scores, visible, values[:num_keys])


class _Biases:
    """The biases bias(h, p, j), as the contract's tables define them."""

    def __init__(self, problem: Problem, operands: Operands, precision: Any) -> None:
        self.kind = problem.mask_type
        self.form = problem.mask_form
        self.precision = precision
        self.mask = None if operands.mask is None else _widen(operands.mask, precision)
        self.slopes = np.ones(problem.head_num, precision)
        if operands.slopes is not None:
            self.slopes = _widen(operands.slopes, precision)

    def distances(self, p: NDArray[np.int64], j: NDArray[np.int64]) -> _Floats | None:
        """The factor [rows, keys] of a head's slope; None if no slope enters. Invisible keys may
        hold anything."""
        if not self.kind.is_alibi or self.form == "heads":
            return None
        if self.form == "template":
            return self._template_distances(p, j)
        behind: _Floats = (p - j).astype(self.precision)
        if self.kind == MaskType.ALIBI_COMPRESS:
            return -behind
        if self.kind == MaskType.ALIBI_COMPRESS_SQRT:
            return -np.sqrt(behind)
        return np.broadcast_to(j.astype(self.precision), behind.shape)

    def _template_distances(self, p: NDArray[np.int64], j: NDArray[np.int64]) -> _Floats:
        assert self.mask is not None
        m, r = np.divmod(p, _TEMPLATE_BLOCK)
        n, c = np.divmod(j, _TEMPLATE_BLOCK)
        on_diagonal = n == m
        entry: _Floats = self.mask[np.where(on_diagonal, r, r + _TEMPLATE_BLOCK), c]
        blocks_between: _Floats = (_TEMPLATE_BLOCK * (m - n - 1)).astype(self.precision)
        if self.kind == MaskType.ALIBI_COMPRESS:
            return np.where(on_diagonal, entry, entry + blocks_between)
        if self.kind == MaskType.ALIBI_COMPRESS_SQRT:
            return np.where(on_diagonal, entry, np.sqrt(entry**2 + blocks_between))
        columns_before: _Floats = (_TEMPLATE_BLOCK * n).astype(self.precision)
        return entry + columns_before

    def add(
        self, scores: _Floats, head: int, distances: _Floats | None, p: NDArray[np.int64], j: NDArray[np.int64]
    ) -> None:
        if distances is not None:
            scores += self.slopes[head] * distances
        elif self.form == "heads":
            assert self.mask is not None
            row = np.maximum(p - _TEMPLATE_BLOCK * (j // _TEMPLATE_BLOCK), 0)
            scores += self.mask[head, row, j % _TEMPLATE_BLOCK]


def _softmax_average(scores: _Floats, visible: NDArray[np.bool_], values: _Floats) -> tuple[_Floats, _Floats]:
    """softmax(scores) @ values over the visible keys, [rows, head_size], and their lse, [rows]."""
    scores = np.where(visible, scores, -np.inf)
    row_max = scores.max(axis=1, keepdims=True)
    is_empty = np.isneginf(row_max)
    weights = np.exp(scores - np.where(is_empty, 0, row_max))
    total = weights.cumsum(axis=1)[:, -1:]
    lse = np.where(is_empty, -np.inf, row_max + np.log(total))
    weights /= np.where(is_empty, 1, total)
    is_finite = np.isfinite(values)
    out = _product(weights, np.where(is_finite, values, values.dtype.type(0)))
    # Only where visible: 0 * NaN would reach every row.
    for key in np.flatnonzero(~is_finite.all(axis=1)):
        out += np.where(visible[:, key, None] & ~is_finite[key], weights[:, key, None] * values[key], 0)
    return np.where(is_empty, 0, out), lse[:, 0]


def _product(a: _Floats, b: _Floats) -> _Floats:
    """The product a @ b, in float32 term after term, in order.

    The error of NumPy's matrix product depends on the BLAS, the CPU and the shape (a vector product
    has less than half of it), and a tolerance must not.
    """
    if a.dtype == np.float64:
        return a @ b
    total = np.zeros((len(a), b.shape[1]), a.dtype)
    for t in range(len(b)):
        total += a[:, t, None] * b[t]
    return total


def _gather(
    cache: Tensor, physical_blocks: NDArray[np.int32], slots: NDArray[np.int64], kv_head: int, precision: Any
) -> _Floats:
    """Keys (or values) of one kv head, [len(slots), head_size]."""
    return _widen_bits(bits(cache)[physical_blocks, slots, kv_head], cache.dtype, precision)


def _to_host(obj: Any) -> Any:
    """A copy of a GPU array on the host; anything else unchanged."""
    if getattr(obj, "is_cuda", False):
        return obj.cpu()
    if hasattr(obj, "__cuda_array_interface__") and not hasattr(obj, "is_cuda"):
        return obj.get() if hasattr(obj, "get") else obj.copy_to_host()
    return obj


def _widen(t: Tensor, precision: Any) -> _Floats:
    return _widen_bits(bits(t), t.dtype, precision)


def _widen_bits(stored: NDArray[Any], dtype: str, precision: Any) -> _Floats:
    """Exact float32 or float64 values of bits that arrays.bits shows for `dtype`."""
    if dtype == "float16":
        stored = stored.view(np.float16)
    elif dtype == "bfloat16":
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    widened: _Floats = stored.astype(precision)
    return widened


def stored(x: NDArray[np.float64], dtype: str) -> NDArray[Any]:
    """The float64 values rounded to `dtype`, as arrays.bits shows it."""
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype == "float16":
            return x.astype(np.float16).view(np.uint16)
        single = x.astype(np.float32)
    if dtype == "float32":
        return single
    return (_rounded(single, dtype).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def _rounded(x: _Floats, dtype: str) -> _Floats:
    """The float32 values rounded to the nearest (ties to even) of `dtype`, as float32."""
    rounded: _Floats = x
    if dtype == "float16":
        with np.errstate(over="ignore"):
            rounded = x.astype(np.float16).astype(np.float32)
    elif dtype == "bfloat16":
        wide = np.ascontiguousarray(x).view(np.uint32)
        nearest = (wide + np.uint32(0x7FFF) + ((wide >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
        rounded = np.where(np.isnan(x), x, nearest.view(np.float32))
    return rounded


def _max(x: _Floats) -> float:
    return float(x.max(initial=0.0))


def _mean(x: _Floats) -> float:
    return float(x.mean()) if x.size else 0.0
