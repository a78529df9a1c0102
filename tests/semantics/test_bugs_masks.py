"""Public bug reports of this field as cases, D01 to D15 of bugs.md: masks, softmax, lengths,
heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import (
    ALIBI,
    DTYPES,
    Case,
    assert_close,
    assert_near,
    assert_value,
    check,
    chunk,
    distance_template,
    make_case,
    naming,
    repaged,
    run,
    same_bits,
    select,
    with_mask,
)

import numba_prefix as nbp


@pytest.mark.parametrize(
    ("q", "kv", "bad"),
    [([4], [2], 0), ([2, 4, 2], [5, 2, 5], 1), ([200, 10], [100, 300], 0), ([1, 1, 3], [1, 1, 0], 2)],
)
def test_d01_row_without_a_visible_key(target: str, q: list[int], kv: list[int], bad: int) -> None:
    """flash-attention#1778, pytorch#103749: q longer than kv is refused per sequence, not over the
    maxima."""
    case = make_case(q, kv, query=0.0, value=lambda b, j, h, c: 1 + j, block_size=16)
    with pytest.raises(ValueError, match=naming("kv_seq_len", bad, kv[bad], q[bad])):
        run(case, target)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("form", ["causal", "alibi", "alibi_sqrt", "alibi-template", "alibi_sqrt-template"])
def test_d02_low_score_against_a_sentinel(target: str, dtype: str, form: str) -> None:
    """lattice#361: row 0 scores -20000 on its only key; no masked key may win."""
    kind, _, how = form.partition("-")
    case = make_case(
        [2],
        [2],
        dtype=dtype,
        query=np.array([-100.0, 0.0])[:, None, None],
        key=lambda b, j, h, c: np.where(j == 0, 12.5, 0.0),
        value=lambda b, j, h, c: np.where(j == 0, 1, 100),
        qk_scale=1.0,
        mask_type=kind,
        slopes=None if kind == "causal" else np.zeros(1, np.float32),
        mask=distance_template(kind) if how else None,
    )
    out, lse = run(case, target, return_lse=True)
    assert_value(out[:, 0, 0], [1.0, 50.5])
    assert_near(lse[:, 0], [-20000.0, np.log(2)])


@pytest.mark.parametrize("poison", [np.nan, np.inf, 60000.0])
@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("kv", [1, 5, 15, 16, 17, 31, 33, 127, 128, 129])
def test_d03_unused_slots_of_the_last_page(target: str, kv: int, block_size: int, poison: float) -> None:
    """vllm#641, pytorch#101967: zero weight times NaN must not happen."""
    case = make_case(
        [kv], [kv], query=0.0, value=lambda b, j, h, c: j, block_size=block_size, poison=poison, dtype="float16"
    )
    assert_value(run(case, target)[:, 0, 0], case.q_pos / 2)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_d03_nan_in_the_future(target: str, bad: float, dtype: str) -> None:
    """Causal row p stays finite although key p + 1 is NaN."""

    def fill(b: int, j: np.ndarray, h: np.ndarray, c: np.ndarray) -> np.ndarray:
        return np.where(j > 20, bad, j)

    case = make_case([40], [40], dtype=dtype, query=1 / 64, key=fill, value=fill, qk_scale=0.0)
    out = run(case, target)[:, 0, 0].astype(float)
    np.testing.assert_array_equal(out[:21], np.arange(21) / 2)
    assert np.isnan(out[21:]).all()


def test_d04_zero_length_sequences(target: str) -> None:
    """flash-attention#1537, #2562: the bits of the batch without the empty sequences, 9 heads on
    3."""
    shape: dict[str, Any] = {"head_num": 9, "kv_head_num": 3, "head_size": 64, "query": 0.0}
    for q, kv in (([0, 1, 0, 1], [0, 3, 0, 5]), ([0, 150], [100, 150]), ([2, 0], [3, 90])):
        case = make_case(q, kv, value=lambda b, j, h, c: j, **shape)
        out = run(case, target)
        assert_value(out, np.broadcast_to(case.q_pos[:, None, None] / 2, case.query.shape))
        same_bits(out, run(select(case, [b for b, n in enumerate(q) if n]), target))


