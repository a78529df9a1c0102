"""Tile sizes of the CPU kernels, each with the measurement that chose it."""

from __future__ import annotations

LANES = 16  # query rows of a panel: the lanes of a vector
FLOAT = 4  # bytes
BFLOAT = 2
VECTOR_BYTES = LANES * FLOAT  # of one vector of lanes

# Rows and keys of a tile. 128 x 128 beats 64 x 64 by about 10 % on one thread (AVX-512, head size
# 128): keys and values are widened for twice the rows, accumulators loaded and stored for twice the
# keys, and the working set of 300 KB still fits an L2 cache.
BLOCK_M = 128
BLOCK_N = 128

# Keys of a decode tile: rows of one head lie a power of two apart, so that few cache sets hold
# them. 4 rows of head size 128 from memory, ns a key with 128, 64 and 32: 216 to 228, 193 to 213
# and 183 to 213 (float32); 152, 137 to 160 and 132 (float16). With 32 there is twice as much to do
# between tiles, which faster CPUs would notice.
DECODE_N = 64
# kv heads that one decode work item takes in turns, DECODE_N keys of each, if there are enough
# items: their rows lie side by side, in the same pages of memory.
MAX_ITEM_HEADS = 8
MIN_ITEMS_PER_THREAD = 8

# The bfloat16 paths: panels of a strip, which are computed together (four accumulators of AMX), and
# dimensions of an AMX tile.
STRIP = 2
PAIR_DIMS = 32
STEP_N = 32  # keys of a pipeline step: the pairs of an AMX tile
STEPS = BLOCK_N // STEP_N
PANEL_S_BYTES = BLOCK_N * VECTOR_BYTES  # scores of a panel
PANEL_P_BYTES = BLOCK_N // 2 * VECTOR_BYTES  # probabilities of a panel
# Keys that are packed at once there; a strip meets them BLOCK_N at a time while its queries and
# accumulators stay in L1.
PACK_N = 512
