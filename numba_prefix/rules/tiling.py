"""Tiles, key ranges, block lookup, split keys and the work list: pure integers for all targets.

A tile is up to block_m rows of one sequence and one kv head. A row is a pair of query token and
head of the group, row = q_idx * group_size + group_idx, so that all heads that read the same keys
share them. A tile walks its keys in key tiles of up to block_n. The target chooses both sizes,
block_m for each sequence. Everything here depends on one sequence alone, never on batch mates or
threads, so that results do not either.

A row sees one interval of keys, visible_begin to visible_end. The four ends of visible_range say
how a tile of rows treats a key: keys before `begin` and from `end` on are never touched; between
`full_begin` and `full_end` every row sees every key; elsewhere each element is tested
(masks.is_visible).

A call may attend to some of a sequence's keys only, its held keys: runs of consecutive positions,
in order, at least one run per sequence (which may be empty). `kv_idx` counts held keys, from 0 and
without gaps; `kv_pos` is the position of one of them. Where all keys are held, the two are equal.
"""

from __future__ import annotations

from typing import Any

# The keys of a sequence are split until each kv head has this many work items, but no split gets
# fewer than MIN_SPLIT_KEYS keys. The number of heads does not enter: a rank that has some of the
# heads gets the same bits.
MIN_HEAD_ITEMS = 16
MIN_SPLIT_KEYS = 1024

# Columns of the work list, one row per work item; N_BEGIN and N_END are a range of kv_idx
SEQUENCE, M_BLOCK, SPLIT_IDX, NUM_SPLITS, N_BEGIN, N_END, SPLIT_TILE, PARTIAL_OFFSET = range(8)
WORK_COLUMNS = 8

# Columns of the sequence table; TILE_ROWS is block_m, LEFT and RIGHT are the numbers of keys that a
# row sees before and after its own position
Q_BEGIN, Q_LEN, KV_LEN, FIRST_RUN, END_RUN, TILE_ROWS, LEFT, RIGHT = range(8)
SEQUENCE_COLUMNS = 8
NO_LIMIT = 1 << 31  # value of LEFT and RIGHT: more than any position

# Columns of the table of runs: positions RUN_BEGIN up to RUN_END, and the number of held keys of
# the sequence before them
RUN_BEGIN, RUN_END, HELD_BEFORE = range(3)
RUN_COLUMNS = 3

COST_BUCKETS = 256  # eight to a doubling of the cost


# Sequences of up to this many rows are padded along the head instead of to 16 rows: see fold_rows.
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
    """The number of rows (1, 4 or 8) that a sequence's few rows are padded to where lanes run along
    the head instead of along the rows; 0 if the sequence has too many rows or its heads are not
    whole vectors."""
    rows = q_len * group_size
    if rows > MAX_FOLD_ROWS or head_size % 16 != 0:
        return 0
    return 1 if rows == 1 else 4 if rows <= 4 else 8


def q_idx_of_row(row: Any, group_size: Any) -> Any:
    return row // group_size


def group_idx_of_row(row: Any, group_size: Any) -> Any:
    return row % group_size


def q_pos_of_row(sequence: Any, row: Any, group_size: Any) -> Any:
    return sequence[KV_LEN] - sequence[Q_LEN] + q_idx_of_row(row, group_size)


def visible_begin(sequence: Any, q_pos: Any) -> Any:
    """The first key that the query at q_pos sees."""
    return max(0, q_pos - sequence[LEFT])


def visible_end(sequence: Any, q_pos: Any) -> Any:
    """One past the last key that the query at q_pos sees."""
    return min(sequence[KV_LEN], q_pos + sequence[RIGHT] + 1)


def visible_range(sequence: Any, first_pos: Any, last_pos: Any) -> Any:
    """begin, full_begin, full_end, end of rows at positions first_pos to last_pos; full_begin may
    lie past full_end."""
    return (
        visible_begin(sequence, first_pos),
        visible_begin(sequence, last_pos),
        visible_end(sequence, first_pos),
        visible_end(sequence, last_pos),
    )


def keys_between(begin: Any, end: Any, kv_pos: Any, num_keys: Any) -> Any:
    """Range of the keys of a key tile at kv_pos that lie between two ends of visible_range: the
    first and one past the last, counted from the tile's first key. Empty where first >= last."""
    return max(0, begin - kv_pos), min(num_keys, end - kv_pos)


def is_edge(full_begin: Any, full_end: Any, kv_pos: Any, num_keys: Any) -> Any:
    """Whether some row does not see all of num_keys keys from kv_pos on."""
    return kv_pos < full_begin or kv_pos + num_keys > full_end


def last_run(runs: Any, sequence: Any, column: Any, limit: Any) -> Any:
    """The last run of a sequence whose column is at most `limit`; the first run if none is."""
    low, high = sequence[FIRST_RUN], sequence[END_RUN]
    while high - low > 1:
        middle = (low + high) // 2
        if runs[middle, column] <= limit:
            low = middle
        else:
            high = middle
    return low


def num_held_before(runs: Any, sequence: Any, kv_pos: Any) -> Any:
    """Number of held keys at positions below kv_pos."""
    run = last_run(runs, sequence, RUN_BEGIN, kv_pos)
    begin, end = runs[run, RUN_BEGIN], runs[run, RUN_END]
    return runs[run, HELD_BEFORE] + max(0, min(kv_pos, end) - begin)


def last_held(runs: Any, sequence: Any, kv_pos: Any) -> Any:
    """The position of the last held key up to kv_pos; any position up to kv_pos if none is held."""
    return min(kv_pos, runs[last_run(runs, sequence, RUN_BEGIN, kv_pos), RUN_END] - 1)