def test_d05_mixed_batch(target: str) -> None:
    """vllm PR#7018: some sequences have a cached prefix, some none."""
    case = make_case([4, 20, 1], [132, 20, 129], head_num=4, kv_head_num=2, dtype="bfloat16", block_size=32)
    out = check(case, target)
    for b in range(3):
        same_bits(run(select(case, [b]), target), case.rows(out, b))


def test_d05_shared_prefix_page(target: str) -> None:
    """One page used by two rows gives equal results for equal queries."""
    case = make_case([1, 1], [16, 16], dtype="bfloat16")
    case.query[1] = case.query[0]
    tables = case.block_tables.copy()
    tables[1, 0] = tables[0, 0]
    out = run(case, target, block_tables=tables)
    same_bits(out[0], out[1])
    same_bits(out[:1], run(select(case, [0]), target))


@pytest.mark.parametrize("dtype", DTYPES)
def test_d06_batched_differs_from_alone(kernel: str, dtype: str) -> None:
    """vllm#27034, onnxruntime PR#20521: 16 ragged sequences with prefixes, 1, 2 and N threads, both
    orders."""
    rng = np.random.default_rng(6)
    q = rng.integers(1, 41, 16)
    kv = q + rng.choice([0, 128, 256], 16)
    case = make_case(q.tolist(), kv.tolist(), head_num=4, kv_head_num=2, dtype=dtype, head_size=64)
    out = check(case, kernel)
    for threads in (1, 2, 16):
        same_bits(run(case, kernel, num_threads=threads), out)
    for b in range(16):
        same_bits(run(select(case, [b]), kernel), case.rows(out, b))
    turned = run(select(case, range(16)[::-1]), kernel)
    same_bits(turned, np.concatenate([case.rows(out, b) for b in range(16)[::-1]]))


@pytest.mark.parametrize("block_size", [1, 2, 16, 128])
def test_d07_shorter_than_one_page(target: str, block_size: int) -> None:
    """flashinfer#725: two sequences of one key each, identical data, identical and right
    outputs."""
    case = make_case([1, 1], [1, 1], value=lambda b, j, h, c: 3.0, block_size=block_size, dtype="float16")
    assert_value(run(case, target), np.full(case.query.shape, 3.0))
    for kv in (block_size - 1, block_size, block_size + 1):
        case = make_case([kv], [kv], query=0.0, value=lambda b, j, h, c: j, block_size=block_size, dtype="float16")
        assert_value(run(case, target)[:, 0, 0], np.arange(kv) / 2)


def test_d07_table_too_short(target: str) -> None:
    """33 keys and a table of two pages of 16: refused, nothing read past the row."""
    case = make_case([1], [32], tail=0)
    with pytest.raises(ValueError, match=naming("kv_seq_len", 0, 33, 32)):
        run(case, target, kv_seq_len=[33])


@pytest.mark.parametrize("block_size", [1, 2, 3, 8, 19, 48, 96, 768])
def test_d08_small_or_odd_pages(target: str, block_size: int) -> None:
    """flash-attention#828, #1627, onnxruntime-genai PR#2568: same result as in pages of 128."""
    case = make_case(
        [1], [129], query=0.0, value=lambda b, j, h, c: j % 16 == c, block_size=block_size, dtype="float16"
    )
    counts = np.bincount(np.arange(129) % 16)
    assert_near(run(case, target)[0, 0], counts / 129)
    same_bits(run(case, target), run(repaged(case, seed=1, block_size=128), target))


