"""How the work is cut: tiles, key ranges, page lookup, split keys and the work list. Pure integers, shared by all targets.

A tile is up to block_m rows of one sequence and one kv head. Its rows are numbered through (query token, head of the group):
row = q_idx * group_size + group_idx, so that all heads that read the same keys share them. A tile walks its keys block_n at
a time; both sizes are the target's own, the first for each sequence. Everything here depends on one sequence alone, never on
batch mates or threads, so that results do not either.

A call may attend to a part of a sequence's keys, its held keys: runs of consecutive positions, in order, at least one run
to a sequence (which may be empty). Held keys are counted by `kv_idx`, from 0 and without gaps; `kv_pos` is where one of
them sits. Where all keys are held, both are the same.
"""

from __future__ import annotations

from typing import Any

# The keys of a sequence are split until each kv head gives this many work items, but never below MIN_SPLIT_KEYS a split. The
# number of heads does not enter: a rank that holds some of them gets the same bits.
MIN_HEAD_ITEMS = 16
MIN_SPLIT_KEYS = 1024

# Columns of the work list; N_BEGIN and N_END are a range of kv_idx
SEQUENCE, M_BLOCK, SPLIT_IDX, NUM_SPLITS, N_BEGIN, N_END, SPLIT_TILE, PARTIAL_OFFSET = range(8)
WORK_COLUMNS = 8

# Columns of the sequence table; TILE_ROWS is block_m
Q_BEGIN, Q_LEN, KV_LEN, FIRST_RUN, END_RUN, TILE_ROWS = range(6)
SEQUENCE_COLUMNS = 6

# Columns of the table of runs: positions from RUN_BEGIN up to RUN_END, and the held keys of the sequence before them
RUN_BEGIN, RUN_END, HELD_BEFORE = range(3)
RUN_COLUMNS = 3

COST_BUCKETS = 256  # eight to a doubling of the cost


# A sequence of up to this many rows is not worth a tile of 16 lanes a row: see fold_rows.
MAX_FOLD_ROWS = 8


def ceil_div(a: Any, b: Any) -> Any:
    return (a + b - 1) // b


def round_up(a: Any, b: Any) -> Any:
    return ceil_div(a, b) * b


def num_m_blocks(q_len: Any, group_size: Any, block_m: Any) -> Any:
    return ceil_div(q_len * group_size, block_m)


def rows_in_tile(q_len: Any, group_size: Any, m_block: Any, block_m: Any) -> Any:
    return min(block_m, q_len * group_size - m_block * block_m)


def fold_rows(q_len: Any, group_size: Any, head_size: Any) -> Any:
    """Rows that a sequence's few rows are padded to (1, 4 or 8) where lanes run along the head instead of along the rows,
    or 0: the sequence has too many rows, or heads that are no whole vectors."""
    rows = q_len * group_size
    if rows > MAX_FOLD_ROWS or head_size % 16 != 0:
        return 0
    return 1 if rows == 1 else 4 if rows <= 4 else 8


def q_idx_of_row(row: Any, group_size: Any) -> Any:
    return row // group_size


def group_idx_of_row(row: Any, group_size: Any) -> Any:
    return row % group_size


def n_end_of_rows(is_causal: Any, last_row: Any, group_size: Any, q_len: Any, kv_len: Any) -> Any:
    """One past the last key that any row up to last_row may see."""
    if is_causal:
        return kv_len - q_len + q_idx_of_row(last_row, group_size) + 1
    return kv_len


def last_run(runs: Any, sequence: Any, column: Any, limit: Any) -> Any:
    """The last run of a sequence whose column is at most `limit`; the first if there is none."""
    low, high = sequence[FIRST_RUN], sequence[END_RUN]
    while high - low > 1:
        middle = (low + high) // 2
        if runs[middle, column] <= limit:
            low = middle
        else:
            high = middle
    return low


def num_held_before(runs: Any, sequence: Any, kv_pos: Any) -> Any:
    """Held keys at positions below kv_pos."""
    run = last_run(runs, sequence, RUN_BEGIN, kv_pos)
    begin, end = runs[run, RUN_BEGIN], runs[run, RUN_END]
    return runs[run, HELD_BEFORE] + max(0, min(kv_pos, end) - begin)


def last_held(runs: Any, sequence: Any, kv_pos: Any) -> Any:
    """The position of the last held key up to kv_pos; any position up to it if there is none."""
    return min(kv_pos, runs[last_run(runs, sequence, RUN_BEGIN, kv_pos), RUN_END] - 1)


def run_of_key(runs: Any, sequence: Any, kv_idx: Any) -> Any:
    return last_run(runs, sequence, HELD_BEFORE, kv_idx)


def kv_pos_of_key(runs: Any, run: Any, kv_idx: Any) -> Any:
    return runs[run, RUN_BEGIN] + kv_idx - runs[run, HELD_BEFORE]


def keys_in_block(runs: Any, run: Any, kv_idx: Any, n_end: Any, block_n: Any) -> Any:
    """Keys from kv_idx on, one of `run`, that are walked at once: consecutive positions, none from n_end on."""
    left_of_run = runs[run, RUN_END] - kv_pos_of_key(runs, run, kv_idx)
    return max(0, min(block_n, left_of_run, n_end - kv_idx))