def key_tile(runs: Any, sequence: Any, kv_idx: Any, n_end: Any, block_n: Any) -> Any:
    """Position of the key kv_idx, and the number of keys walked as one tile from it on: up to
    block_n consecutive positions, none from n_end on."""
    run = last_run(runs, sequence, HELD_BEFORE, kv_idx)
    kv_pos = runs[run, RUN_BEGIN] + kv_idx - runs[run, HELD_BEFORE]
    return kv_pos, max(0, min(block_n, runs[run, RUN_END] - kv_pos, n_end - kv_idx))


def num_splits_of_tile(m_blocks: Any, num_keys: Any) -> Any:
    """Number of work items that share the keys of a tile; m_blocks is the number of tiles of
    split_m rows in its sequence."""
    wanted = ceil_div(MIN_HEAD_ITEMS, m_blocks)
    return max(1, min(wanted, num_keys // MIN_SPLIT_KEYS))


def is_never_split(rows: Any, kv_len: Any, split_m: Any) -> Any:
    """Whether num_splits_of_tile is 1 for all tiles of a sequence, whatever their height. Takes
    arrays, or one sequence's numbers."""
    return (rows > split_m * (MIN_HEAD_ITEMS - 1)) | (kv_len < 2 * MIN_SPLIT_KEYS)


def split_begin(n_begin: Any, n_end: Any, num_splits: Any, split_idx: Any, block_n: Any) -> Any:
    """First key of a split of the keys n_begin to n_end. Splits are whole key tiles; split number
    num_splits begins at n_end."""
    num_tiles = ceil_div(n_end - n_begin, block_n)
    return min(n_end, n_begin + num_tiles * split_idx // num_splits * block_n)


def logical_block_of(kv_pos: Any, block_size: Any) -> Any:
    return kv_pos // block_size


def lane_rows(rows: Any) -> Any:
    """Rows of a tile, rounded up to whole vectors of 16 lanes."""
    return round_up(rows, 16)


def partial_floats(rows: Any, head_size: Any) -> Any:
    """Number of float32 in one split's state: acc [head size rounded up to 16, rows], m_i [rows],
    l_i [rows]."""
    return (round_up(head_size, 16) + 2) * lane_rows(rows)


def cost_bucket(rows: Any, num_keys: Any) -> Any:
    """A logarithmic measure of a tile's work, larger for more: whole doublings in the upper bits,
    eighths below."""
    cost = max(1, ceil_div(rows, 16) * (num_keys + 16))
    doublings = 0
    rest = cost
    while rest > 1:
        rest >>= 1
        doublings += 1
    eighth = (cost << 3 >> doublings) & 7
    return min(COST_BUCKETS - 1, doublings * 8 + eighth)


def cut_tiles(
    sequences: Any, runs: Any, group_size: Any, kv_head_num: Any, head_size: Any, split_m: Any, block_n: Any, totals: Any,
    work: Any,
) -> None:  # fmt: skip
    """Cut the work of a call into work items. Called twice: to count the items, then to fill the
    list.

    sequences  int64 [batch, SEQUENCE_COLUMNS]
    runs       int64 [runs, RUN_COLUMNS]
    totals     int64 [3 + COST_BUCKETS]: work items, split tiles and float32 of split state (the
               latter two for one kv head each), then the items of each cost bucket. Written if
               the work list is empty, else read and used up
    work       int64 [items, WORK_COLUMNS], or [0, WORK_COLUMNS] to count. The costliest bucket
               comes first. PARTIAL_OFFSET counts float32 for all kv heads of the tiles before
    """
    is_counting = work.shape[0] == 0
    if is_counting:
        totals[:] = 0
    else:
        place = 0
        for bucket in range(COST_BUCKETS + 2, 2, -1):
            count = totals[bucket]
            totals[bucket] = place
            place += count
    split_tile, offset = 0, 0
    for b in range(sequences.shape[0]):
        sequence = sequences[b]
        q_len, block_m = sequence[Q_LEN], sequence[TILE_ROWS]
        split_blocks = num_m_blocks(q_len, group_size, split_m)
        for m_block in range(num_m_blocks(q_len, group_size, block_m)):
            rows = rows_in_tile(q_len, group_size, m_block, block_m)
            first_pos = q_pos_of_row(sequence, m_block * block_m, group_size)
            last_pos = q_pos_of_row(sequence, m_block * block_m + rows - 1, group_size)
            begin, _, _, end = visible_range(sequence, first_pos, last_pos)
            n_begin, n_end = num_held_before(runs, sequence, begin), num_held_before(runs, sequence, end)
            num_splits = num_splits_of_tile(split_blocks, n_end - n_begin)
            for split_idx in range(num_splits):
                split_first = split_begin(n_begin, n_end, num_splits, split_idx, block_n)
                split_end = split_begin(n_begin, n_end, num_splits, split_idx + 1, block_n)
                bucket = 3 + cost_bucket(rows, split_end - split_first)
                if not is_counting:
                    item = work[totals[bucket]]
                    item[SEQUENCE], item[M_BLOCK] = b, m_block
                    item[SPLIT_IDX], item[NUM_SPLITS] = split_idx, num_splits
                    item[N_BEGIN], item[N_END] = split_first, split_end
                    item[SPLIT_TILE], item[PARTIAL_OFFSET] = split_tile, offset
                totals[bucket] += 1
            if num_splits > 1:
                split_tile += 1
                offset += num_splits * kv_head_num * partial_floats(rows, head_size)
            if is_counting:
                totals[0] += num_splits
    if is_counting:
        totals[1], totals[2] = split_tile, offset // kv_head_num
