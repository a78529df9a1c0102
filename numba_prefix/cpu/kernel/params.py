"""What a kernel is told: an int64 and a float32 array, their places named here, and the layout of a worker's scratch."""

from __future__ import annotations

from numba_prefix.cpu.kernel.prefill_f32_gemm import COLUMN_ROW, FLOAT, NV
from numba_prefix.planning.plan import BIASES
from numba_prefix.rules.tiling import MAX_FOLD_ROWS, round_up

# 128 x 128 beats 64 x 64 by about 10 % on one thread (AVX-512, head size 128): keys and values are widened for twice the
# rows, accumulators loaded and stored for twice the keys, and the working set of 300 KB still fits an L2 cache.
BLOCK_M = 128
BLOCK_N = 128
# Paths for pairs of bfloat16: columns that are computed together (four accumulators of AMX), and dimensions of a tile.
STRIP = 2
PAIR_DIMS = 32
BFLOAT = 2  # bytes
STEP_N = 32  # keys of a step (pairs.make_attend): a tile of pairs
STEPS = BLOCK_N // STEP_N
COLUMN_S = BLOCK_N * COLUMN_ROW  # bytes of a column of scores, and of weights
COLUMN_P = BLOCK_N // 2 * COLUMN_ROW
# Keys that are packed at once there; a strip meets them BLOCK_N at a time while its queries and accumulators stay in L1.
PACK_N = 512

# Keys that few rows (decode) are computed with at once: rows of one head lie a power of two apart, so that few cache sets hold
# them. 4 rows of head size 128 from memory, ns a key with 128, 64 and 32: 216 to 228, 193 to 213 and 183 to 213 (float32); 152,
# 137 to 160 and 132 (float16). With 32 there is twice as much to do between blocks, which faster CPUs would notice.
FEW_N = 64
# kv heads that one work item of few rows takes in turns, FEW_N keys of each, if there are enough items: their rows lie side by
# side, in the same pages of memory.
MAX_ITEM_HEADS = 8
MIN_ITEMS_PER_THREAD = 8

# fmt: off
(
    # byte addresses
    QUEUE, ARRIVALS, PARTIALS, SCRATCH, Q, K, V, TABLES, MASK, SLOPES, OUT, LSE,
    # byte strides
    SCRATCH_BYTES, HEAD_BYTES, Q_TOKEN, Q_HEAD, K_BLOCK, K_SLOT, K_HEAD, V_BLOCK, V_SLOT, V_HEAD, TABLE_ROW, TABLE_COLUMN,
    MASK_HEAD, MASK_ROW, MASK_COLUMN, OUT_TOKEN, OUT_HEAD,
    # counts
    NUM_ITEMS, KV_HEAD_NUM, ITEM_HEADS, GROUP_SIZE, HEAD_SIZE, BLOCK_SIZE,
    # codes
    DTYPE, OUT_DTYPE, MASK_DTYPE, BIAS, IS_CAUSAL, HAS_SHIFT,
    # byte offsets in a worker's scratch, and the pitch of its rows of keys and values
    Q_T, K_ROWS, V_ROWS, S, ENTRIES, ACC, STATE, ALPHA, ROW_SLOPES, Q_POS, ORIGIN, LAST, MASK_BASE, ROWS,
    KEY_LIST, VALUE_LIST, KV_LANE, PITCH,
    # of the paths for pairs of bfloat16 (cpu/kernel/prefill_bf16.py)
    P, ZERO_ROW, IS_SPECIAL, WEIGHING, PARTS, K_PITCH, V_PITCH, V_PART, P_PART,
    CALL_LENGTH,
) = range(69)
# fmt: on

# Places in the float32 array of factors. qk_scale's sign is multiplied into the queries (exactly): units are positive.
QK_SCALE, UNIT, UNIT_LOG2, Q_SIGN, FACTORS_LENGTH = range(5)

DTYPE_CODES = {"float16": 0, "bfloat16": 1, "float32": 2}
FLOAT16, BFLOAT16, FLOAT32 = range(3)

NO_BIAS, LINEAR, SQRT, LEFT_ALIGN, TEMPLATE_LINEAR, TEMPLATE_SQRT, TEMPLATE_LEFT_ALIGN, HEADS_MASK = range(len(BIASES))


