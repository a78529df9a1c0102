"""Section 5 of tests/contract.md: the edge cases that have a result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import (
    DTYPES,
    MASK_FORMS,
    Case,
    assert_near,
    assert_value,
    check,
    make_case,
    repaged,
    run,
    same_bits,
    select,
    to_numpy,
    with_mask,
)

KV_LENGTHS = [1, 5, 15, 16, 17, 31, 33, 63, 127, 128, 129, 257]


def test_edge_zero_length_sequence(target: str) -> None:
    """seq_len[b] == 0: no rows, whatever its kv_seq_len and table row; the others as if it were not
    there."""
    case = make_case([0, 3, 0, 5, 0], [0, 20, 33, 5, 1], head_num=2, dtype="float16")
    case.block_tables[[0, 2, 4]] = -7
    same_bits(check(case, target), run(select(case, [1, 3]), target))


def test_edge_zero_length_sequence_of_any_context(target: str) -> None:
    """kv_seq_len may be anything >= 0 where no query reads it."""
    case = make_case([0, 3], [0, 9])
    same_bits(run(case, target, kv_seq_len=(2**62, 9)), run(case, target))


@pytest.mark.parametrize("kv", [[0, 0], [5, 100]])
def test_edge_all_zero_lengths(target: str, kv: list[int]) -> None:
    """All seq_len 0: empty output, no error."""
    case = make_case([0, 0], kv, head_num=3)
    out, lse = run(case, target, return_lse=True)
    assert out.shape == (0, 3, 16) and lse.shape == (0, 3)


def test_edge_empty_batch(target: str) -> None:
    """Batch 0: empty output, no error."""
    case = make_case([], [], head_num=3)
    out, lse = run(case, target, return_lse=True)
    assert out.shape == (0, 3, 16) and lse.shape == (0, 3)
    flat = run(case, target, query=np.zeros((0, 48), np.float32), head_num=3)
    assert flat.shape == (0, 48)


def test_edge_no_blocks(target: str) -> None:
    """A cache without a block and a table without a column are fine while nobody reads them."""
    case = make_case([0], [0], spare=0, tail=0)
    assert case.key.shape[0] == 0 and case.block_tables.shape == (1, 0)
    assert run(case, target).shape == (0, 1, 16)


@pytest.mark.parametrize("junk", [-1, -(2**31), 2**31 - 1, 3])
@pytest.mark.parametrize("extra", [0, 1, 40])
def test_edge_table_tail(target: str, junk: int, extra: int) -> None:
    """Table entries past ceil(kv_seq_len / block_size) are never read."""
    case = make_case([3, 1], [20, 64], tail=0, dtype="float16")
    tables = np.full((2, case.block_tables.shape[1] + extra), junk, np.int32)
    tables[0, :2], tables[1, :4] = case.block_tables[0, :2], case.block_tables[1]
    same_bits(run(case, target, block_tables=tables), run(case, target))


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 60000.0])
@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_edge_unaddressed_slots(target: str, poison: float, block_size: int, dtype: str) -> None:
    """Cache slots past kv_seq_len, and pages nobody names, never influence the result."""
    case = make_case([1] * len(KV_LENGTHS), KV_LENGTHS, head_num=2, dtype=dtype, block_size=block_size, poison=0.0)
    expected = check(case, target)
    same_bits(run(repaged(case, seed=8, poison=poison), target), expected)


def nan_at(case: Case, position: int, bad: float, which: str) -> Case:
    """Put `bad` into one column of one key or value of kv head 0 of sequence 0."""
    page, slot = divmod(position, case.key.shape[1])
    arrays = {name: getattr(case, name).copy() for name in ("key", "value")}
    logical = {name: [x.copy() for x in getattr(case, name)] for name in ("keys", "values")}
    arrays[which][case.block_tables[0, page], slot, 0, 2] = bad
    logical[f"{which}s"][0][position, 0, 2] = bad
    return replace(case, **arrays, keys=tuple(logical["keys"]), values=tuple(logical["values"]))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("form", ["causal", "alibi_sqrt-generator", "alibi-template", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_edge_nan_reaches_who_sees_it(target: str, bad: float, which: str, form: str, dtype: str) -> None:
    """NaN or infinity in a key or value: rows before it keep their bits, rows that see it show
    it."""
    case = with_mask(make_case([70, 3], [90, 9], head_num=4, kv_head_num=2, dtype=dtype), form)
    clean, (out, lse) = to_numpy(run(case, target)), run(nan_at(case, 55, bad, which), target, return_lse=True)
    sees = np.zeros((73, 4, 16), bool)
    sees[: 70 if form == "none" else 0, :2] = True
    sees[35:70, :2] = True  # row 35 stands at position 55; kv head 0 serves heads 0 and 1
    if which == "value":
        sees[..., :2] = sees[..., 3:] = False
    np.testing.assert_array_equal(out[~sees], clean[~sees])
    if which == "value":
        expected = np.full(sees.sum(), bad)
        np.testing.assert_array_equal(out[sees].astype(np.float64), expected)
        assert np.isfinite(lse).all()
    elif np.isnan(bad):
        assert np.isnan(out[sees].astype(np.float64)).all() and np.isnan(lse[sees[:, :, 0]]).all()
    else:
        # The sign of q decides: a score of -inf drops the key, +inf makes the row NaN (inf - inf).
        up = np.broadcast_to((case.query[..., 2:3].astype(float) * bad > 0), out.shape)
        assert np.isnan(out[sees & up].astype(np.float64)).all()
        assert np.isfinite(out[sees & ~up].astype(np.float64)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_edge_nan_query_row(target: str, dtype: str) -> None:
    """A NaN in one query row and head stays in that row and head."""
    case = make_case([40], [60], head_num=4, kv_head_num=2, dtype=dtype)
    query = case.query.copy()
    query[7, 1, 3] = np.nan
    clean, out = to_numpy(run(case, target)), to_numpy(run(case, target, query=query))
    assert np.isnan(out[7, 1].astype(np.float64)).all()
    out = out.copy()
    out[7, 1] = clean[7, 1]
    np.testing.assert_array_equal(out, clean)


@pytest.mark.parametrize("form", ["alibi-heads", "alibi-template", "alibi_left_align-template"])
def test_edge_row_of_minus_infinity(target: str, form: str) -> None:
    """A row whose visible scores are all -inf: out 0, lse -inf; the other rows are not touched by
    it."""
    case = with_mask(make_case([40], [40], head_num=2), form)
    assert case.mask is not None
    mask = case.mask.copy()
    if mask.ndim == 3:
        mask[1, 9] = -np.inf
        rows = (np.array([9]), 1)
        slopes = None
    else:
        mask[9] = -np.inf
        rows, slopes = (np.array([9]), slice(None)), np.ones(2, np.float32)
    case = replace(case, slopes=slopes)
    (before, lse_before), (out, lse) = (run(replace(case, mask=m), target, return_lse=True) for m in (case.mask, mask))
    np.testing.assert_array_equal(out[rows], 0.0)
    np.testing.assert_array_equal(lse[rows], -np.inf)
    keep = np.ones((40, 2), bool)
    keep[rows] = False
    np.testing.assert_array_equal(out[keep], before[keep])
    np.testing.assert_array_equal(lse[keep], lse_before[keep])


@pytest.mark.parametrize("dtype", DTYPES)
def test_edge_minus_infinity_up_to_a_key(target: str, dtype: str) -> None:
    """-inf over the first 100 keys, more than any tile at the start of a row: the rest decides."""
    case = make_case([3], [140], query=0.0, value=lambda b, j, h, c: j, dtype=dtype, mask_type="alibi")
    mask = np.zeros((1, 140, 128), np.float32)
    mask[0, 128:, :100] = -np.inf
    case = replace(case, mask=mask)
    # The keys 128, 129, ... of the second template block read rows p - 128, which hold zeros.
    expected = [np.arange(100, p + 1).mean() for p in (137, 138, 139)]
    assert_value(run(case, target)[:, 0, 0], expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("low", [-1e5, -5e5, -2e38])
def test_edge_huge_scores(target: str, dtype: str, low: float) -> None:
    """One visible key at -5e5 (row 0) wins over every masked one; the row after it sees a better
    key."""
    query = np.zeros((2, 1, 16))
    query[:, :, 0] = 128.0
    case = make_case(
        [2],
        [2],
        dtype=dtype,
        query=query,
        key=lambda b, j, h, c: 1.0 * (c == 0) * np.where(j == 0, 1, -1),
        value=lambda b, j, h, c: np.where(j == 0, 1, 100),
        qk_scale=low / 128,
    )
    assert_value(run(case, target)[:, 0, 0], [1.0, 100.0])
    lse = run(case, target, return_lse=True)[1]
    assert_near(lse[:, 0], [low, -low])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e5, -1e5])
def test_edge_huge_equal_scores(target: str, dtype: str, size: float) -> None:
    """Equal scores of +-1e5 are uniform weights."""
    case = make_case(
        [5], [40], dtype=dtype, query=1.0, key=1.0, value=lambda b, j, h, c: j, qk_scale=size / 16, block_size=8
    )
    assert_value(run(case, target), np.broadcast_to(case.q_pos[:, None, None] / 2, case.query.shape))


@pytest.mark.parametrize("form", MASK_FORMS)
def test_edge_read_only_inputs(target: str, form: str) -> None:
    """Read-only inputs are fine, and inputs are never written."""
    case = with_mask(make_case([3, 20], [20, 21], head_num=4, kv_head_num=2, dtype="float16"), form)
    expected = run(case, target)
    arrays = [x for x in case.arguments().values() if isinstance(x, np.ndarray)]
    before = [x.tobytes() for x in arrays]
    for array in arrays:
        array.flags.writeable = False
    same_bits(run(case, target), expected)
    assert [x.tobytes() for x in arrays] == before


def strided(array: np.ndarray, how: str) -> np.ndarray:
    """The same numbers with other strides."""
    if how == "fortran":
        return np.asfortranarray(array)
    if how == "reversed":
        return array[tuple([slice(None, None, -1)] * array.ndim)].copy()[tuple([slice(None, None, -1)] * array.ndim)]
    if how == "misaligned":
        raw = np.zeros(array.nbytes + 1, np.uint8)
        view = raw[1:].view(array.dtype).reshape(array.shape)
        view[...] = array
        return view
    axis = int(how)
    shape = list(array.shape)
    shape[axis] = shape[axis] * 2 + 1
    wide = np.full(shape, 77, array.dtype)
    view = wide[tuple(slice(1, None, 2) if a == axis else slice(None) for a in range(array.ndim))]
    view[...] = array
    return view


AXES = {"query": 3, "key": 4, "value": 4, "block_tables": 2, "mask": 2, "heads_mask": 3, "slopes": 1}


@pytest.mark.parametrize(
    ("name", "how"),
    [(name, how) for name, axes in AXES.items() for how in (*"0123"[:axes], "fortran", "reversed", "misaligned")],
)
def test_edge_strides(target: str, name: str, how: str) -> None:
    """Any strides of any argument: the bits of the contiguous call."""
    form = "alibi-heads" if name == "heads_mask" else "alibi-template"
    name = name.removeprefix("heads_")
    case = with_mask(make_case([3, 20], [20, 21], head_num=4, kv_head_num=2, dtype="float16"), form)
    case = replace(case, slopes=np.float32([0.5, -0.25, 0.125, 1.0]))
    view = strided(getattr(case, name), how)
    np.testing.assert_array_equal(np.asarray(view, float), np.asarray(getattr(case, name), float))
    same_bits(run(case, target, **{name: view}), run(case, target))


@pytest.mark.parametrize("flat", ["query", "key", "value"])
def test_edge_strides_merged_heads(target: str, flat: str) -> None:
    """The merged forms as slices of a wider buffer: query out of a fused projection, a cache out of
    a fused pool."""
    case = make_case([3, 20], [20, 21], head_num=4, kv_head_num=2, dtype="float16")
    array = getattr(case, flat)
    merged = array.reshape(*array.shape[:-2], -1)
    wide = np.full((*merged.shape[:-1], merged.shape[-1] * 3), np.nan, np.float16)
    wide[..., merged.shape[-1] : 2 * merged.shape[-1]] = merged
    view = wide[..., merged.shape[-1] : 2 * merged.shape[-1]]
    given: dict[str, Any] = {flat: view, "head_num": 4, "kv_head_num": 2}
    out = run(case, target, **given)
    same_bits(out.reshape(case.query.shape), run(case, target))


def test_edge_shared_pages(target: str) -> None:
    """Two sequences on one prefix page, a third on exactly the pages of the first."""
    case = make_case([2, 2, 2], [18, 18, 18], head_num=2)
    tables = case.block_tables.copy()
    tables[1, 0] = tables[0, 0]
    tables[2, :2] = tables[0, :2]
    values = [np.concatenate([case.values[0][:16], case.values[1][16:]]), case.values[0]]
    keys = [np.concatenate([case.keys[0][:16], case.keys[1][16:]]), case.keys[0]]
    case = replace(
        case, block_tables=tables, keys=(case.keys[0], *keys), values=(case.values[0], *values), query=case.query.copy()
    )
    case.query[4:] = case.query[:2]
    out = check(case, target)
    same_bits(out[4:], out[:2])


@pytest.mark.parametrize("form", MASK_FORMS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_edge_bits_do_not_depend(kernel: str, form: str, dtype: str) -> None:
    """Threads, batch mates, the order of the batch and the order of the pages change no bit."""
    lengths = [(1, 700), (33, 40), (0, 9), (130, 130), (5, 2100), (1, 1), (64, 200)]
    case = make_case(*zip(*lengths, strict=True), head_num=4, kv_head_num=2, dtype=dtype, block_size=48)
    case = with_mask(case, form)
    out, lse = run(case, kernel, return_lse=True)
    for threads in (1, 2, 5):
        again = run(case, kernel, return_lse=True, num_threads=threads)
        same_bits(again[0], out)
        same_bits(again[1], lse)
    same_bits(run(repaged(case, seed=4), kernel), out)
    backwards = run(select(case, range(len(lengths))[::-1]), kernel)
    same_bits(np.concatenate([case.rows(out, b) for b in range(len(lengths))[::-1]]), backwards)
    for b in range(len(lengths)):
        same_bits(run(select(case, [b]), kernel), case.rows(out, b))
