"""Batches of few rows (decode), in which a work item takes several kv heads in turns. None of that
may show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import MASK_FORMS, check, make_case, repaged, run, same_bits, select, to_numpy, with_mask

import numba_prefix as nbp
from numba_prefix.cpu import plan

Q_LEN = (1, 2) * 20
KV_LEN = tuple(2 + 53 * i % 290 for i in range(39)) + (2200,)  # the last is split


def case_of(**options: Any) -> Any:
    given = {"head_num": 8, "kv_head_num": 4, "head_size": 32, "dtype": "bfloat16", "block_size": 16} | options
    return make_case(Q_LEN, KV_LEN, **given)


def item_heads(case: Any, num_threads: int) -> int:
    """Of the plan that a call makes."""
    _, op = nbp.self_attention_prefix_encoder_get_workspace_size(
        case.query, case.key, case.value, case.block_tables, None, case.seq_len, case.kv_seq_len, None, "causal",
        case.query.shape[1], case.key.shape[2], case.qk_scale, np.empty_like(case.query), nbp.Context("cpu", num_threads),
    )  # fmt: skip
    return int(op.planned.plan.params["item_heads"])


def test_how_many() -> None:
    assert item_heads(case_of(), 1) == 4
    assert item_heads(select(case_of(), [0]), 1) == 1
    assert item_heads(make_case((1,) * 64, (20,) * 64, head_num=48, kv_head_num=24), 1) == 8
    assert item_heads(make_case((1,) * 63 + (5,), (20,) * 64, head_num=48, kv_head_num=24), 1) == 1
    assert [plan._item_heads(entries, 6, 2) for entries in (2, 3, 6, 8, 15, 16)] == [1, 1, 2, 3, 3, 6]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("head_num", "kv_head_num"), [(4, 4), (8, 4), (12, 3), (14, 7), (32, 8)])
def test_result(head_num: int, kv_head_num: int, dtype: str) -> None:
    case = case_of(head_num=head_num, kv_head_num=kv_head_num, dtype=dtype)
    assert item_heads(case, 1) > 1
    out = check(case, "cpu")
    for num_threads in (1, 2, 5):
        same_bits(out, run(case, "cpu", num_threads=num_threads))
    for b in (0, 17, 38, 39):
        same_bits(case.rows(out, b), run(select(case, [b]), "cpu"))
    same_bits(out, run(repaged(case, seed=5), "cpu"))


@pytest.mark.parametrize("form", MASK_FORMS)
def test_masks(form: str) -> None:
    case = with_mask(case_of(head_size=16), form)
    out = check(case, "cpu")
    same_bits(case.rows(out, 39), run(select(case, [39]), "cpu"))


def test_heads_keep_to_themselves() -> None:
    """A NaN in one head's keys, and an infinite value in another's that one row of two sees, reach
    no other head's rows."""
    case = case_of()
    key, value = case.key.copy(), case.value.copy()
    page, slot = divmod(KV_LEN[5] - 1, 16)
    key[case.block_tables[5, page], slot, 1, 3] = np.nan
    value[case.block_tables[5, page], slot, 2, 4] = np.inf
    before, after = to_numpy(run(case, "cpu")), to_numpy(run(replace(case, key=key, value=value), "cpu"))
    rows = case.starts[5], case.starts[5] + 1  # of which the last sees the last key
    assert np.isnan(after[rows[1], 2:4].astype(np.float64)).all()
    assert np.isinf(after[rows[1], 4:6, 4].astype(np.float64)).all()
    after[rows[1], 2:4], after[rows[1], 4:6, 4] = before[rows[1], 2:4], before[rows[1], 4:6, 4]
    same_bits(before, after)


def test_held_blocks() -> None:
    case = case_of()
    held = np.random.default_rng(0).random(case.block_tables.shape) < 0.6
    arguments = case.arguments()
    out = nbp.prefix_encoder(**arguments, held_blocks=held)
    for b in (3, 20, 39):
        alone = select(case, [b])
        same_bits(case.rows(out, b), nbp.prefix_encoder(**alone.arguments(), held_blocks=held[[b]]))


def test_exact_workspace() -> None:
    case = case_of(dtype="float32")
    out, expected = np.full_like(case.query, np.nan), run(case, "cpu")
    size, op = nbp.self_attention_prefix_encoder_get_workspace_size(
        case.query, case.key, case.value, case.block_tables, None, case.seq_len, case.kv_seq_len, None, "causal", 8, 4,
        case.qk_scale, out, nbp.Context("cpu", 2),
    )  # fmt: skip
    buffer = np.full(size + 128, 0xA5, np.uint8)
    nbp.self_attention_prefix_encoder(buffer[61 : 61 + size], size, op)
    same_bits(out, expected)
    assert (buffer[:61] == 0xA5).all()
    assert (buffer[61 + size :] == 0xA5).all()