@pytest.mark.parametrize("head_size", [16, 48, 80, 96, 112, 120, 136])
def test_d09_head_size_no_power_of_two(target: str, head_size: int) -> None:
    """vllm#4127, openvino PR#24627: each column has its value, nothing is written around the
    output."""
    case = make_case([7], [40], head_num=2, head_size=head_size, dtype="float16", query=0.0, value=lambda b, j, h, c: c)
    raw = np.full(case.query.size + 512, 7, np.float16)
    out = raw[256:-256].reshape(case.query.shape)
    run(case, target, out=out)
    assert_value(out, np.broadcast_to(np.arange(head_size), case.query.shape))
    assert (raw[:256] == 7).all() and (raw[-256:] == 7).all()


@pytest.mark.parametrize("head_size", [0, 257])
def test_d09_head_size_refused(target: str, head_size: int) -> None:
    """Not supported means refused."""
    q, kv = np.zeros((1, 1, head_size), np.float16), np.zeros((1, 16, 1, head_size), np.float16)
    with pytest.raises(ValueError, match=naming("query", head_size, 256)):
        nbp.prefix_encoder(q, kv, kv, np.zeros((1, 1), np.int32), [1], [1], target=target)


@pytest.mark.parametrize("heads", [(28, 4), (12, 1), (8, 8)])
def test_d10_gqa_mapping(target: str, heads: tuple[int, int]) -> None:
    """fla#1029, HipKittens PR#22: query head h reads kv head h // group, exactly."""
    case = make_case(
        [3], [9], head_num=heads[0], kv_head_num=heads[1], query=0.0, value=lambda b, j, h, c: h + 1, dtype="bfloat16"
    )
    group = heads[0] // heads[1]
    assert_value(run(case, target)[2, :, 0], np.repeat(np.arange(heads[1]) + 1, group))


@pytest.mark.parametrize("heads", [(3, 2), (33, 2)])
def test_d10_gqa_no_divisor(target: str, heads: tuple[int, int]) -> None:
    case = make_case([3], [9], head_num=heads[0], kv_head_num=heads[1])
    with pytest.raises(ValueError, match=naming("head_num", *heads)):
        run(case, target)


def test_d10_documented_example_of_op_plugin(target: str) -> None:
    """A cache of 28 heads with kv_head_num 4, and 512 query rows with lengths that sum to 128: both
    refused."""
    case = make_case([128], [128], head_num=28, head_size=16)
    with pytest.raises(ValueError, match=naming("kv_head_num", 4, 28)):
        run(case, target, kv_head_num=4)
    with pytest.raises(ValueError, match=naming("seq_len", 128, 512)):
        run(replace(case, query=np.tile(case.query, (4, 1, 1))), target)


def test_d11_alibi_over_the_query_length(target: str) -> None:
    """keras-hub#2861, flash-attention#466: the bias counts from absolute positions; only the root
    can tell."""
    case = make_case([2], [6], query=0.0, value=lambda b, j, h, c: j, slopes=np.float32([0.5]))
    root = run(replace(case, mask_type="alibi_sqrt"), target)[:, 0, 0]
    line = run(replace(case, mask_type="alibi"), target)[:, 0, 0]
    np.testing.assert_allclose(root, [2.50211, 3.14600], rtol=0, atol=5e-6)
    np.testing.assert_allclose(line, [2.9056, 3.7729], rtol=0, atol=5e-5)
    check(with_mask(make_case([8], [136], head_num=2), "alibi_sqrt-generator"), target)


@pytest.mark.parametrize("kind", ALIBI)
@pytest.mark.parametrize(("q", "kv"), [(20, 150), (1, 4096), (1, 8192)])
def test_d12_slopes_of_a_slice_of_heads(kernel: str, kind: str, q: int, kv: int) -> None:
    """mlx#343, Baichuan2#225: two ranks of six heads each are the full run of twelve, bit for
    bit."""
    slopes = nbp.alibi_slopes(12)[np.random.default_rng(1).permutation(12)]
    case = replace(make_case([q], [kv], head_num=12), mask_type=kind, slopes=slopes)
    out = run(case, kernel)
    for part in (slice(0, 6), slice(6, 12)):
        rank = replace(
            case,
            query=case.query[:, part],
            key=case.key[:, :, part],
            value=case.value[:, :, part],
            slopes=slopes[part],
        )
        same_bits(run(rank, kernel), out[:, part])