def num_splits_of_tile(m_blocks: Any, n_end: Any) -> Any:
    """How many work items share the n_end keys of a tile; m_blocks: how many tiles of split_m rows its sequence makes."""
    wanted = ceil_div(MIN_HEAD_ITEMS, m_blocks)
    return max(1, min(wanted, n_end // MIN_SPLIT_KEYS))


def is_never_split(rows: Any, kv_len: Any, split_m: Any) -> Any:
    """Whether num_splits_of_tile is 1 for all tiles of a sequence, however tall they are. Arrays, or one sequence's."""
    return (rows > split_m * (MIN_HEAD_ITEMS - 1)) | (kv_len < 2 * MIN_SPLIT_KEYS)


def split_begin(n_end: Any, num_splits: Any, split_idx: Any, block_n: Any) -> Any:
    """First key of a split; splits are whole key blocks, and split num_splits begins at n_end."""
    num_blocks = ceil_div(n_end, block_n)
    return min(n_end, num_blocks * split_idx // num_splits * block_n)


def logical_block_of(kv_pos: Any, block_size: Any) -> Any:
    return kv_pos // block_size


def lane_rows(rows: Any) -> Any:
    """Rows of a tile, rounded up to whole vectors of 16 lanes."""
    return round_up(rows, 16)


def partial_floats(rows: Any, head_size: Any) -> Any:
    """float32 of one split's state: acc [head size rounded up to 16, rows], m_i [rows], l_i [rows]."""
    return (round_up(head_size, 16) + 2) * lane_rows(rows)


def cost_bucket(rows: Any, num_keys: Any) -> Any:
    """A logarithmic measure of a tile's work, larger for more: whole doublings in the upper bits, eighths below."""
    cost = max(1, ceil_div(rows, 16) * (num_keys + 16))
    doublings = 0
    rest = cost
    while rest > 1:
        rest >>= 1
        doublings += 1
    eighth = (cost << 3 >> doublings) & 7
    return min(COST_BUCKETS - 1, doublings * 8 + eighth)


def count_work(
    sequences: Any,
    runs: Any,
    group_size: Any,
    head_size: Any,
    is_causal: Any,
    split_m: Any,
    block_n: Any,
    totals: Any,
) -> None:
    """From sequences int64 [batch, SEQUENCE_COLUMNS] and runs int64 [runs, RUN_COLUMNS], fills totals int64
    [3 + COST_BUCKETS]: entries of the work list, split tiles, float32 of split state (the latter two
    for one kv head each), and the number of entries in each cost bucket."""
    totals[:] = 0
    for b in range(sequences.shape[0]):
        q_len, kv_len, block_m = sequences[b, Q_LEN], sequences[b, KV_LEN], sequences[b, TILE_ROWS]
        split_blocks = num_m_blocks(q_len, group_size, split_m)
        for m_block in range(num_m_blocks(q_len, group_size, block_m)):
            rows = rows_in_tile(q_len, group_size, m_block, block_m)
            seen = n_end_of_rows(is_causal, m_block * block_m + rows - 1, group_size, q_len, kv_len)
            n_end = num_held_before(runs, sequences[b], seen)
            num_splits = num_splits_of_tile(split_blocks, n_end)
            totals[0] += num_splits
            if num_splits > 1:
                totals[1] += 1
                totals[2] += num_splits * partial_floats(rows, head_size)
            for split_idx in range(num_splits):
                n_begin = split_begin(n_end, num_splits, split_idx, block_n)
                n_stop = split_begin(n_end, num_splits, split_idx + 1, block_n)
                totals[3 + cost_bucket(rows, n_stop - n_begin)] += 1


def fill_work(
    sequences: Any,
    runs: Any,
    group_size: Any,
    kv_head_num: Any,
    head_size: Any,
    is_causal: Any,
    split_m: Any,
    block_n: Any,
    totals: Any,
    work: Any,
) -> None:
    """Fills work int64 [entries, WORK_COLUMNS], the costliest bucket first; uses totals as count_work left it, and its
    buckets up. PARTIAL_OFFSET counts float32 for all kv heads of the tiles before."""
    place = 0
    for bucket in range(COST_BUCKETS - 1, -1, -1):
        count = totals[3 + bucket]
        totals[3 + bucket] = place
        place += count
    split_tile, offset = 0, 0
    for b in range(sequences.shape[0]):
        q_len, kv_len, block_m = sequences[b, Q_LEN], sequences[b, KV_LEN], sequences[b, TILE_ROWS]
        split_blocks = num_m_blocks(q_len, group_size, split_m)
        for m_block in range(num_m_blocks(q_len, group_size, block_m)):
            rows = rows_in_tile(q_len, group_size, m_block, block_m)
            seen = n_end_of_rows(is_causal, m_block * block_m + rows - 1, group_size, q_len, kv_len)
            n_end = num_held_before(runs, sequences[b], seen)
            num_splits = num_splits_of_tile(split_blocks, n_end)
            for split_idx in range(num_splits):
                n_begin = split_begin(n_end, num_splits, split_idx, block_n)
                n_stop = split_begin(n_end, num_splits, split_idx + 1, block_n)
                bucket = 3 + cost_bucket(rows, n_stop - n_begin)
                entry = work[totals[bucket]]
                totals[bucket] += 1
                entry[SEQUENCE], entry[M_BLOCK] = b, m_block
                entry[SPLIT_IDX], entry[NUM_SPLITS] = split_idx, num_splits
                entry[N_BEGIN], entry[N_END] = n_begin, n_stop
                entry[SPLIT_TILE], entry[PARTIAL_OFFSET] = split_tile, offset
            if num_splits > 1:
                split_tile += 1
                offset += num_splits * kv_head_num * partial_floats(rows, head_size)
