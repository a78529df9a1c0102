"""Parameters of a CPU kernel: one block of memory of named fields, of 8 bytes each.

The host fills a Params by name; kernels read `params.q_ptr` through a type of their own
(cpu/simd/params_view.py). Measured against a NumPy structured dtype, a Numba record: a call of it
takes 7 us instead of 0.8, a copy 30 us instead of 0.3.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from numba_prefix.planning.params import ADDRESSES, BIASES, FACTORS, STRIDES

# int64. Byte addresses end in _ptr.
_WORKSPACE = ("queue_ptr", "arrivals_ptr", "partials_ptr", "scratch_ptr")
_SIZES = ("scratch_bytes", "head_bytes")
_COUNTS = ("num_items", "kv_head_num", "item_heads", "group_size", "head_size", "block_size")
_CODES = ("q_dtype", "kv_dtype", "out_dtype", "mask_dtype", "bias", "has_shift")
# int64, byte offsets in a worker's scratch of one kv head. Lanes are query rows: a panel is 16 of
# them.
OFFSETS = (
    "q_t_offset",  # queries [panel, head_size, 16] float32; decode: [row, head_size]
    "k_rows_offset",  # keys of a key tile [key, row_pitch]
    "v_rows_offset",  # values of a key tile [key, row_pitch]
    "s_offset",  # scores, then probabilities [panel, key, 16] float32
    "entries_offset",  # entries of a given mask [key, 16] float32
    "acc_offset",  # accumulators [panel, head_size, 16] float32; decode: [row, row_pitch]
    "state_offset",  # m_i, l_i [panel, 2, 16] float32
    "alpha_offset",  # [panel, 16] float32
    "slopes_offset",  # [panel, 16] float32
    "q_pos_offset",  # [panel, 16] int32
    "bias_pos_offset",  # position that biases are relative to [panel, 16] int32
    "begin_offset",  # first key that a row sees [panel, 16] int32
    "end_offset",  # one past the last [panel, 16] int32
    "mask_base_offset",  # address of the given mask of the row's head [panel, 16] int64
    "staging_offset",  # 16 rows on their way to panels or back [row, row_pitch]
    "k_list_offset",  # addresses of key rows, of this key tile and the next [2, key] int64
    "v_list_offset",  # addresses of value rows int64
    "kv_lane_offset",  # decode: the key of each lane [16] int32
    # of the bfloat16 paths (prefill_bf16.py)
    "p_offset",  # probabilities [buffer, plane, panel of a strip, pair of keys, 16, 2] bfloat16
    "zero_row_offset",  # a row of zeros
    "non_finite_offset",  # int64: whether a query is not finite
    "softmax_offset",  # the record of prefill_bf16_softmax.py
)
# int64: bytes from one row to the next, or from one plane (of a float16's two bfloat16) to the
# next, and the planes
_PITCHES = ("row_pitch", "k_pitch", "v_pitch", "v_plane_bytes", "p_plane_bytes", "planes")

INTEGERS = (*_WORKSPACE, *ADDRESSES, *STRIDES, *_SIZES, *_COUNTS, *_CODES, *OFFSETS, *_PITCHES)
FIELDS = (*INTEGERS, *FACTORS)
SLOT_BYTES = 8
SLOTS = {name: slot for slot, name in enumerate(FIELDS)}
_ARRAY_SLOTS = slice(SLOTS[ADDRESSES[0]], SLOTS[STRIDES[-1]] + 1)
_WORKSPACE_SLOTS = slice(SLOTS[_WORKSPACE[0]], SLOTS[_WORKSPACE[-1]] + 1)

DTYPE_CODES = {"float16": 0, "bfloat16": 1, "float32": 2}
FLOAT16, BFLOAT16, FLOAT32 = DTYPE_CODES.values()

NO_BIAS, LINEAR, SQRT, LEFT_ALIGN, TEMPLATE_LINEAR, TEMPLATE_SQRT, TEMPLATE_LEFT_ALIGN, HEADS_MASK = range(len(BIASES))


class Params:
    """A block of parameters by name. `block` is what a kernel is given, int64 [fields]."""

    __slots__ = ("block",)

    def __init__(self, block: NDArray[np.int64] | None = None) -> None:
        self.block = np.zeros(len(FIELDS), np.int64) if block is None else block

    def set(self, fields: Mapping[str, int | bool | np.float32]) -> None:
        """Raises KeyError for an unknown name."""
        floats = self.block.view(np.float32)
        for name, value in fields.items():
            if name in FACTORS:
                floats[2 * SLOTS[name]] = value
            else:
                self.block[SLOTS[name]] = value

    def __getitem__(self, name: str) -> int:
        """An int64 field."""
        return int(self.block[SLOTS[name]])

    def with_arrays(self, addresses: tuple[int, ...], strides: tuple[int, ...]) -> Params:
        """A copy about these arrays: planning.params' ADDRESSES and STRIDES."""
        bound = Params(self.block.copy())
        bound.block[_ARRAY_SLOTS] = (*addresses, *strides)
        return bound

    def with_workspace(self, queue: int, arrivals: int, partials: int, scratch: int) -> Params:
        """A copy about this workspace: its addresses."""
        bound = Params(self.block.copy())
        bound.block[_WORKSPACE_SLOTS] = queue, arrivals, partials, scratch
        return bound
