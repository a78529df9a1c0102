"""Parameters of a CUDA kernel: one named tuple, which a launch passes as a parameter a field.

The host makes a Params by name; kernels read `params.q_ptr` of the same tuple, typed by params_type
in compile/compiler.py.

"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_prefix.planning.params import ADDRESSES, FACTORS, STRIDES

# int64. Byte addresses end in _ptr; the tables are tiling's, int64 [rows, columns].
_TABLES = (
    "partials_ptr",  # split state, float32 (common.partial_address)
    "work_ptr",  # [work items, WORK_COLUMNS]
    "merge_ptr",  # the first work item of each split tile [split tiles, WORK_COLUMNS]
    "sequences_ptr",  # [batch, SEQUENCE_COLUMNS]
    "runs_ptr",  # [runs, RUN_COLUMNS]
    "status_ptr",  # int32 in host memory, set to 1 where a block does not exist
)
_COUNTS = ("kv_head_num", "group_size", "head_size", "block_size", "num_blocks", "tile_rows")
# bool: whether lse gets back what left-aligned biases leave out
_CODES = ("has_shift",)

INTEGERS = (*ADDRESSES, *_TABLES, *STRIDES, *_COUNTS, *_CODES)
_named: Any = namedtuple  # of fields that mypy can't read here
Params = _named("Params", (*INTEGERS, *FACTORS))
SLOT_BYTES = 8


def in_memory(params: Any) -> NDArray[np.int64]:
    """Parameters as a launch reads them, int64 [fields]: a slot of SLOT_BYTES for each, of which a
    factor fills the lower half."""
    block = np.zeros(len(params), np.int64)
    block[: len(INTEGERS)] = params[: len(INTEGERS)]
    block.view(np.float32)[2 * len(INTEGERS) :: 2] = params[len(INTEGERS) :]
    return block
