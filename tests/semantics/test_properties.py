"""Random problems: every target against the oracle, the oracle against brute force, and relations
between results."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import (
    DTYPES,
    MASK_FORMS,
    Case,
    assert_close,
    assert_oracle,
    check,
    chunk,
    make_case,
    repaged,
    repeated_heads,
    run,
    same_bits,
    select,
    with_mask,
)
from hypothesis import given, settings
from hypothesis import strategies as st

GROUPS = (1, 1, 2, 3, 4, 7, 8, 16)
HEAD_SIZES = st.one_of(st.sampled_from([16, 48, 64, 80, 96, 112, 128, 192, 256]), st.integers(1, 256))
BLOCK_SIZES = st.one_of(st.sampled_from([1, 3, 16, 48, 128, 256]), st.integers(1, 300))
# Lengths around the edges of tiles, pages and template blocks, and anything else.
EDGES = st.sampled_from([1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257])
PREFIXES = st.one_of(st.just(0), EDGES, st.integers(0, 600))


@st.composite
def lengths(draw: Any, most: int = 5) -> tuple[list[int], list[int]]:
    """seq_len and kv_seq_len of a ragged batch; sequences without query rows may have keys."""
    q = draw(st.lists(st.one_of(st.just(0), st.just(1), EDGES, st.integers(0, 140)), max_size=most))
    return q, [n + draw(PREFIXES) for n in q]


@st.composite
def problems(draw: Any, most: int = 5, forms: tuple[str, ...] = MASK_FORMS) -> Case:
    q, kv = draw(lengths(most))
    kv_head_num, group = draw(st.integers(1, 3)), draw(st.sampled_from(GROUPS))
    dtype = draw(st.sampled_from(list(DTYPES)))
    case = make_case(
        q,
        kv,
        head_num=kv_head_num * group,
        kv_head_num=kv_head_num,
        head_size=draw(HEAD_SIZES),
        block_size=draw(BLOCK_SIZES),
        dtype=dtype,
        seed=draw(st.integers(0, 2**16)),
        poison=draw(st.sampled_from([np.nan, np.inf, 60000.0])),
        qk_scale=draw(st.sampled_from([None, 0.0, 0.05, -0.1, 1.0])),
        tail=draw(st.integers(0, 3)),
    )
    mask_dtype = draw(st.sampled_from(["float32", dtype]))
    return with_mask(case, draw(st.sampled_from(forms)), draw(st.integers(0, 99)), mask_dtype)


@st.composite
def single(draw: Any) -> tuple[Case, list[int]]:
    """One sequence, and where to cut it."""
    q = draw(st.integers(2, 200))
    kv = q + draw(PREFIXES)
    cuts = sorted(draw(st.sets(st.integers(1, q - 1), min_size=1, max_size=3)))
    options = {
        "head_size": draw(HEAD_SIZES),
        "block_size": draw(BLOCK_SIZES),
        "dtype": draw(st.sampled_from(list(DTYPES))),
    }
    case = make_case([q], [kv], head_num=4, kv_head_num=2, seed=draw(st.integers(0, 2**16)), **options)
    return with_mask(case, draw(st.sampled_from([form for form in MASK_FORMS if form != "none"]))), [0, *cuts, q]


@given(case=problems())
def test_target_against_the_oracle(kernel: str, case: Case) -> None:
    """out and lse within the house tolerance."""
    check(case, kernel)


# The oracle and brute force take half a second an example: a third as many as for kernels.
@settings(max_examples=max(10, settings().max_examples // 3))
@given(case=problems(most=3))
def test_oracle_against_brute_force(case: Case) -> None:
    """Float64 against float64."""
    assert_oracle(case)


@given(case=problems())
def test_batch_equals_each_alone(kernel: str, case: Case) -> None:
    """Bit-equal, lse too."""
    out, lse = run(case, kernel, return_lse=True)
    for b in range(len(case.seq_len)):
        alone = run(select(case, [b]), kernel, return_lse=True)
        same_bits(alone[0], case.rows(out, b))
        same_bits(alone[1], case.rows(lse, b))


@given(case=problems(), data=st.data())
def test_order_of_the_batch(kernel: str, case: Case, data: st.DataObject) -> None:
    """Bit-equal in any order."""
    order = data.draw(st.permutations(range(len(case.seq_len))))
    out = run(case, kernel)
    expected = np.concatenate([case.rows(out, b) for b in order] or [out])
    same_bits(run(select(case, order), kernel), expected)


@given(case=problems(), seed=st.integers(0, 99))
def test_order_of_the_pages(kernel: str, case: Case, seed: int) -> None:
    """Bit-equal in other physical blocks with other junk around."""
    same_bits(run(repaged(case, seed=seed), kernel), run(case, kernel))


@given(case=problems())
def test_number_of_threads(kernel: str, case: Case) -> None:
    """Bit-equal with 1, 2 and 5 threads."""
    first = run(case, kernel, num_threads=1, return_lse=True)
    for threads in (2, 5):
        for got, expected in zip(run(case, kernel, num_threads=threads, return_lse=True), first, strict=True):
            same_bits(got, expected)


@pytest.mark.parametrize("kv_len", [600, 4000])
def test_number_of_threads_with_many_rows(kernel: str, kv_len: int) -> None:
    """Where one thread gets other tiles than three: 1,040 rows of a head, with keys that are split
    or not."""
    case = make_case([520, 3], [kv_len, 70], head_num=16, kv_head_num=8, head_size=16, dtype="bfloat16")
    expected = check(case, kernel)
    for num_threads in (1, 3):
        same_bits(run(case, kernel, num_threads=num_threads), expected)


@given(problem=single())
def test_one_shot_equals_chunked(kernel: str, problem: tuple[Case, list[int]]) -> None:
    """Within the tolerance of the whole."""
    case, cuts = problem
    parts = [run(chunk(case, *ends), kernel) for ends in itertools.pairwise(cuts)]
    assert_close(np.concatenate(parts), case)


@given(case=problems(most=3))
def test_grouped_equals_repeated_heads(kernel: str, case: Case) -> None:
    """Multi-head attention over repeated K/V heads is within the tolerance of the grouped
    problem."""
    out, lse = run(repeated_heads(case), kernel, return_lse=True)
    assert_close(out, case, lse)


@given(case=problems(most=3, forms=("alibi-generator",)))
def test_left_align_equals_linear(kernel: str, case: Case) -> None:
    """Both biases differ by a constant per row."""
    assert_close(run(replace(case, mask_type="alibi_left_align"), kernel), case)


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    pair=st.tuples(st.integers(0, 40), st.integers(1, 60)),
    block_size=st.integers(1, 20),
    bad=st.sampled_from([np.nan, np.inf]),
)
def test_what_follows_a_row_cannot_reach_it(
    kernel: str, dtype: str, pair: tuple[int, int], block_size: int, bad: float
) -> None:
    """NaN or infinity in every key and value from some position on: the rows before it keep their
    bits."""
    prefix, q = pair
    case = make_case([q], [prefix + q], head_num=2, block_size=block_size, dtype=dtype, seed=q)
    first = prefix + q // 2
    pages = case.block_tables[0, np.arange(first, prefix + q) // block_size]
    slots = np.arange(first, prefix + q) % block_size
    spoilt = {name: getattr(case, name).copy() for name in ("key", "value")}
    for array in spoilt.values():
        array[pages, slots] = bad
    out, clean = run(case, kernel, **spoilt), run(case, kernel)
    same_bits(out[: q // 2], clean[: q // 2])
    assert not np.isfinite(out[q // 2 :].astype(np.float32)).any()
