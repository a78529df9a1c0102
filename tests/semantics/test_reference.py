"""The oracle against numbers worked out by hand, and against a loop over single keys."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest

from numba_prefix.inputs.mask_types import alibi_mask, alibi_slopes
from numba_prefix.reference.oracle import _rounded, budget, naive, reference

NAN, INF = float("nan"), float("inf")


def paged(values: Any, block_size: int, *, dtype: Any = np.float16, poison: float = NAN) -> tuple[Any, Any]:
    """[numBlocks, block_size, heads, head_size] with the rows of `values` [kv_len, heads,
    head_size] spread over pages in reverse order, `poison` everywhere else; and the [1,
    maxBlockNum] table."""
    values = np.asarray(values)
    num_pages = -(-len(values) // block_size)
    cache = np.full((num_pages + 1, block_size, *values.shape[1:]), poison, dtype)
    table = np.arange(num_pages)[::-1].astype(np.int32)[None]
    for j, row in enumerate(values):
        cache[table[0, j // block_size], j % block_size] = row
    return cache, table


def uniform(q_len: int, values: Any, *, block_size: int = 3, heads: int = 1, **kwargs: Any) -> Any:
    """Rows of a zero query over the values [kv_len]: the average that the mask and the biases alone
    decide."""
    values = np.asarray(values, np.float32).reshape(-1, 1, 1)
    v_cache, table = paged(values, block_size)
    k_cache, _ = paged(np.zeros_like(values), block_size)
    query = np.zeros((q_len, heads, 1), np.float16)
    result = reference(query, k_cache, v_cache, table, [q_len], [len(values)], **kwargs)
    return result if kwargs.get("return_lse") else result[:, 0, 0] if heads == 1 else result[:, :, 0]


class TestVisibility:
    def test_causal_rows_see_up_to_their_position(self) -> None:
        np.testing.assert_allclose(uniform(3, [0, 1, 2, 3, 4]), [1, 1.5, 2], rtol=1e-15)

    def test_none_sees_everything(self) -> None:
        np.testing.assert_allclose(uniform(3, [0, 1, 2, 3, 4], mask_type="none"), [2, 2, 2], rtol=1e-15)

    def test_lse_counts_the_visible_keys(self) -> None:
        _, lse = uniform(3, [0, 1, 2, 3, 4], return_lse=True)
        np.testing.assert_allclose(lse[:, 0], np.log([3, 4, 5]), rtol=1e-15)

    @pytest.mark.parametrize("block_size", [1, 2, 3, 4, 5, 6, 16])
    def test_block_sizes(self, block_size: int) -> None:
        values = [7.0, 1, 2, 3, 9, 5]
        assert uniform(1, values, block_size=block_size) == pytest.approx([4.5], rel=1e-15)

    def test_one_key_is_copied_bit_for_bit(self) -> None:
        value = np.float16(0.1)
        assert uniform(1, [value]) == [np.float64(value)]

    def test_a_nan_in_the_future_stays_there(self) -> None:
        for bad in (NAN, INF, -INF):
            out = uniform(3, [1, 2, bad])
            assert out[:2].tolist() == [1, 1.5]
            assert not np.isfinite(out[2])

    def test_a_bad_key_reaches_the_rows_that_see_it(self) -> None:
        key = np.zeros((1, 4, 1, 2), np.float16)
        value = np.arange(8, dtype=np.float16).reshape(1, 4, 1, 2)
        key[0, 2, 0, 1] = NAN
        query = np.ones((4, 1, 2), np.float16)
        out, lse = reference(query, key, value, np.zeros((1, 1), np.int32), [4], [4], return_lse=True)
        assert out[:2, 0].tolist() == [[0, 1], [1, 2]]
        assert np.isnan(out[2:]).all()
        assert np.isnan(lse[2:]).all()

    def test_an_infinite_value_fills_its_column_only(self) -> None:
        key = np.zeros((1, 2, 1, 2), np.float16)
        value = np.array([[1, INF], [3, 2]], np.float16).reshape(1, 2, 1, 2)
        out = reference(np.zeros((2, 1, 2), np.float16), key, value, np.zeros((1, 1), np.int32), [2], [2])
        assert out[:, 0].tolist() == [[1, INF], [2, INF]]


class TestScores:
    def test_two_keys_by_hand(self) -> None:
        key = np.array([1.0, 3.0], np.float32).reshape(1, 2, 1, 1)
        value = np.array([10.0, 20.0], np.float32).reshape(1, 2, 1, 1)
        query = np.full((1, 1, 1), 2.0, np.float32)
        args = (query, key, value, np.zeros((1, 1), np.int32), [1], [2])
        out, lse = reference(*args, qk_scale=0.25, return_lse=True)  # scores 0.5 and 1.5
        weight = 1 / (1 + math.exp(-1))
        assert out.item() == pytest.approx(10 + 10 * weight, rel=1e-15)
        assert lse.item() == pytest.approx(math.log(math.exp(0.5) + math.exp(1.5)), rel=1e-15)

    def test_huge_scores(self) -> None:
        for key0, expected in ((12.5, 1.0), (-500.0, 1.0)):
            key = np.array([key0, 0.0], np.float32).reshape(1, 2, 1, 1)
            value = np.array([1.0, 100.0], np.float32).reshape(1, 2, 1, 1)
            query = np.array([-1000.0, 0.0], np.float32).reshape(2, 1, 1)
            out = reference(query, key, value, np.zeros((1, 1), np.int32), [2], [2])
            assert out.ravel().tolist() == [expected, 50.5]

    def test_the_product_may_pass_the_range_of_float16(self) -> None:
        key = np.full((1, 2, 1, 128), 64, np.float16)
        key[0, 1] = 63.96875
        value = np.broadcast_to(np.array([1, -1], np.float16).reshape(1, 2, 1, 1), key.shape)
        out = reference(np.full((1, 1, 128), 64, np.float16), key, value, np.zeros((1, 1), np.int32), [1], [2])
        assert (out == 1).all()


class TestAlibi:
    """Values from closed forms: q 2, kv 6, slope 0.5, V[j] = j."""

    LINEAR = (2.9056, 3.7729)
    SQRT = (2.50211, 3.14600)

    @pytest.mark.parametrize(
        ("kind", "expected"), [("alibi", LINEAR), ("alibi_sqrt", SQRT), ("alibi_left_align", LINEAR)]
    )
    @pytest.mark.parametrize("is_template", [False, True])
    def test_known_values(self, kind: str, expected: Any, is_template: bool) -> None:
        kwargs: dict[str, Any] = {"mask_type": kind, "slopes": [0.5]}
        if is_template:
            kwargs = {"mask_type": kind, "slopes": [0.5 if kind == "alibi_left_align" else -0.5]}
            kwargs["mask"] = alibi_mask(kind, np.float32)
        np.testing.assert_allclose(uniform(2, range(6), **kwargs), expected, atol=5e-5)

    @pytest.mark.parametrize("kind", ["alibi", "alibi_sqrt", "alibi_left_align"])
    @pytest.mark.parametrize("kv_len", [127, 128, 129, 256, 257, 300, 513])
    def test_the_template_is_the_generator(self, kind: str, kv_len: int) -> None:
        values = np.random.default_rng(kv_len).standard_normal(kv_len)
        slopes = np.array([0.04], np.float32)
        inlined = uniform(kv_len, values, mask_type=kind, slopes=slopes, block_size=16)
        template = alibi_mask(kind, np.float32)
        signed = slopes if kind == "alibi_left_align" else -slopes
        tiled = uniform(kv_len, values, mask_type=kind, slopes=signed, mask=template, block_size=16)
        # float32 template entries are rounded square roots; integers are exact
        np.testing.assert_allclose(tiled, inlined, rtol=0, atol=1e-6 if kind == "alibi_sqrt" else 1e-13)

    def test_template_values_are_honoured(self) -> None:
        """Distances 255, 256, 257 and 511 go beyond the template by arithmetic."""
        mask = np.zeros((256, 256), np.float32)
        mask[128:, :128] = 2.0
        kv_len = 512
        for kind, term in (
            ("alibi", lambda m, n: 2.0 + 128 * (m - n - 1)),
            ("alibi_sqrt", lambda m, n: math.sqrt(4.0 + 128 * (m - n - 1))),
            ("alibi_left_align", lambda m, n: 2.0 + 128 * n),
        ):
            diagonal = 128.0 * 3 if kind == "alibi_left_align" else 0.0
            scores = np.array([term(3, n) for n in range(3) for _ in range(128)] + [diagonal] * 128) * -0.01
            weights = np.exp(scores - scores.max())
            expected = weights @ np.arange(512) / weights.sum()
            found = uniform(1, range(kv_len), mask_type=kind, slopes=[-0.01], mask=mask, block_size=64)
            assert found[0] == pytest.approx(expected, rel=1e-6)  # -0.01 is a float32

    def test_slopes_none_is_one(self) -> None:
        mask = -alibi_mask("alibi", np.float32)
        expected = uniform(2, range(6), mask_type="alibi", slopes=[1.0])
        np.testing.assert_array_equal(uniform(2, range(6), mask_type="alibi", mask=mask), expected)

    def test_slope_0_is_plain_causal(self) -> None:
        """ATB's infinities above the diagonal times slope 0 would be NaN."""
        mask = alibi_mask("alibi", np.float16)
        values = np.arange(6, dtype=np.float32)
        out = uniform(6, values, mask_type="alibi", slopes=[0.0], mask=mask)
        np.testing.assert_array_equal(out, uniform(6, values))

    def test_a_mask_of_each_heads_own(self) -> None:
        """bias(h, p, j) = mask[h, p - 128 (j // 128), j % 128]."""
        kv_len, rng = 200, np.random.default_rng(0)
        mask = rng.standard_normal((2, kv_len, 128)).astype(np.float16)
        mask[:, 0, 1:] = NAN  # row 0 is never visible past its first key
        values = rng.standard_normal(kv_len).astype(np.float16)
        out = uniform(3, values, heads=2, mask_type="alibi", mask=mask, kv_head_num=1)
        for head in range(2):
            for i, p in enumerate((197, 198, 199)):
                scores = [float(mask[head, p - 128 * (j // 128), j % 128]) for j in range(p + 1)]
                weights = np.exp(scores)
                expected = weights @ values[: p + 1].astype(np.float64) / weights.sum()
                assert out[i, head] == pytest.approx(expected, rel=1e-12)

    def test_a_row_that_sees_nothing(self) -> None:
        mask = np.zeros((1, 3, 128), np.float32)
        mask[0, 1] = -INF
        mask[0, 2, 0] = -INF
        out, lse = uniform(3, [4, 2, NAN], mask_type="alibi", mask=mask, return_lse=True)
        assert out.ravel()[:2].tolist() == [4, 0]
        assert math.isnan(out.ravel()[2])
        assert lse.ravel().tolist() == [0, -INF, math.log(2)]


class TestHeadsAndBatches:
    def test_query_heads_share_kv_heads(self) -> None:
        value = np.broadcast_to(np.array([1, 2], np.float16)[:, None], (1, 3, 2, 4))
        query = np.zeros((2, 6, 4), np.float16)
        out = reference(query, np.zeros_like(value), value, np.zeros((1, 1), np.int32), [2], [3])
        assert out[0, :, 0].tolist() == [1, 1, 1, 2, 2, 2]
        flat_value = value.reshape(1, 3, 8)
        args = (query.reshape(2, 24), flat_value * 0, flat_value, np.zeros((1, 1), np.int32), [2], [3])
        flat = reference(*args, head_num=6, kv_head_num=2)
        assert flat.shape == (2, 24)
        np.testing.assert_array_equal(flat.reshape(out.shape), out)

    def test_a_ragged_batch_is_its_sequences(self) -> None:
        rng = np.random.default_rng(3)
        key, value = rng.standard_normal((2, 9, 4, 2, 8)).astype(np.float16)
        table = np.array([[3, 1, -1], [2**31 - 1, 0, 0], [5, 0, 3], [-1, -1, -1]], np.int32)
        q_len, kv_len = [2, 0, 5, 0], [7, 100, 9, 0]
        query = rng.standard_normal((7, 4, 8)).astype(np.float16)
        out, lse = reference(query, key, value, table, q_len, kv_len, return_lse=True)
        for b, rows in ((0, slice(0, 2)), (2, slice(2, 7))):
            alone, alone_lse = reference(
                query[rows], key, value, table[b : b + 1], [q_len[b]], [kv_len[b]], return_lse=True
            )
            np.testing.assert_array_equal(out[rows], alone)
            np.testing.assert_array_equal(lse[rows], alone_lse)

    def test_nothing_to_do(self) -> None:
        cache = np.zeros((2, 3, 1, 8), np.float16)
        for batch in (0, 2):
            table = np.zeros((batch, 0), np.int32)
            out = reference(np.zeros((0, 8), np.float16), cache, cache, table, [0] * batch, [5] * batch, head_num=1)
            assert (out.shape, out.dtype) == ((0, 8), np.float64)

    @pytest.mark.parametrize("mask_type", ["none", "causal", "alibi", "alibi_sqrt", "alibi_left_align"])
    def test_against_a_loop_over_single_keys(self, mask_type: str) -> None:
        rng = np.random.default_rng(7)
        q_len, kv_len, heads, kv_heads, head_size, scale = 6, 17, 4, 2, 5, 0.3
        slopes = alibi_slopes(heads) if mask_type.startswith("alibi") else None
        query = rng.standard_normal((q_len, heads, head_size)).astype(np.float32)
        keys, values = rng.standard_normal((2, kv_len, kv_heads, head_size)).astype(np.float32)
        k_cache, table = paged(keys, 4, dtype=np.float32)
        v_cache, _ = paged(values, 4, dtype=np.float32, poison=INF)
        out, lse = reference(
            query, k_cache, v_cache, table, [q_len], [kv_len], mask_type=mask_type, slopes=slopes, qk_scale=scale,
            return_lse=True,
        )  # fmt: skip
        for i in range(q_len):
            p = kv_len - q_len + i
            for head in range(heads):
                total, average = 0.0, np.zeros(head_size)
                for j in range(kv_len if mask_type == "none" else p + 1):
                    score = scale * float(query[i, head].astype(float) @ keys[j, head // 2].astype(float))
                    if slopes is not None:
                        distance = {"alibi": j - p, "alibi_sqrt": -math.sqrt(max(p - j, 0)), "alibi_left_align": j}
                        score += float(slopes[head]) * distance[mask_type]
                    total += math.exp(score)
                    average += math.exp(score) * values[j, head // 2].astype(float)
                np.testing.assert_allclose(out[i, head], average / total, rtol=1e-13, atol=1e-15)
                assert lse[i, head] == pytest.approx(math.log(total), rel=1e-13)


class TestInputs:
    def test_blocks_of_rows_do_not_show(self, monkeypatch: pytest.MonkeyPatch) -> None:
        values = np.random.default_rng(0).standard_normal(50)
        kwargs: dict[str, Any] = {"mask_type": "alibi_sqrt", "slopes": [0.3]}
        whole = uniform(40, values, **kwargs)
        monkeypatch.setattr(sys.modules[reference.__module__], "_SCORES_AT_ONCE", 150)
        np.testing.assert_allclose(uniform(40, values, **kwargs), whole, rtol=1e-14, atol=1e-15)

    def test_bfloat16(self) -> None:
        ml_dtypes = pytest.importorskip("ml_dtypes")
        cache = np.array([1.0078125, 1.015625], ml_dtypes.bfloat16).reshape(1, 2, 1, 1)
        query = np.zeros((1, 1, 1), ml_dtypes.bfloat16)
        args = (query, cache * 0, cache, np.zeros((1, 1), np.int32), [1], [2])
        assert reference(*args).item() == 1.01171875
        assert naive(*args).item() == 1.015625  # a tie, to even

    def test_torch_and_dlpack(self) -> None:
        torch = pytest.importorskip("torch")
        rng = np.random.default_rng(1)
        query, key = rng.standard_normal((3, 2, 4)), rng.standard_normal((2, 4, 1, 4))
        arrays = [torch.from_numpy(a).to(torch.bfloat16) for a in (query, key, key[::-1].copy())]
        table = np.array([[1, 0]])

        class Exporter:
            def __init__(self, tensor: Any) -> None:
                self.tensor = tensor

            def __dlpack__(self, **kwargs: Any) -> Any:
                return self.tensor.__dlpack__(**kwargs)

        args: Any = (*(a.float().numpy() for a in arrays), table, [3], [7])
        widened = reference(*args)
        args = (*arrays, torch.from_numpy(table), torch.tensor([3]), [7])
        assert np.array_equal(reference(*args), widened)
        args = (*map(Exporter, arrays), Exporter(torch.from_numpy(table)), [3], [7])
        assert np.array_equal(reference(*args), widened)

    def test_inputs_are_not_written(self) -> None:
        rng = np.random.default_rng(2)
        arrays = [rng.standard_normal((5, 2, 4)).astype(np.float16), *rng.standard_normal((2, 3, 2, 2, 4)).astype("f2")]
        copies = [a.copy() for a in arrays]
        for a in arrays:
            a.flags.writeable = False
        args: Any = (*arrays, np.array([[2, 0, 1]], np.int32), [5], [6])
        reference(*args, mask_type="alibi", slopes=[0.5, 0.25])
        for a, b in zip(arrays, copies, strict=True):
            np.testing.assert_array_equal(a, b)

    def test_it_validates(self) -> None:
        cache = np.zeros((2, 3, 1, 8), np.float16)
        query = np.zeros((2, 1, 8), np.float16)
        with pytest.raises(ValueError, match="block 2 for sequence 0, column 1"):
            reference(query, cache, cache, np.array([[0, 2]], np.int32), [2], [4])
        with pytest.raises(ValueError, match="seq_len: got lengths that sum to 3"):
            reference(query, cache, cache, np.array([[0, 1]], np.int32), [3], [4])
        with pytest.raises(TypeError, match="key: got dtype float32"):
            reference(query, cache.astype(np.float32), cache, np.array([[0, 1]], np.int32), [2], [4])


class TestNaive:
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
    def test_values_fit_the_output_dtype(self, dtype: str) -> None:
        item: Any = dtype if dtype != "bfloat16" else pytest.importorskip("ml_dtypes").bfloat16
        rng = np.random.default_rng(4)
        query, key, value = (rng.standard_normal(s).astype(item) for s in ((9, 2, 8), (4, 4, 1, 8), (4, 4, 1, 8)))
        args = (query, key, value, np.array([[3, 1, 0]], np.int32), [9], [11])
        ref, plain = reference(*args), naive(*args)
        assert plain.dtype == np.float32
        np.testing.assert_array_equal(plain, plain.astype(item).astype(np.float32))
        result = budget(plain.astype(item), ref, plain)
        assert result.ok
        assert result.max_error == np.abs(plain - ref).max()
        assert 0 < result.max_error <= {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-21}[dtype] * 4

    def test_rounding_to_bfloat16(self) -> None:
        ml_dtypes = pytest.importorskip("ml_dtypes")
        values = np.random.default_rng(5).standard_normal(1000).astype(np.float32)
        special = np.array([0, INF, 3.3895e38, 3.4e38, NAN], np.float32)
        values = np.concatenate([values, -values, special])
        expected = values.astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(_rounded(values, "bfloat16"), expected)

    def test_lse_is_float32(self) -> None:
        cache = np.zeros((1, 3, 1, 1), np.float16)
        args = (np.zeros((1, 1), np.float16), cache, cache, np.zeros((1, 1), np.int32), [1], [3])
        out, lse = naive(*args, head_num=1, return_lse=True)
        assert (out.shape, lse.dtype, lse.item()) == ((1, 1), np.float32, np.log(np.float32(3)))


class TestBudget:
    REF = np.array([[1.0, -2.0], [0.5, 4.0]])

    def test_formula(self) -> None:
        plain = self.REF + np.array([[0.0, 0.01], [0.0, -0.03]])
        result = budget((self.REF + 0.015).astype(np.float32), self.REF, plain)
        assert result.max_error == pytest.approx(0.015, rel=1e-5)
        assert result.max_allowed == pytest.approx(0.06 + 2 * 2**-23 * 4, rel=1e-12)
        assert result.mean_error == pytest.approx(0.015, rel=1e-5)
        assert result.mean_allowed == pytest.approx(0.01 + 2**-23 * 1.875, rel=1e-12)
        assert not result.ok  # by its mean

    def test_a_single_outlier(self) -> None:
        out = self.REF.astype(np.float16)
        assert budget(out, self.REF, self.REF).ok
        out[1, 1] += 0.125
        assert not budget(out, self.REF, self.REF).ok

    @pytest.mark.parametrize("bad", [NAN, INF, -INF])
    def test_what_is_not_finite_has_to_agree(self, bad: float) -> None:
        ref, out = self.REF.copy(), self.REF.astype(np.float32)
        ref[0, 0] = bad
        assert not budget(out, ref, ref).ok
        assert budget(out, ref, ref).max_error == INF
        assert not budget(ref.astype(np.float32), self.REF, self.REF).ok
        result = budget(ref.astype(np.float32), ref, ref)
        assert result.ok
        assert result.max_error == 0
        assert not budget(-ref.astype(np.float32), ref, ref).ok

    def test_kinds_and_shapes(self) -> None:
        torch = pytest.importorskip("torch")
        assert budget(torch.from_numpy(self.REF).bfloat16(), self.REF, self.REF).ok
        assert budget(np.zeros((0, 3), np.float16), np.zeros((0, 3)), np.zeros((0, 3))).ok
        with pytest.raises(ValueError, match=r"shape \(2,\)"):
            budget(np.zeros(2, np.float16), self.REF, self.REF)
        with pytest.raises(TypeError, match="float64"):
            budget(self.REF, self.REF, self.REF)