def scratch_layout(head_size: int, tile_rows: int) -> tuple[dict[int, int], int]:
    """Byte offsets (by the names above) of one worker's scratch and its size."""
    depth = round_up(head_size, 16)
    # One cache line more than the row: rows a power of two apart would share few cache sets.
    pitch = depth * FLOAT + 64
    return _placed(_sizes(depth, tile_rows // 16, pitch), {PITCH: pitch})


def few_layout(head_size: int) -> tuple[dict[int, int], int]:
    """As scratch_layout, of one kv head where all sequences have few rows (tiling.fold_rows)."""
    depth = round_up(head_size, 16)
    pitch = depth * FLOAT + 64
    sizes = _sizes(depth, 1, pitch) | {
        Q_T: MAX_FOLD_ROWS * pitch,
        K_ROWS: 0,
        V_ROWS: 0,
        S: MAX_FOLD_ROWS * FEW_N * FLOAT,
        ENTRIES: MAX_FOLD_ROWS * FEW_N * FLOAT,
        ACC: MAX_FOLD_ROWS * pitch,
        ROWS: 0,
        KEY_LIST: 2 * FEW_N * 8,
        VALUE_LIST: FEW_N * 8,
    }
    return _placed(sizes, {PITCH: pitch})


def _sizes(depth: int, columns: int, pitch: int) -> dict[int, int]:
    return {
        Q_T: columns * depth * COLUMN_ROW,
        K_ROWS: BLOCK_N * pitch,
        V_ROWS: BLOCK_N * pitch,
        S: NV * BLOCK_N * COLUMN_ROW,
        ENTRIES: BLOCK_N * COLUMN_ROW,
        ACC: columns * depth * COLUMN_ROW,
        STATE: 2 * columns * COLUMN_ROW,
        ALPHA: columns * COLUMN_ROW,
        ROW_SLOPES: columns * COLUMN_ROW,
        Q_POS: columns * COLUMN_ROW,
        ORIGIN: columns * COLUMN_ROW,
        LAST: columns * COLUMN_ROW,
        MASK_BASE: columns * COLUMN_ROW * 2,
        ROWS: 16 * pitch,
        KEY_LIST: 2 * BLOCK_N * 8,
        VALUE_LIST: BLOCK_N * 8,
        KV_LANE: COLUMN_ROW,
    }


def _placed(sizes: dict[int, int], pitches: dict[int, int]) -> tuple[dict[int, int], int]:
    offsets, place = dict(pitches), 0
    for name, size in sizes.items():
        offsets[name] = place
        place += round_up(size, 64)
    return offsets, place


def pairs_layout(head_size: int, tile_rows: int, parts: int, is_by_dim: bool) -> tuple[dict[int, int], int]:
    """As scratch_layout, for elements that are sums of `parts` bfloat16: 1 (bfloat16) or 2 (float16).

    Q_T     [column][part][pair of dimensions][16 rows][2]
    K_ROWS  [key][part][dimension]
    V_ROWS  [part][dimension][key] if is_by_dim, else [pair of keys][dimension][2]
    S       [buffer][column of a strip][key][16 rows], float32
    P       [buffer][part][column of a strip][pair of keys][16 rows][2]
    """
    depth, dims = round_up(head_size, 16), round_up(head_size, PAIR_DIMS)
    columns = tile_rows // 16
    pitches = {
        PITCH: depth * FLOAT + 64,
        PARTS: parts,
        K_PITCH: parts * dims * BFLOAT + 64,
        V_PITCH: (PACK_N * BFLOAT if is_by_dim else depth * 2 * BFLOAT) + 64,
        P_PART: STRIP * BLOCK_N // 2 * COLUMN_ROW,
    }
    pitches[V_PART] = depth * pitches[V_PITCH] if is_by_dim else 0
    sizes = _sizes(depth, columns, pitches[PITCH])
    sizes |= {
        Q_T: columns * parts * dims // 2 * COLUMN_ROW,
        K_ROWS: PACK_N * pitches[K_PITCH],
        V_ROWS: parts * pitches[V_PART] if is_by_dim else PACK_N // 2 * pitches[V_PITCH],
        S: 2 * STRIP * BLOCK_N * COLUMN_ROW,
        P: 2 * parts * pitches[P_PART],
        ROWS: STEP_N * pitches[K_PITCH],
        KEY_LIST: 2 * PACK_N * 8,
        VALUE_LIST: 2 * PACK_N * 8,
        ZERO_ROW: depth * BFLOAT + 64,
        IS_SPECIAL: 64,
        WEIGHING: (1 + 4 * STRIP) * COLUMN_ROW,
    }
    return _placed(sizes, pitches)