def test_d12_slopes_for_every_query_head(target: str) -> None:
    """One slope per query head, not per kv head; 12 and 40 heads; a vector of another length is
    refused."""
    for head_num, kv_head_num in ((12, 2), (40, 8)):
        case = make_case([3], [70], head_num=head_num, kv_head_num=kv_head_num, dtype="float16")
        check(replace(case, mask_type="alibi_sqrt", slopes=nbp.alibi_slopes(head_num)[::-1].copy()), target)
        with pytest.raises(ValueError, match=naming("slopes", 128, head_num)):
            run(case, target, mask_type="alibi", slopes=np.ones(128, np.float32))


def test_d13_slope_zero_times_infinity(target: str) -> None:
    """A template of +inf above the diagonal and slopes 0.5, 0, -0.25: the head with slope 0 is
    plain causal."""
    case = make_case([9, 150], [9, 300], head_num=3, dtype="float16")
    slopes = np.float32([0.5, 0.0, -0.25])
    given = replace(case, mask_type="alibi", mask=distance_template("alibi"), slopes=slopes)
    out = check(given, target)
    assert np.isfinite(out.astype(float)).all()

    def middle(c: Case) -> Case:
        cache = {"key": c.key[:, :, 1:2], "value": c.value[:, :, 1:2]}
        return replace(c, query=c.query[:, 1:2], **cache)

    assert_close(out[:, 1:2], middle(case))


@pytest.mark.parametrize("prefix", [0, 1, 127, 128, 129, 256])
def test_d14_prefix_of_any_length(target: str, prefix: int) -> None:
    """vllm-ascend PR#3652: the prefix is neither dropped nor bound to multiples of 128."""
    case = make_case([3], [prefix + 3], query=0.0, value=lambda b, j, h, c: j / 2, dtype="float16")
    assert_near(run(case, target)[:, 0, 0], case.q_pos / 4)


def test_d14_cumulative_lengths(target: str) -> None:
    """Cumulative lengths do not sum up to the tokens: refused with both numbers."""
    case = make_case([3, 4, 5], [3, 4, 5])
    with pytest.raises(ValueError, match=naming("seq_len", 22, 12)):
        run(case, target, seq_len=[3, 7, 12], kv_seq_len=[3, 7, 12])


@pytest.mark.parametrize("form", ["causal", "alibi_sqrt-generator", "alibi-template"])
def test_d14_one_shot_against_chunks(target: str, form: str) -> None:
    """q = 300 at once against 128 + 128 + 44 with a growing prefix."""
    case = with_mask(make_case([300], [300], head_num=2, dtype="float16", block_size=48), form)
    parts = [run(chunk(case, *ends), target) for ends in ((0, 128), (128, 256), (256, 300))]
    assert_close(np.concatenate(parts), case)
    assert_close(run(case, target), case)


@pytest.mark.parametrize("scale", [128**-0.5, 1.0])
def test_d15_scores_beyond_half_precision(target: str, scale: float) -> None:
    """metal-flash-attention#8, pytorch PR#60940: a dot product of 524288 in float16; the gap of
    22.6 decides."""
    case = make_case(
        [1],
        [2],
        dtype="float16",
        head_size=128,
        query=64.0,
        key=lambda b, j, h, c: np.where(j == 0, 64.0, 63.96875),
        value=lambda b, j, h, c: np.where(j == 0, 1, -1),
        qk_scale=scale,
    )
    out, lse = run(case, target, return_lse=True)
    assert_value(out, np.ones(case.query.shape))
    assert_near(lse, 524288.0 * scale)


def test_d15_scale_zero(target: str) -> None:
    case = make_case([1], [2], dtype="float16", query=0.0, key=0.0, value=lambda b, j, h, c: 2 * j - 1, qk_scale=0.0)
    assert_value(run(case, target), np.zeros(case.query.shape))
