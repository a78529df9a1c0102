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
    o, mask = operands, operands.mask
    mask_strides: tuple[int, ...] = (0, 0, 0)
    if mask is not None:
        mask_strides = (0, *_stride_bytes(mask, 2)) if mask.ndim == 2 else _stride_bytes(mask, 3)
    return (
        *_stride_bytes(o.q, 2),
        *_stride_bytes(o.k_cache, 3),
        *_stride_bytes(o.v_cache, 3),
        *_stride_bytes(o.block_tables, 2),
        *mask_strides,
        *_stride_bytes(out, 2),
    )


def _stride_bytes(t: Tensor, axes: int) -> tuple[int, ...]:
    """Byte strides of a tensor's first axes."""
    item = ITEM_BYTES[t.dtype]
    return tuple([stride * item for stride in t.strides[:axes]])
