"""Arguments and files that make no sense, in a host's process."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import INT_MAX, make_case, run, same_bits

import numba_prefix as nbp


def block_ids() -> None:
    """Make each entry that will be read a bad one, in both forms of the call; entries not read may
    hold anything."""
    case = make_case([1, 0, 40], [33, 90, 140], head_num=4, kv_head_num=2, block_size=16)
    out, lse = run(case, "cpu", return_lse=True)
    written = np.full(case.query.shape, np.nan, case.query.dtype)
    plain = case.arguments() | {"head_num": None, "kv_head_num": None, "attn_out": written}
    for b, kv_len in enumerate(case.kv_seq_len):
        for column in range(case.block_tables.shape[1]):
            will_be_read = case.seq_len[b] > 0 and column < -(-kv_len // 16)
            for bad in (-1, case.key.shape[0], INT_MAX, -(2**31)):
                tables = case.block_tables.copy()
                size, op = nbp.self_attention_prefix_encoder_get_workspace_size(**plain | {"block_tables": tables})
                tables[b, column] = bad
                wrong = replace(case, block_tables=tables)
                if not will_be_read:
                    for got, expected in zip(run(wrong, "cpu", return_lse=True), (out, lse), strict=True):
                        same_bits(got, expected)
                    continue
                for attempt in (
                    lambda: run(wrong, "cpu", out=written),  # noqa: B023
                    lambda: nbp.self_attention_prefix_encoder(bytearray(size), size, op),  # noqa: B023
                ):
                    with pytest.raises(ValueError, match=f"got block {bad} for sequence {b}, column {column}"):
                        attempt()
                assert np.isnan(written).all()


def senseless_arguments() -> None:
    from hypothesis import settings

    settings.register_profile("service", max_examples=25, derandomize=True, deadline=None, database=None)
    settings.load_profile("service")
    from test_fuzz import test_one_call, test_two_phases

    test_one_call()
    test_two_phases()


def damaged_files() -> None:
    from fuzz_npz import fuzz

    codes = fuzz(seconds=10.0, most=60, seed=1)
    assert codes[2] > 5, codes
    assert codes[0] > 0, codes
