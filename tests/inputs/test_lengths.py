"""The validators of lengths and block ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from arguments import HEAD_SIZE, HEADS, OnGpu, refused, solve, zeros

from numba_prefix.inputs.lengths import check_lengths


def lengths(q: Any, kv: Any, **changes: Any) -> tuple[Any, Any]:
    return check_lengths(solve(**changes)[0], q, kv)


class TestLengths:
    @pytest.mark.parametrize(
        "make",
        [
            list,
            tuple,
            np.array,
            lambda x: np.array(x, np.uint32),
            lambda x: np.array(x, np.uint64),
            lambda x: np.array(x, np.int8),
            lambda x: np.array(x, ">i4"),
            lambda x: np.repeat(np.array(x), 2)[::2],
            lambda x: [np.int32(x[0]), x[1]],
            lambda x: (np.array(x[0]), np.uint64(x[1])),
        ],
    )
    def test_accepted(self, make: Any) -> None:
        q_len, kv_len = lengths(make([2, 3]), make([9, 3]))
        assert (q_len.tolist(), kv_len.tolist()) == ([2, 3], [9, 3])
        assert q_len.dtype == kv_len.dtype == np.int64

    @pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
    def test_tensors(self, dtype: str) -> None:
        torch = pytest.importorskip("torch")
        q_len, kv_len = lengths(torch.tensor([2, 3], dtype=getattr(torch, dtype)), list(torch.tensor([9, 3])))
        assert (q_len.tolist(), kv_len.tolist()) == ([2, 3], [9, 3])

    def test_the_result_is_not_the_callers(self) -> None:
        q = np.array([2, 3])
        q_len, _ = lengths(q, [9, 3])
        q[0] = 7
        assert q_len[0] == 2

    def test_batch_0(self) -> None:
        args = {"query": zeros(0, HEADS, HEAD_SIZE), "block_tables": zeros(0, 3, dtype=np.int32)}
        empty: Any
        for empty in ([], (), np.array([], np.int32)):
            q_len, kv_len = lengths(empty, empty, **args)
            assert q_len.shape == kv_len.shape == (0,)

    def test_rows_without_query_tokens_are_free(self) -> None:
        assert lengths([0, 5], [2**31 - 1, 5])[1].tolist() == [2**31 - 1, 5]
        assert lengths([0, 5], [2**63 - 1, 5])[1].tolist() == [2**63 - 1, 5]
        assert lengths([0, 0], [99, 0], query=zeros(0, HEADS, HEAD_SIZE))[1].tolist() == [99, 0]
        mask = zeros(HEADS, 5, 128)
        assert lengths([0, 5], [6, 5], mask=mask, mask_type="alibi")[1].tolist() == [6, 5]

    def test_a_large_batch(self) -> None:
        batch = 100_000
        args = {"query": zeros(batch, 1, 1), "key": zeros(1, 1, 1, 1), "value": zeros(1, 1, 1, 1)}
        args["block_tables"] = zeros(batch, 1, dtype=np.int32)
        q_len, _ = lengths([1] * batch, np.ones(batch, np.uint32), **args)
        assert q_len.sum() == batch
        kv = [1] * batch
        kv[77_777] = 2
        refused(ValueError, "kv_seq_len", "got 2 for sequence 77777", lengths, [1] * batch, kv, **args)

    @pytest.mark.parametrize(
        ("q", "kv", "says"),
        [
            ([2, 4], [9, 9], "seq_len: got lengths that sum to 6, expected 5"),
            ([2, 5], [9, 9], "seq_len: got lengths that sum to 7"),
            ([0, 0], [9, 9], "seq_len: got lengths that sum to 0"),
            ([2, 3], [9, 2], "kv_seq_len: got 2 for sequence 1, expected at least its seq_len 3"),
            ([4, 1], [2, 9], "kv_seq_len: got 2 for sequence 0"),
            ([2, 3], [10, 3], r"kv_seq_len: got 10 for sequence 0, expected at most 9 \(3 blocks of 3"),
            ([-1, 6], [9, 9], "seq_len: got -1 for sequence 0"),
            ([0, 5], [-1, 9], "kv_seq_len: got -1 for sequence 0"),
            ([2, 3], [9, 2**31], "kv_seq_len: got 2147483648 for sequence 1"),
            ([2, 3], [9, 2**64], "kv_seq_len: got 18446744073709551616 for sequence 1"),
            ([2, 3], [9, -(2**70)], "kv_seq_len: got -1180591620717411303424 for sequence 1"),
            ([2, 3], np.array([9, 2**63], np.uint64), "kv_seq_len: got 9223372036854775808 for sequence 1"),
            ([2, 3], np.array([9, 2**32 - 1], np.uint32), "kv_seq_len: got 4294967295 for sequence 1"),
            ([2, 3], np.array([-(2**63), 3]), "kv_seq_len: got -9223372036854775808 for sequence 0"),
            ([2, 3, 0], [9, 9], r"seq_len: got shape \(3,\), expected \(2,\)"),
            ([5], [9, 9], r"seq_len: got shape \(1,\)"),
            ([2, 3], [], r"kv_seq_len: got shape \(0,\)"),
            (np.array([[2, 3]]), [9, 9], r"seq_len: got shape \(1, 2\)"),
            (np.array(5), [9, 9], r"seq_len: got shape \(\)"),
        ],
    )
    def test_values(self, q: Any, kv: Any, says: str) -> None:
        refused(ValueError, says.partition(":")[0], says, lengths, q, kv)

    def test_mask_len(self) -> None:
        mask = zeros(HEADS, 5, 128)
        lengths([2, 3], [5, 5], mask=mask, mask_type="alibi")
        says = r"maskLen 5, expected at least 6 \(kv_seq_len of sequence 1"
        refused(ValueError, "mask", says, lengths, [2, 3], [5, 6], mask=mask, mask_type="alibi")

    @pytest.mark.parametrize(
        "bad",
        [
            *([2, 3.0], [2, True], [2, None], [2, "3"], [[2], [3]], {2, 3}, range(2, 4)),
            *([2, np.bool_(True)], [2, np.float32(3)], np.int64(5), np.array([2, 3], object)),
            *(np.array([2.0, 3.0]), np.array([True, False]), "23", None, 5, 5.0, True),
        ],
    )
    @pytest.mark.parametrize("name", ["seq_len", "kv_seq_len"])
    def test_types(self, name: str, bad: Any) -> None:
        q, kv = (bad, [9, 9]) if name == "seq_len" else ([2, 3], bad)
        refused(TypeError, name, "expected", lengths, q, kv)

    def test_tensors_of_another_type(self) -> None:
        torch = pytest.importorskip("torch")
        for bad in (
            torch.tensor([2.0, 3.0]),
            torch.tensor([True, False]),
            [2, torch.tensor(True)],
            [2, torch.tensor(3.0)],
        ):
            refused(TypeError, "seq_len", "expected", lengths, bad, [9, 9])
        refused(ValueError, "seq_len", "shape", lengths, torch.tensor(5), [9, 9])

    def test_gpu_memory(self) -> None:
        refused(TypeError, "seq_len", "host-side", lengths, OnGpu((2,), "<i4"), [9, 9])
