"""The validators of arrays and options: what is accepted, what is worked out from it, and one
readable error for everything else."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
from arguments import (
    BATCH,
    BLOCK_SIZE,
    BLOCKS,
    FORM,
    HEAD_SIZE,
    HEADS,
    INF,
    KV_HEADS,
    NAN,
    TOKENS,
    WIDTH,
    OnGpu,
    given,
    refused,
    solve,
    zeros,
)

from numba_prefix.inputs.arrays import Tensor, as_numpy, bits
from numba_prefix.inputs.lengths import bad_block_error, check_block_ids
from numba_prefix.inputs.mask_types import MaskType
from numba_prefix.inputs.problem import Problem, static_problem, unit_stride


class TestShapes:
    def test_problem(self) -> None:
        problem, operands = solve()
        assert problem == Problem(
            "float16", TOKENS, BATCH, HEADS, KV_HEADS, HEAD_SIZE, BLOCKS, BLOCK_SIZE, WIDTH,
            MaskType.CAUSAL_MASK, "none", None, 0, False, 1.0,
        )  # fmt: skip
        assert problem.group_size == 2
        assert (operands.mask, operands.slopes, operands.out) == (None, None, None)
        with pytest.raises(FrozenInstanceError):
            problem.batch = 3  # type: ignore[misc]

    def test_flat_forms_are_the_same_problem(self) -> None:
        args = given(out=zeros(TOKENS, HEADS, HEAD_SIZE))
        rng = np.random.default_rng(0)
        for name in ("query", "key", "value"):
            args[name] = rng.standard_normal(args[name].shape).astype(np.float16)
        problem, operands = static_problem(**args)
        flat = {n: args[n].reshape(*args[n].shape[:-2], -1) for n in ("query", "key", "value", "out")}
        flat_problem, flat_operands = static_problem(**args | flat, head_num=HEADS, kv_head_num=KV_HEADS)
        assert flat_problem == problem
        for name in ("q", "k_cache", "v_cache", "out"):
            a, b = getattr(operands, name), getattr(flat_operands, name)
            assert (a.shape, a.strides, a.address) == (b.shape, b.strides, b.address)
            np.testing.assert_array_equal(bits(a), bits(b))

    def test_flat_forms_with_any_strides(self) -> None:
        wide = np.arange(2 * 10 * 64, dtype=np.float16).reshape(20, 64)[::-2, ::2]
        _, operands = solve(query=wide, head_num=4, kv_head_num=2)
        assert operands.q.shape == (10, 4, 8)
        np.testing.assert_array_equal(as_numpy(operands.q), wide.reshape(10, 4, 8))

    def test_forms_may_differ_between_key_and_value(self) -> None:
        problem, operands = solve(value=zeros(BLOCKS, BLOCK_SIZE, KV_HEADS * HEAD_SIZE))
        assert problem.kv_head_num == KV_HEADS
        assert operands.v_cache.shape == operands.k_cache.shape

    @pytest.mark.parametrize(
        ("kv_head_num", "cache_heads", "expected"), [(None, 2, 2), (2, 2, 2), (0, 4, 4), (1, 1, 1)]
    )
    def test_kv_head_num(self, kv_head_num: Any, cache_heads: int, expected: int) -> None:
        cache = zeros(BLOCKS, BLOCK_SIZE, cache_heads, HEAD_SIZE)
        flat = cache.reshape(BLOCKS, BLOCK_SIZE, -1)
        assert solve(key=cache, value=cache, kv_head_num=kv_head_num)[0].kv_head_num == expected
        if kv_head_num is not None:
            assert solve(key=flat, value=flat, kv_head_num=kv_head_num)[0].kv_head_num == expected

    def test_a_flat_cache_without_kv_head_num_has_head_num_heads(self) -> None:
        cache = zeros(BLOCKS, BLOCK_SIZE, HEADS * HEAD_SIZE)
        assert solve(key=cache, value=cache)[0].kv_head_num == HEADS

    @pytest.mark.parametrize("number", [4, np.int32(4), np.uint8(4)])
    def test_integers_of_any_kind(self, number: Any) -> None:
        assert solve(head_num=number)[0].head_num == 4

    def test_empty_things(self) -> None:
        nothing = zeros(0, HEADS, HEAD_SIZE)
        assert solve(query=nothing, out=nothing.copy())[0].num_tokens == 0
        assert solve(block_tables=zeros(0, 3, dtype=np.int32))[0].batch == 0
        assert solve(block_tables=zeros(2, 0, dtype=np.int32))[0].max_block_num == 0
        no_blocks = zeros(0, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
        assert solve(key=no_blocks, value=no_blocks)[0].num_blocks == 0

    @pytest.mark.parametrize("head_size", [1, 7, 16, 120, 256])
    def test_head_sizes(self, head_size: int) -> None:
        cache = zeros(2, 3, 1, head_size)
        assert solve(query=zeros(3, 1, head_size), key=cache, value=cache)[0].head_size == head_size

    @pytest.mark.parametrize(
        ("argument", "says", "changes"),
        [
            ("head_num", "got 3, expected 4", {"head_num": 3}),
            ("head_num", "got 0", {"head_num": 0}),
            ("head_num", "got -4", {"head_num": -4}),
            ("head_num", "got None", {"query": zeros(5, 32)}),
            ("query", "32 columns, expected a multiple of head_num 5", {"query": zeros(5, 32), "head_num": 5}),
            ("query", r"shape \(5,\)", {"query": zeros(5)}),
            ("query", r"shape \(5, 1, 4, 8\)", {"query": zeros(5, 1, 4, 8)}),
            ("query", "at least one head", {"query": zeros(5, 0, 8)}),
            ("query", "head size 0", {"query": zeros(5, 4, 0)}),
            ("query", "head size 257, expected 1 to 256", {"query": zeros(5, 4, 257)}),
            ("kv_head_num", "got 3, expected a divisor of head_num 4", {"kv_head_num": 3}),
            ("kv_head_num", "got 8", {"kv_head_num": 8}),
            ("kv_head_num", "got -1", {"kv_head_num": -1}),
            ("key", "kv_head_num 4", {"kv_head_num": 0}),
            ("key", "kv_head_num 4", {"kv_head_num": 4}),
            ("kv_head_num", "got 28", {"key": zeros(6, 3, 28, 8)}),
            ("key", "at least one head", {"key": zeros(6, 3, 0, 8)}),
            ("key", r"\(6, 3, 2, 9\)", {"key": zeros(6, 3, 2, 9)}),
            ("key", r"\(6, 3, 17\)", {"key": zeros(6, 3, 17), "kv_head_num": 2}),
            ("key", r"\(6, 48\)", {"key": zeros(6, 48)}),
            ("key", "block_size at least 1", {"key": zeros(6, 0, 2, 8)}),
            ("value", r"\(7, 3, 2, 8\), expected 6 blocks", {"value": zeros(7, 3, 2, 8)}),
            ("value", r"\(6, 4, 2, 8\), expected 6 blocks of 3", {"value": zeros(6, 4, 2, 8)}),
            ("value", r"\(6, 3, 1, 8\)", {"value": zeros(6, 3, 1, 8)}),
            ("block_tables", r"shape \(6,\)", {"block_tables": zeros(6, dtype=np.int32)}),
            ("block_tables", r"shape \(\)", {"block_tables": zeros(dtype=np.int32)}),
            ("key", "2147483648", {n: np.broadcast_to(zeros(1, 3, 2, 8), (2**31, 3, 2, 8)) for n in ("key", "value")}),
        ],
    )
    def test_refused(self, argument: str, says: str, changes: dict[str, Any]) -> None:
        refused(ValueError, argument, says, solve, **changes)

    @pytest.mark.parametrize("name", ["head_num", "kv_head_num"])
    @pytest.mark.parametrize("value", [True, 4.0, "4", np.float32(4), np.bool_(True), [4]])
    def test_counts_of_another_type(self, name: str, value: Any) -> None:
        solve(**{name: 4 if name == "head_num" else 2})  # must not be mistaken for what was seen before
        refused(TypeError, name, "expected an int", solve, **{name: value})


class TestDtypes:
    @pytest.mark.parametrize("dtype", [np.float16, np.float32, "bfloat16"])
    def test_accepted(self, dtype: Any) -> None:
        if dtype == "bfloat16":
            dtype = pytest.importorskip("ml_dtypes").bfloat16
        args = {n: a.astype(dtype) for n, a in given().items() if n != "block_tables"}
        assert solve(**args, out=zeros(TOKENS, HEADS, HEAD_SIZE, dtype=dtype))[0].dtype == np.dtype(dtype).name

    @pytest.mark.parametrize("dtype", [np.float64, np.int16, np.uint16, bool, np.complex64])
    def test_refused(self, dtype: Any) -> None:
        args = {n: a.astype(dtype) for n, a in given().items() if n != "block_tables"}
        refused(TypeError, "query", np.dtype(dtype).name, solve, **args)
        for name in ("key", "value"):
            refused(TypeError, name, "expected float16", solve, **{name: args[name]})

    def test_mixed(self) -> None:
        ml_dtypes = pytest.importorskip("ml_dtypes")
        refused(TypeError, "value", "bfloat16", solve, value=given()["value"].astype(ml_dtypes.bfloat16))
        out = zeros(TOKENS, HEADS, HEAD_SIZE, dtype=np.float32)
        refused(TypeError, "out", "float32, expected float16", solve, out=out)

    @pytest.mark.parametrize("name", ["query", "key", "value", "block_tables", "mask", "slopes", "out"])
    def test_no_array_at_all(self, name: str) -> None:
        slopes = None if name != "out" else [1.0] * HEADS
        refused(TypeError, name, "str", solve, **{"mask_type": "alibi", "slopes": slopes, name: "an array"})


class TestBlockTables:
    @pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.uint32, np.int64, np.uint64])
    def test_other_integer_types_are_cast(self, dtype: Any) -> None:
        table = np.array([[1, 2, 3], [4, 5, 0]], dtype)
        t = solve(block_tables=table)[1].block_tables
        assert t.dtype == "int32"
        assert t.owner is table
        np.testing.assert_array_equal(as_numpy(t), table)

    def test_int32_is_not_copied(self) -> None:
        table = zeros(4, 6, dtype=np.int32)[::2, ::2]
        t = solve(block_tables=table)[1].block_tables
        assert t.address == table.ctypes.data

    def test_values_never_wrap(self) -> None:
        table = np.array([[0, 2**32 + 1, 2**63 - 1], [0, -(2**40), -1]], np.int64)
        problem, operands = solve(block_tables=table)
        q_len, kv_len = np.array([3, 2]), np.array([4, 2])
        says = "4294967297 for sequence 0, column 1, expected 0 to 5"
        refused(ValueError, "block_tables", says, check_block_ids, problem, operands.block_tables, q_len, kv_len)
        check_block_ids(problem, operands.block_tables, np.array([3, 2]), np.array([3, 2]))

    @pytest.mark.parametrize("dtype", [np.float32, bool, np.float64])
    def test_refused_dtypes(self, dtype: Any) -> None:
        refused(TypeError, "block_tables", np.dtype(dtype).name, solve, block_tables=zeros(2, 3, dtype=dtype))

    def test_only_what_will_be_read_is_checked(self) -> None:
        table = np.array([[0, 1, -1], [2, -7, 99], [99, 99, 99], [5, 0, 99]], np.int32)
        problem, operands = solve(block_tables=table)
        t = operands.block_tables
        check_block_ids(problem, t, np.array([1, 1, 0, 1]), np.array([6, 3, 9, 4]))
        check_block_ids(problem, t, np.array([0, 0, 0, 0]), np.array([9, 9, 9, 9]))
        for q_len, kv_len, says in (
            ([1, 1, 0, 1], [7, 3, 9, 4], "block -1 for sequence 0, column 2"),
            ([1, 1, 0, 1], [6, 4, 9, 4], "block -7 for sequence 1, column 1"),
            ([1, 1, 1, 1], [6, 3, 1, 4], "block 99 for sequence 2, column 0"),
            ([1, 1, 0, 1], [6, 3, 9, 7], "block 99 for sequence 3, column 2"),
        ):
            with pytest.raises(ValueError, match=says):
                check_block_ids(problem, t, np.array(q_len), np.array(kv_len))

    def test_no_blocks_at_all(self) -> None:
        cache = zeros(0, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
        problem, operands = solve(key=cache, value=cache)
        assert FORM.match(str(bad_block_error(problem, operands.block_tables, 0, 0)))
        check_block_ids(problem, operands.block_tables, np.array([0, 0]), np.array([5, 0]))

    def test_torch_tables(self) -> None:
        torch = pytest.importorskip("torch")
        cache = torch.zeros(BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
        table = torch.tensor([[2**40, 1], [1, -5]])
        problem, operands = static_problem(torch.zeros(5, 4, 8), cache, cache, table)
        assert as_numpy(operands.block_tables).tolist() == [[2**31 - 1, 1], [1, -5]]
        assert str(2**40) in str(bad_block_error(problem, operands.block_tables, 0, 0))


class TestScale:
    @pytest.mark.parametrize("scale", [0.125, 1, 0, -2.5, 2.3e38, np.float16(0.5), np.float32(0.1), np.int8(3)])
    def test_accepted(self, scale: Any) -> None:
        found = solve(qk_scale=scale)[0].qk_scale
        assert type(found) is float
        assert found == float(scale)

    @pytest.mark.parametrize("scale", [NAN, INF, -INF, 2.4e38, -1e39, 10**400, np.float32(NAN)])
    def test_values(self, scale: Any) -> None:
        refused(ValueError, "qk_scale", "finite", solve, qk_scale=scale)

    @pytest.mark.parametrize("scale", [None, True, "1", 1j, [1.0], np.ones(1), np.bool_(True)])
    def test_types(self, scale: Any) -> None:
        refused(TypeError, "qk_scale", "real number", solve, qk_scale=scale)


class TestMaskAndSlopes:
    TEMPLATE = np.zeros((256, 256), np.float16)
    SLOPES = np.array([0.5, 0.25, 0.0, 0.125], np.float32)

    def test_forms(self) -> None:
        problem, operands = solve(mask_type="alibi", mask=self.TEMPLATE)
        assert (problem.mask_form, problem.mask_dtype, problem.mask_len, problem.has_slopes) == (
            "template", "float16", 0, False,
        )  # fmt: skip
        assert operands.mask is not None
        assert operands.mask.owner is self.TEMPLATE
        problem, operands = solve(mask_type=4, mask=zeros(4, 77, 128, dtype=np.float32), slopes=-self.SLOPES)
        assert (problem.mask_form, problem.mask_dtype, problem.mask_len) == ("heads", "float32", 77)
        assert (problem.has_slopes, operands.slopes) == (False, None)
        problem, operands = solve(mask_type=MaskType.ALIBI_COMPRESS_LEFT_ALIGN, slopes=self.SLOPES)
        assert (problem.mask_form, problem.mask_dtype, problem.has_slopes) == ("none", None, True)
        assert operands.slopes is not None
        assert operands.slopes.owner is self.SLOPES

    def test_norm_compress(self) -> None:
        problem, operands = solve(mask_type="mask_type_norm_compress", mask=zeros(128, 128))
        assert (problem.mask_type, problem.mask_form, operands.mask) == (MaskType.CAUSAL_MASK, "none", None)

    @pytest.mark.parametrize("slopes", [[0.5, 0.25, 0, 1], (0.5, np.float32(0.25), np.int8(0), 1.0)])
    def test_listed_slopes(self, slopes: Any) -> None:
        _, operands = solve(mask_type="alibi", slopes=slopes)
        assert operands.slopes is not None
        assert as_numpy(operands.slopes).tolist() == [0.5, 0.25, 0, 1]

    def test_negative_slopes_go_with_a_template(self) -> None:
        assert solve(mask_type="alibi", slopes=-self.SLOPES, mask=self.TEMPLATE)[0].has_slopes

    @pytest.mark.parametrize(
        ("error", "argument", "says", "changes"),
        [
            (ValueError, "mask_type", "got 7", {"mask_type": 7}),
            (ValueError, "mask", "mask_type NONE", {"mask_type": "none", "mask": TEMPLATE}),
            (ValueError, "mask", r"\(128, 128\)", {"mask": TEMPLATE}),
            (TypeError, "mask", "float64", {"mask": zeros(128, 128, dtype=np.float64)}),
            (TypeError, "mask", "bool", {"mask_type": 3, "mask": zeros(256, 256, dtype=bool)}),
            (ValueError, "mask", r"\(128, 128\), expected \(256, 256\)", {"mask_type": 3, "mask": zeros(128, 128)}),
            (ValueError, "mask", r"\(3, 77, 128\)", {"mask_type": 3, "mask": zeros(3, 77, 128)}),
            (ValueError, "mask", r"\(4, 77, 127\)", {"mask_type": 3, "mask": zeros(4, 77, 127)}),
            (ValueError, "mask", r"\(1, 1\)", {"mask_type": 3, "mask": zeros(1, 1)}),
            (ValueError, "slopes", "got None", {"mask_type": "alibi"}),
            (ValueError, "slopes", "only ALiBi", {"slopes": SLOPES}),
            (ValueError, "slopes", "only ALiBi", {"slopes": SLOPES, "mask_type": 0}),
            (ValueError, "slopes", r"\(3,\)", {"mask_type": 3, "slopes": SLOPES[:3]}),
            (ValueError, "slopes", r"\(1, 4\)", {"mask_type": 3, "slopes": SLOPES[None]}),
            (ValueError, "slopes", r"\(3,\)", {"mask_type": 3, "slopes": SLOPES[:3], "mask": zeros(4, 9, 128)}),
            (ValueError, "slopes", "-0.25 for head 1.*positive", {"mask_type": 4, "slopes": [1.0, -0.25, 0, 0]}),
            (ValueError, "slopes", "nan for head 2", {"mask_type": 4, "slopes": [1.0, 0, NAN, 0]}),
            (ValueError, "slopes", "inf for head 0", {"mask_type": 4, "slopes": [INF, 0, 0, 0], "mask": TEMPLATE}),
            (ValueError, "slopes", "inf for head 3", {"mask_type": 4, "slopes": [0, 0, 0, 1e39]}),
            (ValueError, "slopes", "too large", {"mask_type": 4, "slopes": [0, 0, 0, 10**400]}),
            (TypeError, "slopes", "float64", {"mask_type": 3, "slopes": SLOPES.astype(np.float64)}),
            (TypeError, "slopes", "float16", {"mask_type": 3, "slopes": SLOPES.astype(np.float16)}),
            (TypeError, "slopes", "bool for head 1", {"mask_type": 3, "slopes": [1.0, True, 1.0, 1.0]}),
            (TypeError, "slopes", "list for head 0", {"mask_type": 3, "slopes": [[1.0, 1.0]]}),
            (TypeError, "slopes", "float", {"mask_type": 3, "slopes": 1.0}),
        ],
    )
    def test_refused(self, error: Any, argument: str, says: str, changes: dict[str, Any]) -> None:
        refused(error, argument, says, solve, **changes)


class TestOut:
    def test_accepted(self) -> None:
        out = zeros(TOKENS, HEADS, 2 * HEAD_SIZE)[..., ::2]
        _, operands = solve(out=out)
        assert operands.out is not None
        assert operands.out.address == out.ctypes.data

    def test_shape_is_as_given(self) -> None:
        refused(ValueError, "out", r"\(5, 32\), expected \(5, 4, 8\)", solve, out=zeros(TOKENS, HEADS * HEAD_SIZE))

    def test_read_only_and_shared_elements(self) -> None:
        out = zeros(TOKENS, HEADS, HEAD_SIZE)
        out.flags.writeable = False
        refused(ValueError, "out", "read-only", solve, out=out)
        strided = np.lib.stride_tricks.as_strided(zeros(8), (TOKENS, HEADS, HEAD_SIZE), (0, 0, 2))
        refused(ValueError, "out", "share memory", solve, out=strided)
        record = np.zeros((TOKENS, HEADS, HEAD_SIZE), [("pad", "u1"), ("x", "<f2")])
        refused(ValueError, "out", "misaligned", solve, out=record["x"])

    def test_memory_of_its_own(self) -> None:
        args = given()
        refused(ValueError, "out", "shared with query", static_problem, **args, out=args["query"])
        part = args["key"].reshape(-1)[: args["query"].size].reshape(args["query"].shape)
        refused(ValueError, "out", "shared with key", static_problem, **args, out=part)
        fused = zeros(TOKENS, 2, HEADS, HEAD_SIZE)
        solve(query=fused[:, 0], out=fused[:, 1])


class TestDevices:
    def test_all_on_the_gpu(self) -> None:
        cache = OnGpu((BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_SIZE), "<f2")
        query, table = OnGpu((TOKENS, HEADS, HEAD_SIZE), "<f2"), OnGpu((BATCH, WIDTH), "<i4")
        problem, operands = static_problem(query, cache, cache, table, mask_type="alibi", slopes=[1.0] * HEADS)
        assert operands.q.device == operands.block_tables.device == "cuda:0"
        assert operands.slopes is not None
        assert operands.slopes.device == "cpu"
        assert problem.has_slopes

    @pytest.mark.parametrize(
        ("name", "shape", "typestr"),
        [
            ("key", (BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_SIZE), "<f2"),
            ("block_tables", (BATCH, WIDTH), "<i4"),
            ("mask", (256, 256), "<f2"),
            ("slopes", (HEADS,), "<f4"),
            ("out", (TOKENS, HEADS, HEAD_SIZE), "<f2"),
        ],
    )
    def test_mixed(self, name: str, shape: Any, typestr: str) -> None:
        changes: dict[str, Any] = {"mask_type": "alibi", "slopes": [1.0] * HEADS}
        refused(ValueError, name, "on cuda:0, expected one on cpu", solve, **changes | {name: OnGpu(shape, typestr)})

    def test_unreadable_on_the_gpu(self) -> None:
        cache = OnGpu((BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_SIZE), "<f2")
        args: dict[str, Any] = {"query": OnGpu((TOKENS, HEADS, HEAD_SIZE), "<f2"), "key": cache, "value": cache}
        refused(TypeError, "block_tables", "int64 on cuda:0", solve, **args, block_tables=OnGpu((2, 3), "<i8"))
        args |= {"block_tables": OnGpu((2, 3), "<i4"), "mask_type": "alibi"}
        refused(TypeError, "slopes", "expected slopes on the CPU", solve, **args, slopes=OnGpu((HEADS,), "<f4"))


class TestUnitStride:
    def test_dense_arrays_stay(self) -> None:
        for a in (zeros(4, 6, 8)[::2, ::-1], zeros(4, 6, 8)[..., :1], zeros(0, 2, 3)):
            t = solve(query=a, key=zeros(2, 1, 2, a.shape[2]), value=zeros(2, 1, 2, a.shape[2]))[1].q
            assert unit_stride(t) is t

    @pytest.mark.parametrize("view", [lambda a: a[..., ::2], lambda a: a[..., ::-2], lambda a: a[::2, ::-1, ::2]])
    def test_others_are_copied(self, view: Any) -> None:
        a = view(np.arange(5 * 4 * 16, dtype=np.float16).reshape(5, 4, 16))
        t = solve(query=a)[1].q
        dense = unit_stride(t)
        assert dense.strides[-1] == 1
        assert dense.is_copy
        assert not dense.is_writable
        assert dense.shape == t.shape
        np.testing.assert_array_equal(as_numpy(dense), a)

    def test_torch_and_flat_forms(self) -> None:
        torch = pytest.importorskip("torch")
        a = torch.arange(5 * 64, dtype=torch.bfloat16).reshape(5, 64)[:, ::2]
        cache = torch.zeros(2, 3, 2, 8, dtype=torch.bfloat16)
        _, operands = static_problem(a, cache, cache, torch.zeros(1, 1, dtype=torch.int32), head_num=4)
        dense: Tensor = unit_stride(operands.q)
        assert (dense.shape, dense.strides) == ((5, 4, 8), (32, 8, 1))
        expected = a.contiguous().view(torch.int16).numpy().view(np.uint16).reshape(5, 4, 8)
        np.testing.assert_array_equal(bits(dense), expected)
