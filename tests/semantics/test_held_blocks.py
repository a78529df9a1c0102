"""held_blocks: attention to some of each sequence's blocks, at their true positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import DTYPES, INT_MAX, MASK_FORMS, Case, bias_of, brute, judge, make_case, naming, run, same_bits, with_mask
from hypothesis import given
from hypothesis import strategies as st

import numba_prefix as nbp
from numba_prefix.front.encoder import plan_partial
from numba_prefix.front.operation import Context
from numba_prefix.inputs.mask_types import MaskType
from numba_prefix.reference.oracle import budget, naive, reference

# Decode and prefill rows, an empty sequence, one long enough for its keys to be split, and one of
# many tiles.
Q_LEN, KV_LEN = [1, 5, 0, 1, 40], [70, 300, 9, 2500, 170]


def blocks_of(case: Case, pattern: str, seed: int = 0) -> np.ndarray:
    """bool [batch, max_block_num]; sequence 1 has nothing unless everything is held."""
    rng = np.random.default_rng(seed)
    shape = case.block_tables.shape
    if pattern == "all":
        return np.ones(shape, bool)
    held = np.broadcast_to(np.arange(shape[1]) % 3 == 1, shape) if pattern == "interleaved" else rng.random(shape) < 0.4
    held = held.copy()
    held[1:2] = False
    return held


def junk_elsewhere(case: Case, held: np.ndarray) -> Case:
    """NaN in every page that is not held, and ids of no block in place of their table entries."""
    block_size = case.key.shape[1]
    needed = np.arange(held.shape[1]) * block_size < np.array(case.kv_seq_len)[:, None]
    key, value = case.key.copy(), case.value.copy()
    lost = case.block_tables[needed & ~held]
    key[lost], value[lost] = np.nan, np.nan
    junk = np.where(np.indices(held.shape).sum(axis=0) % 2, -1, INT_MAX).astype(np.int32)
    return replace(case, key=key, value=value, block_tables=np.where(held, case.block_tables, junk))


def brute_held(case: Case, held: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Float64 (out, lse), one row at a time over the held keys that it may see."""
    out, lse = np.zeros(case.query.shape), np.full(case.query.shape[:2], -np.inf)
    group = case.query.shape[1] // case.key.shape[2]
    for b, kv_len in enumerate(case.kv_seq_len):
        pos = np.flatnonzero(np.repeat(held[b], case.key.shape[1])[:kv_len])
        for row in range(case.starts[b], case.starts[b + 1]):
            p = int(case.q_pos[row])
            j = pos if MaskType.parse(case.mask_type) is MaskType.NONE else pos[pos <= p]
            if len(j) == 0:
                continue
            for h in range(case.query.shape[1]):
                score = case.keys[b][j, h // group].astype(np.float64) @ case.query[row, h].astype(np.float64)
                score = score * case.qk_scale + bias_of(case, h, p, j)
                weight = np.exp(score - score.max())
                out[row, h] = weight @ case.values[b][j, h // group].astype(np.float64) / weight.sum()
                lse[row, h] = score.max() + np.log(weight.sum())
    return out, lse


def check_held(case: Case, held: np.ndarray, target: str) -> None:
    """out (poisoned before) and lse within the house tolerance, reading nothing that is not
    held."""
    case = junk_elsewhere(case, held)
    out = np.full(case.query.shape, np.nan, case.query.dtype)
    out, lse = run(case, target, return_lse=True, out=out, held_blocks=held)
    arguments = case.arguments() | {"held_blocks": held, "return_lse": True}
    (ref, ref_lse), (plain, plain_lse) = reference(**arguments), naive(**arguments)
    judge(out, ref, plain, "out")
    judge(lse, ref_lse, plain_lse, "lse")
    unseen = np.isneginf(ref_lse)
    assert (out[unseen] == 0).all()
    assert np.array_equal(np.isneginf(lse), unseen)


@pytest.mark.parametrize("pattern", ["interleaved", "ragged"])
@pytest.mark.parametrize("form", MASK_FORMS)
def test_mask_forms(target: str, form: str, pattern: str) -> None:
    """Positions, not places in a compacted cache, decide about biases and visibility."""
    case = make_case(Q_LEN, KV_LEN, head_num=4, kv_head_num=2, block_size=16, dtype="float32")
    case = with_mask(case, form)
    check_held(case, blocks_of(case, pattern), target)


@pytest.mark.parametrize("block_size", [1, 3, 16, 48, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_block_sizes(kernel: str, dtype: str, block_size: int) -> None:
    """Runs that begin anywhere, for lanes along rows and along heads (head sizes 40 and 16)."""
    for head_size, form in ((40, "alibi_sqrt-template"), (16, "alibi_left_align-heads"), (16, "causal")):
        case = make_case(
            Q_LEN, KV_LEN, head_num=2, kv_head_num=1, head_size=head_size, block_size=block_size, dtype=dtype
        )
        case = with_mask(case, form, mask_dtype=dtype)
        check_held(case, blocks_of(case, "ragged", seed=block_size), kernel)


@pytest.mark.parametrize("form", MASK_FORMS)
def test_oracle_against_brute_force(form: str) -> None:
    """Both in float64."""
    case = with_mask(make_case([1, 3, 0, 30], [40, 9, 5, 170], head_num=2, block_size=7), form)
    held = blocks_of(case, "ragged")
    got = nbp.reference(**junk_elsewhere(case, held).arguments(), held_blocks=held, return_lse=True)
    for a, b in zip(got, brute_held(case, held), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-11)
    np.testing.assert_allclose(brute_held(case, blocks_of(case, "all"))[0], brute(case)[0], rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", MASK_FORMS)
def test_all_held_is_the_default(target: str, form: str, dtype: str) -> None:
    """Bit for bit."""
    case = with_mask(make_case(Q_LEN, KV_LEN, head_num=2, block_size=16, dtype=dtype), form)
    got = run(case, target, return_lse=True, held_blocks=blocks_of(case, "all"))
    for a, b in zip(got, run(case, target, return_lse=True), strict=True):
        same_bits(a, b)


@given(data=st.data())
def test_random_problems(kernel: str, data: st.DataObject) -> None:
    """Lengths, blocks and shapes at random; bits do not depend on threads or batch mates."""
    draw = data.draw
    q = draw(st.lists(st.sampled_from([0, 1, 2, 17, 130]), min_size=1, max_size=3))
    kv = [n + draw(st.integers(0, 400)) for n in q]
    case = make_case(
        q,
        kv,
        head_num=draw(st.sampled_from([1, 2, 4])),
        kv_head_num=1,
        head_size=draw(st.sampled_from([16, 24, 64])),
        block_size=draw(st.sampled_from([1, 3, 16, 48, 128])),
        dtype=draw(st.sampled_from(list(DTYPES))),
        seed=draw(st.integers(0, 99)),
    )
    case = with_mask(case, draw(st.sampled_from(MASK_FORMS)))
    held = np.random.default_rng(draw(st.integers(0, 99))).random(case.block_tables.shape) < draw(st.floats(0, 1))
    check_held(case, held, kernel)
    out = run(case, kernel, held_blocks=held, num_threads=1)
    same_bits(run(case, kernel, held_blocks=held, num_threads=3), out)
    alone = replace(
        case, query=case.rows(case.query, 0), block_tables=case.block_tables[:1], seq_len=q[:1], kv_seq_len=kv[:1]
    )
    same_bits(run(alone, kernel, held_blocks=held[:1]), case.rows(out, 0))


def test_far_from_the_last_key(target: str) -> None:
    """A left-aligned bias is taken relative to the last held key: one relative to the query's own
    position, 30,000 keys on, would leave the scores few bits."""
    case = make_case([1, 3], [30_000, 30_000], head_num=2, block_size=16, mask_type="alibi_left_align")
    case = replace(case, slopes=np.float32([0.5, 0.01]))
    held = np.zeros(case.block_tables.shape, bool)
    held[:, :3] = True
    check_held(case, held, target)


@pytest.mark.parametrize("head_size", [16, 40])
def test_exact_probe(target: str, head_size: int) -> None:
    """q = 0: the mean of V over the held keys up to the row's own."""
    case = make_case([3], [50], head_size=head_size, block_size=4, query=0.0, value=lambda b, j, h, c: j)
    held = np.zeros(case.block_tables.shape, bool)
    held[0, [2, 3, 5, 12]] = True  # keys 8 to 15, 20 to 23, 48 and 49
    out = run(junk_elsewhere(case, held), target, held_blocks=held)
    for row, last in enumerate((47, 48, 49)):
        keys = [j for j in (*range(8, 16), *range(20, 24), 48, 49) if j <= last]
        np.testing.assert_allclose(out[row, 0], np.mean(keys), rtol=1e-6)


def test_cache_without_blocks(target: str) -> None:
    """A holder of nothing: out 0, lse -inf, whatever its table says."""
    case = make_case([2, 1], [20, 3], block_size=4)
    out, lse = run(
        case, target, key=case.key[:0], value=case.value[:0], return_lse=True,
        held_blocks=np.zeros(case.block_tables.shape, bool),
    )  # fmt: skip
    assert (out == 0).all()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("form", ["alibi-generator", "alibi_left_align-generator", "alibi_left_align-template"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_merge_to_the_whole(target: str, dtype: str, form: str) -> None:
    """float32 parts over a partition of the blocks are, merged, within the tolerance of the
    whole."""
    case = with_mask(make_case(Q_LEN, KV_LEN, head_num=2, block_size=16, dtype=dtype), form)
    owner = np.random.default_rng(1).integers(0, 2, case.block_tables.shape)
    options = {name: getattr(case, name) for name in ("mask_type", "mask", "slopes", "qk_scale")}
    inputs = (case.query, case.key, case.value, case.block_tables, case.seq_len, case.kv_seq_len)
    parts: list[Any] = []
    for rank in range(2):
        op = plan_partial(*inputs, owner == rank, Context(target), **options)
        op.run()
        assert op.out.dtype == np.float32
        parts += [op.out, op.lse]
    out, lse = nbp.merge_states(*parts)
    if op.part_shift is not None:
        lse += op.part_shift
    arguments = case.arguments() | {"return_lse": True}
    (ref, ref_lse), (plain, plain_lse) = reference(**arguments), naive(**arguments)
    judge(out.astype(DTYPES[dtype]), ref, plain, "out")
    judge(lse, ref_lse, plain_lse, "lse")


@pytest.mark.parametrize("form", ["alibi_left_align", "alibi"])
def test_parts_of_a_long_context(target: str, form: str) -> None:
    """Far along, a left-aligned bias is large, but not what parts are weighed by: merged, they are
    as near the oracle as after linear biases, which are small at the keys that count. Every second
    key is another part's."""
    case = make_case([3], [20_000], head_num=2, block_size=1, mask_type=form)
    case = replace(case, slopes=np.float32([0.5, 0.1]))
    inputs = (case.query, case.key, case.value, case.block_tables, case.seq_len, case.kv_seq_len)
    is_even = np.arange(case.block_tables.shape[1])[None] % 2 == 0
    parts: list[Any] = []
    for held in (is_even, ~is_even):
        op = plan_partial(*inputs, held, Context(target), mask_type=form, slopes=case.slopes, qk_scale=case.qk_scale)
        op.run()
        parts += [op.out, op.lse]
    ref = reference(**case.arguments())
    assert np.abs(nbp.merge_states(*parts)[0] - ref).max() < 2e-6


def test_parts_that_cancel() -> None:
    """Parts of 16 bits would not do: where they cancel, their rounding is larger than the whole."""
    case = make_case([4], [64], head_num=2, block_size=32, dtype="float16", mask_type="none", key=0.0,
                     value=lambda b, j, h, c: np.where(j < 32, 100.0, -100.0) + np.sin(7 * j + 3 * c))  # fmt: skip
    inputs = (case.query, case.key, case.value, case.block_tables, case.seq_len, case.kv_seq_len)
    columns = np.arange(case.block_tables.shape[1])
    parts: list[Any] = []
    for block in range(2):
        op = plan_partial(*inputs, np.broadcast_to(columns == block, case.block_tables.shape), Context("cpu"),
                          mask_type="none", qk_scale=case.qk_scale)  # fmt: skip
        op.run()
        parts += [op.out, op.lse]
    out = nbp.merge_states(*parts)[0].astype(np.float16)
    short = nbp.merge_states(*(x.astype(np.float16) if x.ndim == 3 else x for x in parts))[0]
    ref, plain = reference(**case.arguments()), naive(**case.arguments())
    judge(out, ref, plain, "out")
    assert not budget(short, ref, plain).ok


def test_a_partial_operation_can_be_bound_anew(kernel: str) -> None:
    """Its output stays float32."""
    case = make_case([3], [40], head_num=2, block_size=8, dtype="float16", kv_head_num=1)
    inputs = (case.query, case.key, case.value, case.block_tables, case.seq_len, case.kv_seq_len)
    held = blocks_of(case, "interleaved")
    op = plan_partial(*inputs, held, Context(kernel))
    op.run()
    first = op.out.copy()
    op.rebind(query=-case.query, attn_out=np.full(case.query.shape, np.nan, np.float32)).run()
    assert np.isfinite(op.out).all()
    assert not np.array_equal(op.out, first)
    with pytest.raises(TypeError, match=naming("attn_out|out", "float32")):
        op.rebind(attn_out=np.empty(case.query.shape, np.float16))


@pytest.mark.parametrize(
    ("held", "error", "words"),
    [
        ([[True, False]], TypeError, ["list"]),
        (np.ones((1, 7), np.uint8), TypeError, ["uint8", "bool"]),
        (np.ones((1, 5), bool), ValueError, [r"\(1, 5\)", r"\(1, 7\)", "block_tables"]),
        (np.ones(7, bool), ValueError, [r"\(7,\)", r"\(1, 7\)"]),
        (True, TypeError, ["bool"]),
    ],
    ids=["list", "uint8", "width", "flat", "scalar"],
)
def test_refused(target: str, held: Any, error: type[Exception], words: list[str]) -> None:
    """Before anything is computed."""
    case = make_case([2], [17], block_size=4)
    assert case.block_tables.shape == (1, 7)
    out = np.full(case.query.shape, 7, np.float32)
    with pytest.raises(error, match=naming("held_blocks: got", *words)):
        run(case, target, held_blocks=held, out=out)
    assert (out == 7).all()


def test_held_entries_are_checked(target: str) -> None:
    """A bad id in a held entry is refused; one elsewhere is not looked at, at planning and at each
    run."""
    case = make_case([2], [17], block_size=4)
    held = np.zeros((1, 7), bool)
    held[0, [1, 6]] = True  # the last is past the sequence's end
    tables = case.block_tables.copy()
    tables[0, [0, 2, 6]] = 99
    run(case, target, block_tables=tables, held_blocks=held)
    tables[0, 1] = 99
    with pytest.raises(ValueError, match=naming("block_tables: got block", 99, "column 1")):
        run(case, target, block_tables=tables, held_blocks=held)


def test_held_blocks_are_copied(kernel: str) -> None:
    """What the caller does to the array after planning changes nothing."""
    case = make_case([2], [17], block_size=4)
    held = np.zeros((1, 7), bool)
    held[0, 1] = True
    inputs = (case.query, case.key, case.value, case.block_tables, case.seq_len, case.kv_seq_len)
    op = plan_partial(*inputs, held, Context(kernel))
    held[...] = True
    case.block_tables[0, 0] = 99
    op.run()
    assert np.isfinite(op.out).all()
