"""What the plans of all targets do alike: the tables of sequences, runs and work, and what a kernel is told of the arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from numba_prefix.inputs.arrays import ITEM_BYTES, Tensor
from numba_prefix.inputs.problem import Operands, Problem
from numba_prefix.planning.kv_runs import add_runs
from numba_prefix.rules import tiling
from numba_prefix.rules.masks import MaskType

# Kernels know kinds of biases by their place here.
BIASES = (
    *("none", "linear", "sqrt", "left_align", "template_linear", "template_sqrt", "template_left_align"),
    "heads_mask",
)

_ALIBI = {
    MaskType.ALIBI_COMPRESS: "linear",
    MaskType.ALIBI_COMPRESS_SQRT: "sqrt",
    MaskType.ALIBI_COMPRESS_LEFT_ALIGN: "left_align",
}

# tiling's count_work and fill_work, compiled
Cutters = tuple[Callable[..., None], Callable[..., None]]


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """A call's work in tiles. split_tiles and partial_f32 (float32 of split state) are for one kv head."""

    sequences: NDArray[np.int64]  # [batch, SEQUENCE_COLUMNS]
    runs: NDArray[np.int64]  # [runs, RUN_COLUMNS]
    num_held: NDArray[np.int64]  # [batch]
    work: NDArray[np.int64]  # [entries, WORK_COLUMNS]
    split_tiles: int
    partial_f32: int


def cut_work(
    problem: Problem,
    q_len: NDArray[np.int64],
    kv_len: NDArray[np.int64],
    held_blocks: NDArray[np.bool_] | None,
    tile_rows: NDArray[np.int64] | int,
    split_m: int,
    block_n: int,
    cutters: Cutters,
) -> Cut:
    """Lengths are int64 [batch], held_blocks bool [batch, max_block_num] (None: all), checked. tile_rows: block_m, for each
    sequence or for all. Keys are split as for tiles of split_m rows."""
    count_work, fill_work = cutters
    sequences = np.empty((problem.batch, tiling.SEQUENCE_COLUMNS), np.int64)
    np.cumsum(q_len, out=sequences[:, tiling.Q_BEGIN])
    sequences[:, tiling.Q_BEGIN] -= q_len
    sequences[:, tiling.Q_LEN], sequences[:, tiling.KV_LEN], sequences[:, tiling.TILE_ROWS] = q_len, kv_len, tile_rows
    runs, num_held = add_runs(sequences, kv_len, held_blocks, problem.block_size)
    heads, group_size, head_size, is_causal = (
        problem.kv_head_num,
        problem.group_size,
        problem.head_size,
        problem.is_causal,
    )
    totals = np.empty(3 + tiling.COST_BUCKETS, np.int64)
    count_work(sequences, runs, group_size, head_size, is_causal, split_m, block_n, totals)
    entries, split_tiles, partial_f32 = (int(n) for n in totals[:3])
    work = np.empty((entries, tiling.WORK_COLUMNS), np.int64)
    fill_work(sequences, runs, group_size, heads, head_size, is_causal, split_m, block_n, totals, work)
    return Cut(sequences, runs, num_held, work, split_tiles, partial_f32)


def bias_of(problem: Problem) -> str:
    """One of BIASES."""
    if problem.mask_form == "heads":
        return "heads_mask"
    kind = _ALIBI.get(problem.mask_type, "none")
    return f"template_{kind}" if problem.mask_form == "template" else kind


def has_shift(bias: str, is_part: bool) -> bool:
    """Whether a row's log-sum-exp gets back what left-aligned biases leave out; the lse of a part leaves it out too (see
    held.part_shift)."""
    return not is_part and bias in ("left_align", "template_left_align")


def factors_of(qk_scale: float, bias: str) -> NDArray[np.float32]:
    """float32 QK_SCALE, UNIT, UNIT_LOG2, Q_SIGN."""
    scale = float(np.float32(qk_scale))
    sign, scale = np.sign(scale), abs(scale) or 1.0  # a zero, or what float32 rounds to it, is in the sign
    unit = scale if bias == "none" else 1.0
    return np.array([scale, unit, unit * math.log2(math.e), sign], np.float32)


def addresses_of(operands: Operands, out: Tensor, lse_address: int) -> tuple[int, ...]:
    """Q, K, V, TABLES, MASK, SLOPES, OUT, LSE."""
    o = operands
    return (
        *(o.q.address, o.k_cache.address, o.v_cache.address, o.block_tables.address),
        *(o.mask.address if o.mask else 0, o.slopes.address if o.slopes else 0, out.address, lse_address),
    )


def strides_of(operands: Operands, out: Tensor) -> tuple[int, ...]:
    """In bytes, of all axes but the last (that of head_size): Q_TOKEN, Q_HEAD, K_BLOCK, K_SLOT, K_HEAD, V_BLOCK, V_SLOT,
    V_HEAD, TABLE_ROW, TABLE_COLUMN, MASK_HEAD, MASK_ROW, MASK_COLUMN, OUT_TOKEN, OUT_HEAD."""
    q, k, v, table, mask = operands.q, operands.k_cache, operands.v_cache, operands.block_tables, operands.mask
    item, out_item = ITEM_BYTES[q.dtype], ITEM_BYTES[out.dtype]
    of_mask = (0, 0, 0)
    if mask is not None:
        head, row, column = (0, *mask.strides) if mask.ndim == 2 else mask.strides
        mask_item = ITEM_BYTES[mask.dtype]
        of_mask = (head * mask_item, row * mask_item, column * mask_item)
    return (
        *(q.strides[0] * item, q.strides[1] * item),
        *(k.strides[0] * item, k.strides[1] * item, k.strides[2] * item),
        *(v.strides[0] * item, v.strides[1] * item, v.strides[2] * item),
        *(table.strides[0] * 4, table.strides[1] * 4),
        *of_mask,
        *(out.strides[0] * out_item, out.strides[1] * out_item),
    )
