"""What each argument means, on inputs whose answer is known without an oracle."""

from __future__ import annotations

import numpy as np
import pytest
from cases import DTYPES, assert_near, assert_value, make_case, outweighed_infinity, run, to_numpy, with_mask


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["none", "causal", "alibi-generator", "alibi_sqrt-template", "alibi-heads"])
@pytest.mark.parametrize("head_size", [1, 16, 41, 256])
def test_identity(target: str, dtype: str, form: str, head_size: int) -> None:
    """One visible key: the output is its value, bit for bit, whatever the score and the bias."""
    case = with_mask(make_case([1, 1, 1], [1, 1, 1], head_num=4, kv_head_num=2, head_size=head_size, dtype=dtype), form)
    out = to_numpy(run(case, target)).astype(np.float64)
    np.testing.assert_array_equal(out, np.repeat(np.concatenate(case.values), 2, axis=1).astype(np.float64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [np.nan, 60000.0, np.inf])
def test_uniform_causal(target: str, dtype: str, poison: float) -> None:
    """Query 0: row p is the mean of V[0..p], so V[j] = j gives p / 2; three sequences with prefixes
    0, 1 and 199."""
    case = make_case(
        [33, 20, 4], [33, 21, 203], head_num=2, dtype=dtype, query=0.0, value=lambda b, j, h, c: j, poison=poison
    )
    assert_value(run(case, target), np.broadcast_to(case.q_pos[:, None, None] / 2, case.query.shape))


@pytest.mark.parametrize("dtype", DTYPES)
def test_uniform_none(target: str, dtype: str) -> None:
    """Mask kind NONE: every key of the sequence counts for every row, those after it as well."""
    case = make_case([5, 40], [5, 129], dtype=dtype, query=0.0, value=lambda b, j, h, c: j, mask_type="none")
    expected = np.repeat([2.0, 64.0], [5, 40])[:, None, None]
    assert_value(run(case, target), np.broadcast_to(expected, case.query.shape))


def _code(numbers: np.ndarray) -> np.ndarray:
    """Sixteen signs that name a number; different numbers differ in one sign at least."""
    return 1.0 - 2.0 * (numbers[..., None] >> np.arange(16) & 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 3, 16, 128, 300])
