"""What a CUDA kernel is compiled for, what compiling it needs, and what it is told when launched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numba_prefix.planning import plan

# fmt: off
(
    # byte addresses
    Q, K, V, TABLES, MASK, SLOPES, OUT, LSE, PARTIALS, WORK, MERGE, SEQUENCES, RUNS, STATUS,
    # byte strides
    Q_TOKEN, Q_HEAD, K_BLOCK, K_SLOT, K_HEAD, V_BLOCK, V_SLOT, V_HEAD, TABLE_ROW, TABLE_COLUMN,
    MASK_HEAD, MASK_ROW, MASK_COLUMN, OUT_TOKEN, OUT_HEAD,
    # counts
    KV_HEAD_NUM, GROUP_SIZE, HEAD_SIZE, BLOCK_SIZE, NUM_BLOCKS, TILE_ROWS,
    # whether lse gets back what left-aligned biases leave out
    HAS_SHIFT,
    CALL_LENGTH,
) = range(37)
# fmt: on

# Places in the float32 factors. qk_scale's sign is multiplied into the queries (exactly): units are positive.
QK_SCALE, UNIT, UNIT_LOG2, Q_SIGN, FACTORS_LENGTH = range(5)

HEAD_DIMS = (32, 64, 96, 128, 192, 256)  # what head sizes are padded to
BIASES = plan.BIASES


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """A kernel's compile-time choices.

    family      "mma" (tensor cores, sm_80 and newer, 16-bit inputs), "fma" (any), "merge" (of split tiles)
    dtype       of query, key and value: "float16", "bfloat16", "float32"
    out_dtype   dtype, or "float32"
    head_dim    one of HEAD_DIMS: the head size, padded
    bias        one of BIASES
    is_causal   keys after the query's position are hidden
    mask_dtype  of the given mask, "" if there is none to read
    is_aligned  all rows of query, key and value begin at multiples of 16 bytes, and head sizes are multiples of 16 bytes
    """

    family: str
    dtype: str
    out_dtype: str
    head_dim: int
    bias: str = "none"
    is_causal: bool = True
    mask_dtype: str = ""
    is_aligned: bool = True

    @property
    def name(self) -> str:
        kind = "causal" if self.is_causal else "full"
        out = "" if self.out_dtype == self.dtype else f"_to_{self.out_dtype}"
        mask = f"_{self.mask_dtype}_mask" if self.mask_dtype else ""
        aligned = "" if self.is_aligned else "_unaligned"
        return f"{self.family}_{self.dtype}{out}_d{self.head_dim}_{self.bias}_{kind}{mask}{aligned}"


@dataclass(frozen=True, slots=True)
class Source:
    """A kernel, ready to be compiled: Numba's function and how it is launched."""

    name: str
    function: Callable[..., Any]
    threads: int
    shared_bytes: int
    block_m: int  # rows and keys of a tile; 0 for the merge
    block_n: int
