"""How tall a sequence's tiles are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from numba_prefix.cpu import isa
from numba_prefix.cpu.kernel.params import BLOCK_M
from numba_prefix.inputs.problem import Problem
from numba_prefix.rules import tiling

# With twice the rows, keys and values are widened half as often: 1.02 times with head size 64, 1.01 with 128 (AVX2, 2,048
# causal tokens, one thread and two; 384 and 512 rows: 1.00 and 1.01). Larger heads would not leave L2 caches of 512 KB enough.
# On tiles of AMX, packing keys and values takes a fifth of the time of 128 rows' products, by count of instructions.
HEIGHTS: dict[str, tuple[int, ...]] = {isa.VECTOR: (256,), isa.AVX512_BF16: (256,), isa.AMX: (256, 512)}
MAX_HEAD_SIZE = 128
# With fewer tiles, threads would wait for the last one longer than tall ones save.
TILES_PER_THREAD = {isa.VECTOR: 32, isa.AVX512_BF16: 32, isa.AMX: 8}

# Compiled code is left about this often, so that Ctrl-C is seen; and a guess of one thread's speed to translate it.
FLOPS_PER_VISIT = 0.05 * 50e9
# How fast paths are taken to be beside `vector`, in such guesses.
SPEEDS = {isa.VECTOR: 1.0, isa.AVX512_BF16: 1.5, isa.AMX: 4.0}


def tile_rows(
    path: str, problem: Problem, q_len: NDArray[np.int64], kv_len: NDArray[np.int64], num_threads: int
) -> NDArray[np.int64]:
    """Rows of each sequence's tiles, int64 [batch]. Of how many threads there are, no bit may depend: tiles are tall only where
    keys are not split, whatever the rows. Nor may one tile keep Ctrl-C waiting."""
    rows = q_len * problem.group_size
    least = TILES_PER_THREAD[path] * num_threads
    low = np.full(len(rows), BLOCK_M, np.int64)
    if problem.head_size > MAX_HEAD_SIZE or problem.num_tokens * problem.head_num < BLOCK_M * least:
        return low
    may_be_tall = tiling.is_never_split(rows, kv_len, BLOCK_M) & (rows > BLOCK_M)
    tallest = low
    for height in HEIGHTS[path]:
        is_short = 4.0 * height * problem.head_size * kv_len <= FLOPS_PER_VISIT * SPEEDS[path]
        tallest = np.where(may_be_tall & is_short, height, tallest)
    for height in reversed(HEIGHTS[path]):
        tall = np.minimum(tallest, height)
        if int(np.sum(-(-rows // tall))) * problem.kv_head_num >= least:
            return tall
    return low