@pytest.mark.parametrize("mask_type", ["causal", "none"])
def test_index_v(target: str, dtype: str, block_size: int, mask_type: str) -> None:
    """A row whose query names one key reads that key's value and no other: every key, in shuffled
    pages."""
    rng = np.random.default_rng(5)
    position = np.arange(100, 400)
    wanted = np.array([rng.integers(0, p + 1) for p in position]) if mask_type == "causal" else np.arange(300) + 100
    wanted[[0, 1, 2]] = position[0], 0, 99

    def key(b: int, j: np.ndarray, h: np.ndarray, c: np.ndarray) -> np.ndarray:
        return _code(j[:, 0, 0])[:, None, :]

    def value(b: int, j: np.ndarray, h: np.ndarray, c: np.ndarray) -> np.ndarray:
        return np.where(c == 0, j % 128, np.where(c == 1, j // 128, c))

    query = 64.0 * _code(wanted)[:, None, :]  # the wanted key leads by exp(128) at least
    case = make_case(
        [300],
        [400],
        dtype=dtype,
        block_size=block_size,
        query=query,
        key=key,
        value=value,
        qk_scale=1.0,
        mask_type=mask_type,
    )
    columns = np.arange(16)
    expected = np.where(columns == 0, wanted[:, None] % 128, np.where(columns == 1, wanted[:, None] // 128, columns))
    assert_value(run(case, target), expected[:, None, :])


@pytest.mark.parametrize(
    "heads", [(8, 8), (8, 4), (28, 4), (12, 1), (3, 1), (6, 2), (14, 2), (16, 1), (64, 2)], ids=str
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gqa_mapping(target: str, heads: tuple[int, int], dtype: str) -> None:
    """Query head h reads kv head h // (head_num // kv_head_num)."""
    head_num, kv_head_num = heads
    case = make_case(
        [3, 1],
        [3, 18],
        head_num=head_num,
        kv_head_num=kv_head_num,
        dtype=dtype,
        query=0.0,
        value=lambda b, j, h, c: h + 1,
    )
    expected = 1 + np.arange(head_num) // (head_num // kv_head_num)
    assert_value(run(case, target), np.broadcast_to(expected[None, :, None], case.query.shape))


@pytest.mark.parametrize("head_size", [1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 48, 64, 80, 96, 112, 120, 128, 136, 192, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_column(target: str, head_size: int, dtype: str) -> None:
    """V[:, c] = c: each column of the output is its own, for any head size."""
    case = make_case(
        [9, 2], [9, 30], head_num=2, head_size=head_size, dtype=dtype, query=0.0, value=lambda b, j, h, c: c
    )
    assert_value(run(case, target), np.broadcast_to(np.arange(head_size), case.query.shape))


def test_scale_multiplies_the_product(target: str) -> None:
    """qk_scale * (q . k): 16 equal products of 0.25 and scale 0.5 give a score of 2 against 0."""
    case = make_case(
        [1],
        [2],
        query=0.5,
        key=lambda b, j, h, c: 0.5 * (j == 1),
        value=lambda b, j, h, c: j,
        qk_scale=0.5,
    )
    out, lse = run(case, target, return_lse=True)
    assert_near(out, np.exp(2) / (1 + np.exp(2)))
    assert_near(lse, np.log(1 + np.exp(2)))
    assert_near(run(case, target, qk_scale=-0.5), np.exp(-2) / (1 + np.exp(-2)))


def test_scale_leaves_the_bias_alone(target: str) -> None:
    """Scale 0 keeps the bias: two keys, distances 1 and 0, slope 0.5."""
    case = make_case([1], [2], value=lambda b, j, h, c: j, qk_scale=0.0, mask_type="alibi", slopes=np.float32([0.5]))
    assert_near(run(case, target), 1 / (1 + np.exp(-0.5)))


def test_scale_zero_is_uniform(target: str) -> None:
    case = make_case([4], [9], value=lambda b, j, h, c: j, qk_scale=0.0)
    assert_value(run(case, target), np.broadcast_to(case.q_pos[:, None, None] / 2, case.query.shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["causal", "none"])
def test_lse_counts_the_visible(target: str, dtype: str, form: str) -> None:
    """Query 0: lse is the natural logarithm of the number of visible keys, one float32 per row and
    query head."""
    case = make_case([5, 1], [5, 300], head_num=6, kv_head_num=2, dtype=dtype, query=0.0, mask_type=form)
    _, lse = run(case, target, return_lse=True)
    visible = case.q_pos + 1 if form == "causal" else np.repeat([5, 300], [5, 1])
    assert lse.shape == (6, 6)
    assert lse.dtype == np.float32
    assert_near(lse, np.repeat(np.log(visible)[:, None], 6, axis=1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_lse_is_the_score_of_one_key(target: str, dtype: str) -> None:
    """One visible key: lse is its score, here 16 * 0.5 * 3 * 0.25 = 6, less slope * distance 0."""
    case = make_case([1], [1], dtype=dtype, query=0.5, key=3.0, qk_scale=0.25)
    assert_near(run(case, target, return_lse=True)[1], 6.0)
    mask = np.full((1, 1, 128), -1.5, np.float32)
    assert_near(run(case, target, return_lse=True, mask_type="alibi", mask=mask)[1], 4.5)


def test_batches_are_packed_back_to_back(target: str) -> None:
    """Row by row: sequence b's rows follow those of b - 1 and read b's own pages."""
    case = make_case([2, 3, 1], [2, 40, 17], query=0.0, value=lambda b, j, h, c: b + 1)
    expected = np.repeat([1.0, 2.0, 3.0], [2, 3, 1])[:, None, None]
    assert_value(run(case, target), np.broadcast_to(expected, case.query.shape))


def test_queries_stand_at_the_end(target: str) -> None:
    """seq_len query rows are the last of kv_seq_len positions, not the first."""
    case = make_case([2], [6], query=0.0, value=lambda b, j, h, c: j)
    assert_value(run(case, target)[:, 0, 0], [2.0, 2.5])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("infinite, leading", [(100, 2000), (2058, 5)])
def test_infinity_reaches_who_sees_it(target: str, dtype: str, infinite: int, leading: int) -> None:
    """As an infinity, or as NaN where its weight or its split's factor is 0: in exactly the rows
    that see it."""
    case = outweighed_infinity(infinite, leading, dtype)
    out = to_numpy(run(case, target)).astype(np.float64)[:, 0]
    np.testing.assert_array_equal(np.isfinite(out[:, 3]), case.q_pos < infinite)
    assert_value(np.delete(out, 3, axis=1), 1.0)
