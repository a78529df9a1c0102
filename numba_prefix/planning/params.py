"""Kernel parameters that describe a call's arrays: their names, order and values on every
target."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from numba_prefix.inputs.arrays import ITEM_BYTES, Tensor
from numba_prefix.inputs.mask_types import MaskType
from numba_prefix.inputs.problem import Operands, Problem

# int64. Byte addresses end in _ptr; 0 for an array that the call does not have.
ADDRESSES = ("q_ptr", "k_ptr", "v_ptr", "table_ptr", "mask_ptr", "slopes_ptr", "out_ptr", "lse_ptr")
# int64, in bytes, of every axis but the last, head_size, which is dense.
STRIDES = (
    *("q_token_stride", "q_head_stride", "k_block_stride", "k_slot_stride", "k_head_stride"),
    *("v_block_stride", "v_slot_stride", "v_head_stride", "table_row_stride", "table_column_stride"),
    *("mask_head_stride", "mask_row_stride", "mask_column_stride", "out_token_stride", "out_head_stride"),
)
# float32. The sign of qk_scale is multiplied into the queries (exactly), so that units are
# positive.
FACTORS = ("qk_scale", "unit", "unit_log2", "q_sign")

# A kernel gets a kind of bias as its index here.
BIASES = (
    *("none", "linear", "sqrt", "left_align", "template_linear", "template_sqrt", "template_left_align"),
    "heads_mask",
)

_ALIBI = {
    MaskType.ALIBI_COMPRESS: "linear",
    MaskType.ALIBI_COMPRESS_SQRT: "sqrt",
    MaskType.ALIBI_COMPRESS_LEFT_ALIGN: "left_align",
}


def bias_of(problem: Problem) -> str:
    """The problem's kind of bias, one of BIASES."""
    if problem.mask_form == "heads":
        return "heads_mask"
    kind = _ALIBI.get(problem.mask_type, "none")
    return f"template_{kind}" if problem.mask_form == "template" else kind


def has_shift(bias: str, is_part: bool) -> bool:
    """Whether a row's log-sum-exp gets back the offset that left-aligned biases leave out. The lse
    of a partial call leaves it out too (see kv_runs.part_shift)."""
    return not is_part and bias in ("left_align", "template_left_align")


def factors_of(qk_scale: float, bias: str) -> NDArray[np.float32]:
    """Values of FACTORS, float32."""
    scale = float(np.float32(qk_scale))
    # q_sign holds a zero, also one that float32 rounds to.
    sign, scale = np.sign(scale), abs(scale) or 1.0
    unit = scale if bias == "none" else 1.0
    return np.array([scale, unit, unit * math.log2(math.e), sign], np.float32)


def addresses_of(operands: Operands, out: Tensor, lse_address: int) -> tuple[int, ...]:
    """Values of ADDRESSES."""
    o = operands
    return (
        *(o.q.address, o.k_cache.address, o.v_cache.address, o.block_tables.address),
        *(o.mask.address if o.mask else 0, o.slopes.address if o.slopes else 0, out.address, lse_address),
    )


def strides_of(operands: Operands, out: Tensor) -> tuple[int, ...]:
    """Values of STRIDES."""
    q, k, v, table, mask = operands.q, operands.k_cache, operands.v_cache, operands.block_tables, operands.mask
    item, out_item = ITEM_BYTES[q.dtype], ITEM_BYTES[out.dtype]
    mask_strides = (0, 0, 0)
    if mask is not None:
        head, row, column = (0, *mask.strides) if mask.ndim == 2 else mask.strides
        mask_item = ITEM_BYTES[mask.dtype]
        mask_strides = (head * mask_item, row * mask_item, column * mask_item)
    return (
        *(q.strides[0] * item, q.strides[1] * item),
        *(k.strides[0] * item, k.strides[1] * item, k.strides[2] * item),
        *(v.strides[0] * item, v.strides[1] * item, v.strides[2] * item),
        *(table.strides[0] * 4, table.strides[1] * 4),
        *mask_strides,
        *(out.strides[0] * out_item, out.strides[1] * out_item),
    )
