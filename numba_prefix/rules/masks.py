"""The visibility and bias rules of each mask kind, written once for every target.

A rule takes absolute int32 positions (`q_pos`, `kv_pos`) and float32 values, scalars or vectors of
lanes alike, and uses only operators and elementwise.py. Biases are in natural units, as the
caller's slopes and masks are.
"""

from __future__ import annotations

from typing import Any

from numba_prefix.rules.elementwise import F32_ZERO, maximum, sqrt, to_f32, where


def is_visible(kv_pos: Any, begin: Any, end: Any) -> Any:
    """Whether a row that sees the keys `begin` to `end` (tiling.visible_begin, visible_end) sees
    this one."""
    return (kv_pos >= begin) & (kv_pos < end)


def linear_bias(slope: Any, q_pos: Any, kv_pos: Any) -> Any:
    return slope * to_f32(kv_pos - q_pos)


def sqrt_bias(slope: Any, q_pos: Any, kv_pos: Any) -> Any:
    return -(slope * sqrt(to_f32(q_pos - kv_pos)))


def left_align_anchor(slope: Any, last_pos: Any) -> Any:
    """Position of the row's largest left-aligned bias: the last key that it attends to, or the
    first of its sequence for a negative slope.

    Biases are taken relative to it: the softmax ignores an offset that all scores of a row share,
    and the smaller numbers keep more of float32's bits.
    """
    return where(slope > F32_ZERO, last_pos, last_pos - last_pos)


def left_align_bias(slope: Any, last_pos: Any, kv_pos: Any) -> Any:
    return slope * to_f32(kv_pos - left_align_anchor(slope, last_pos))


def left_align_shift(slope: Any, last_pos: Any) -> Any:
    """The offset that left_align_bias leaves out; it belongs to the row's log-sum-exp."""
    return slope * to_f32(left_align_anchor(slope, last_pos))


def template_row(q_pos: Any, kv_pos: Any) -> Any:
    """Row of the [256, 256] template; its column is kv_pos % 128."""
    row = q_pos & 127
    return where((q_pos >> 7) == (kv_pos >> 7), row, row + 128)


def template_shift(q_pos: Any, kv_pos: Any) -> Any:
    """128·(m - n - 1), and 0 on the diagonal block: the distance added to entries of the template's
    second half."""
    return where((q_pos >> 7) == (kv_pos >> 7), q_pos - q_pos, ((q_pos >> 7) - (kv_pos >> 7) - 1) << 7)


def template_linear_bias(slope: Any, entry: Any, q_pos: Any, kv_pos: Any) -> Any:
    return slope * (entry + to_f32(template_shift(q_pos, kv_pos)))


def template_sqrt_bias(slope: Any, entry: Any, q_pos: Any, kv_pos: Any) -> Any:
    on_diagonal = (q_pos >> 7) == (kv_pos >> 7)
    moved = sqrt(entry * entry + to_f32(template_shift(q_pos, kv_pos)))
    return slope * where(on_diagonal, entry, moved)


def template_left_align_bias(slope: Any, entry: Any, last_pos: Any, kv_pos: Any) -> Any:
    return slope * (entry + to_f32(((kv_pos >> 7) << 7) - left_align_anchor(slope, last_pos)))


def heads_mask_row(q_pos: Any, kv_pos: Any) -> Any:
    """Row of a [head_num, maskLen, 128] mask; its column is kv_pos % 128. Future keys too get
    a row >= 0."""
    row = q_pos - ((kv_pos >> 7) << 7)
    return maximum(row, row - row)
