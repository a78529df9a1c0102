"""The rules of masks.py and softmax.py on NumPy values against brute force, and the cutting of the
work."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from numba_prefix.planning.kv_runs import add_runs
from numba_prefix.rules import masks, softmax, tiling
from numba_prefix.rules.elementwise import exp2_scaled, log2, maximum, where

F32 = np.float32
POSITIONS = st.integers(0, 1 << 22)
# Keys seen before or after the own position
LIMIT = st.just(tiling.NO_LIMIT) | st.integers(0, 30)
BESIDE = st.tuples(st.just(tiling.NO_LIMIT) | st.integers(0, 300), st.just(tiling.NO_LIMIT) | st.integers(0, 300))


def sequence_of(q_len: int, kv_len: int, left: int, right: int) -> np.ndarray:
    sequence = np.zeros(tiling.SEQUENCE_COLUMNS, np.int64)
    sequence[[tiling.Q_LEN, tiling.KV_LEN, tiling.LEFT, tiling.RIGHT]] = q_len, kv_len, left, right
    return sequence


@given(q_pos=POSITIONS, behind=POSITIONS, slope=st.floats(0, 4, width=32))
def test_generated_biases(q_pos: int, behind: int, slope: float) -> None:
    kv_pos = max(0, q_pos - behind)
    p, j, m = np.int32(q_pos), np.int32(kv_pos), F32(slope)
    assert masks.linear_bias(m, p, j) == F32(slope) * F32(kv_pos - q_pos)
    assert masks.sqrt_bias(m, p, j) == pytest.approx(-slope * math.sqrt(q_pos - kv_pos), rel=2e-7)
    whole = float(masks.left_align_bias(m, p, j)) + float(masks.left_align_shift(m, p))
    assert whole == pytest.approx(slope * kv_pos, rel=2e-7, abs=2e-7 * slope * q_pos)


@given(q_pos=st.integers(0, 5000), behind=st.integers(0, 5000))
def test_template_place(q_pos: int, behind: int) -> None:
    """The row and the shift of the compressed template, from the table in tests/contract.md."""
    kv_pos = max(0, q_pos - behind)
    m, r, n = q_pos // 128, q_pos % 128, kv_pos // 128
    assert masks.template_row(np.int32(q_pos), np.int32(kv_pos)) == (r if n == m else 128 + r)
    assert masks.template_shift(np.int32(q_pos), np.int32(kv_pos)) == (0 if n == m else 128 * (m - n - 1))
    assert masks.heads_mask_row(np.int32(q_pos), np.int32(kv_pos)) == q_pos - 128 * n


@given(
    q_len=st.integers(1, 12),
    prefix=st.integers(0, 12),
    left=LIMIT,
    right=LIMIT,
    rows=st.data(),
    tile=st.integers(0, 30),
)
def test_visible_range(q_len: int, prefix: int, left: int, right: int, rows: st.DataObject, tile: int) -> None:
    """The four ends against every row and key: what is never touched nobody sees, what is full
    everybody sees."""
    kv_len = prefix + q_len
    sequence = sequence_of(q_len, kv_len, left, right)
    first = rows.draw(st.integers(0, q_len - 1))
    last = rows.draw(st.integers(first, q_len - 1))
    kv_pos = np.arange(kv_len)
    seen = np.array([(kv_pos >= p - left) & (kv_pos <= p + right) for p in range(prefix + first, prefix + last + 1)])
    begin, full_begin, full_end, end = tiling.visible_range(sequence, prefix + first, prefix + last)
    np.testing.assert_array_equal(seen.any(axis=0), (kv_pos >= begin) & (kv_pos < end))
    np.testing.assert_array_equal(seen.all(axis=0), (kv_pos >= full_begin) & (kv_pos < full_end))
    own = [(tiling.visible_begin(sequence, p), tiling.visible_end(sequence, p)) for p in range(kv_len - q_len, kv_len)]
    for (row_begin, row_end), row in zip(own[first : last + 1], seen, strict=True):
        np.testing.assert_array_equal(row, masks.is_visible(kv_pos, row_begin, row_end))
    at, count = min(tile, kv_len - 1), min(4, kv_len - min(tile, kv_len - 1))
    inner, stop = tiling.keys_between(begin, end, at, count)
    keys = kv_pos[at : at + count]
    assert keys[inner:stop].tolist() == keys[seen[:, keys].any(axis=0)].tolist()
    assert tiling.is_edge(full_begin, full_end, at, count) == (not seen[:, keys].all())


@given(st.lists(st.floats(-1e5, 1e5, width=32) | st.just(-math.inf), min_size=1, max_size=30), st.integers(1, 7))
def test_running_softmax(scores: list[float], tile: int) -> None:
    """Tile by tile and merged, against all at once in float64; rows of -inf give 0 and -inf."""
    m_i, l_i, acc = F32(-np.inf), F32(0), F32(0)
    values = np.arange(len(scores), dtype=F32)
    unit, unit_log2 = F32(1), softmax.LOG2_E
    with np.errstate(all="ignore"):
        for start in range(0, len(scores), tile):
            s = np.array(scores[start : start + tile], F32)
            new = m_i
            for score in s:
                new = softmax.running_max(new, score)
            shift = softmax.shift_of(new)
            alpha = softmax.rescale(m_i, shift, unit_log2)
            p = softmax.exp_score(s, shift, unit_log2)
            l_i, acc, m_i = l_i * alpha + p.sum(), acc * alpha + p @ values[start : start + tile], new
        out, lse = softmax.normalize(acc, l_i), softmax.log_sum_exp(m_i, l_i, unit)
    exact = np.array(scores, np.float64)
    if np.isneginf(exact).all():
        assert (out, lse) == (0, -np.inf)
        return
    weights = np.exp(exact - exact.max())
    assert lse == pytest.approx(exact.max() + math.log(weights.sum()), rel=1e-6, abs=1e-5)
    assert out == pytest.approx(weights @ values / weights.sum(), rel=1e-5, abs=1e-5)


def test_vocabulary() -> None:
    """maximum keeps its first argument beside a NaN, where never lets the other value in,
    exp2_scaled is 0 far down."""
    assert maximum(F32(1), F32("nan")) == 1
    assert where(np.array([True, False]), F32(1), F32("nan"))[0] == 1
    assert exp2_scaled(F32(-np.inf), F32(0.5)) == 0
    assert exp2_scaled(F32(-254), F32(0.5)) == 0
    assert exp2_scaled(F32(6), F32(0.5)) == 8
    assert np.isnan(exp2_scaled(F32("nan"), F32(0.5)))
    assert log2(F32(8)) == 3


SEQUENCES = st.lists(
    st.tuples(st.integers(0, 300), st.integers(0, 9000)).map(lambda x: (x[0], x[0] + x[1])), min_size=0, max_size=6
)


def held_positions(kv_len: int, held: np.ndarray | None, block_size: int) -> np.ndarray:
    pos = np.arange(kv_len)
    return pos if held is None else pos[held[pos // block_size]]


def table_of(lengths: list[tuple[int, int]], block_m: int = 128) -> np.ndarray:
    sequences = np.zeros((len(lengths), tiling.SEQUENCE_COLUMNS), np.int64)
    for b, (q_len, kv_len) in enumerate(lengths):
        sequences[b, tiling.Q_LEN], sequences[b, tiling.KV_LEN], sequences[b, tiling.TILE_ROWS] = q_len, kv_len, block_m
    return sequences


@st.composite
def held(draw: st.DrawFn) -> tuple[list[tuple[int, int]], np.ndarray | None, int]:
    """Lengths of sequences, which of their blocks are held (None: all), and the block size."""
    lengths = draw(SEQUENCES)
    block_size = draw(st.sampled_from([1, 3, 16, 48, 128, 1000]))
    width = max((-(-kv // block_size) for _, kv in lengths), default=0) + draw(st.integers(0, 2))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    share = rng.choice([0.0, 0.1, 0.5, 0.9, 1.0], (len(lengths), 1))
    blocks = rng.random((len(lengths), width)) < share
    return lengths, draw(st.sampled_from([None, blocks])), block_size


@given(held(), st.sampled_from([32, 64, 128]))
def test_runs_walk_the_held_keys(problem: tuple[list[tuple[int, int]], np.ndarray | None, int], block_n: int) -> None:
    """From any key on, in blocks of consecutive positions, each held key once and in order; counts
    and ends agree."""
    lengths, blocks, block_size = problem
    sequences = table_of(lengths)
    runs, num_held = add_runs(sequences, sequences[:, tiling.KV_LEN], blocks, block_size)
    for b, (_, kv_len) in enumerate(lengths):
        expected = held_positions(kv_len, None if blocks is None else blocks[b], block_size)
        assert num_held[b] == len(expected)
        first, n_end = len(expected) // 3, len(expected) - len(expected) // 4
        kv_idx, walked = first, []
        while kv_idx < n_end:
            kv_pos, count = tiling.key_tile(runs, sequences[b], kv_idx, n_end, block_n)
            assert 1 <= count <= block_n
            walked += range(kv_pos, kv_pos + count)
            kv_idx += count
        assert walked == expected[first:n_end].tolist()
        for pos in {0, kv_len // 2, kv_len, *expected[:: max(1, len(expected) // 5)].tolist()}:
            before = int(np.searchsorted(expected, pos))
            assert tiling.num_held_before(runs, sequences[b], pos) == before
            up_to = int(np.searchsorted(expected, pos, side="right"))
            last = tiling.last_held(runs, sequences[b], pos)
            assert last == expected[up_to - 1] if up_to else last <= pos


TILES = st.sampled_from([(128, 128), (128, 64), (64, 64), (64, 32), (16, 128)])  # block_m, block_n


@given(held(), st.integers(1, 9), st.integers(1, 5), st.integers(1, 256), BESIDE, TILES)
def test_work_list_covers_every_pair_once(
    problem: tuple[list[tuple[int, int]], np.ndarray | None, int],
    group_size: int,
    kv_heads: int,
    head_size: int,
    beside: tuple[int, int],
    tile: tuple[int, int],
) -> None:
    """Entries tile (row, held key) space without a gap or an overlap, costliest bucket first, with
    room for every split; a tile that sees nothing has one entry all the same."""
    lengths, blocks, block_size = problem
    block_m, _ = tile
    sequences = table_of(lengths, block_m)
    runs, _ = add_runs(sequences, sequences[:, tiling.KV_LEN], blocks, block_size)
    totals = np.zeros(3 + tiling.COST_BUCKETS, np.int64)
    sequences[:, tiling.LEFT], sequences[:, tiling.RIGHT] = beside
    nothing = np.empty((0, tiling.WORK_COLUMNS), np.int64)
    tiling.cut_tiles(sequences, runs, group_size, kv_heads, head_size, *tile, totals, nothing)
    entries, split_tiles, partial_f32 = totals[:3].tolist()
    work = np.full((entries, tiling.WORK_COLUMNS), -1, np.int64)
    if entries:
        tiling.cut_tiles(sequences, runs, group_size, kv_heads, head_size, *tile, totals, work)
    covered: dict[tuple[int, int], list[tuple[int, int]]] = {}
    costs, partials = [], set()
    for entry in work.tolist():
        b, m_block, split_idx, num_splits, n_begin, n_end, split_tile, offset = entry
        rows = tiling.rows_in_tile(lengths[b][0], group_size, m_block, block_m)
        covered.setdefault((b, m_block), []).append((n_begin, n_end))
        costs.append(tiling.cost_bucket(rows, n_end - n_begin))
        assert 0 <= split_idx < num_splits
        if num_splits > 1:
            assert not tiling.is_never_split(lengths[b][0] * group_size, lengths[b][1], block_m)
            assert split_tile < split_tiles
            end = offset + num_splits * kv_heads * tiling.partial_floats(rows, head_size)
            assert end <= partial_f32 * kv_heads
            partials.add((offset, end))
    assert costs == sorted(costs, reverse=True)
    ends = sorted(partials)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends))
    for (b, m_block), ranges in covered.items():
        q_len, kv_len = lengths[b]
        first_row, last_row = m_block * block_m, min(q_len * group_size, (m_block + 1) * block_m) - 1
        begin = kv_len - q_len + first_row // group_size - beside[0]
        end = kv_len - q_len + last_row // group_size + beside[1] + 1
        edges = sorted(ranges)
        pos = held_positions(kv_len, None if blocks is None else blocks[b], block_size)
        assert edges[0][0] == np.count_nonzero(pos < begin)
        assert edges[-1][1] == np.count_nonzero(pos < min(end, kv_len))
        assert all(a[1] == b[0] for a, b in itertools.pairwise(edges))
    expected = {(b, m) for b, (q, _) in enumerate(lengths) for m in range(-(-q * group_size // block_m))}
    assert set(covered) == expected
