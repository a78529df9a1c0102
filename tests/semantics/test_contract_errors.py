"""Section 5 of tests/contract.md: what is refused, with the argument's name, what was given and
what is expected."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from cases import DTYPES, INT_MAX, Case, make_case, run, same_bits

BF16 = DTYPES["bfloat16"]
EITHER = (TypeError, ValueError)


class Refusal(NamedTuple):
    what: str
    given: Callable[[Case], dict[str, Any]]
    error: Any
    says: tuple[str, ...]  # patterns that the message has to match, the argument's name first


def base() -> Case:
    """Two sequences, q = [3, 5], kv = [20, 37], 4 heads on 2 kv heads of 16, pages of 16,
    float16."""
    return make_case([3, 5], [20, 37], head_num=4, kv_head_num=2, dtype="float16")


def table(case: Case, row: int, column: int, value: int) -> dict[str, Any]:
    tables = case.block_tables.astype(np.int64)
    tables[row, column] = value
    return {"block_tables": tables if abs(value) > INT_MAX else tables.astype(np.int32)}


def lengths(name: str, *values: Any) -> Callable[[Case], dict[str, Any]]:
    return lambda c: {name: list(values)}


def alibi(**extra: Any) -> Callable[[Case], dict[str, Any]]:
    return lambda c: {"mask_type": "alibi"} | extra


SLOPES = np.float32([0.5, 0.25, 0.125, 0.0])
TEMPLATE = np.zeros((256, 256), np.float32)

LENGTHS = [
    Refusal("kv_shorter_than_q_first", lengths("kv_seq_len", 2, 37), ValueError, ("kv_seq_len", r"\b0\b", r"\b2\b", r"\b3\b")),
    Refusal("kv_shorter_than_q_second", lengths("kv_seq_len", 20, 4), ValueError, ("kv_seq_len", r"\b1\b", r"\b4\b", r"\b5\b")),
    Refusal("kv_beyond_the_table", lengths("kv_seq_len", 20, 1000), ValueError, ("kv_seq_len", r"\b1\b", r"\b1000\b")),
    Refusal("kv_beyond_without_q", lambda c: {"seq_len": [8, 0], "kv_seq_len": [20, -1]}, ValueError, ("kv_seq_len", "-1")),
    Refusal("sum_of_q", lengths("seq_len", 3, 4), ValueError, ("seq_len", r"\b7\b", r"\b8\b")),
    Refusal("cumulative_q", lengths("seq_len", 3, 8), ValueError, ("seq_len", r"\b11\b", r"\b8\b")),
    Refusal("negative_q", lengths("seq_len", 9, -1), ValueError, ("seq_len", "-1")),
    Refusal("negative_kv", lengths("kv_seq_len", 20, -37), ValueError, ("kv_seq_len", "-37")),
    Refusal("bool_q", lengths("seq_len", True, False), TypeError, ("seq_len", "bool")),
    Refusal("bool_array_kv", lambda c: {"kv_seq_len": np.array([True, True])}, TypeError, ("kv_seq_len", "bool")),
    Refusal("float_q", lengths("seq_len", 3.0, 5.0), TypeError, ("seq_len", "float")),
    Refusal("float_array_kv", lambda c: {"kv_seq_len": np.array([20.0, 37.0])}, TypeError, ("kv_seq_len", "float64")),
    Refusal("too_few_q", lengths("seq_len", 8), ValueError, ("seq_len", "1", "2")),
    Refusal("too_many_kv", lengths("kv_seq_len", 20, 37, 1), ValueError, ("kv_seq_len", "3", "2")),
    Refusal("q_2d", lambda c: {"seq_len": [[3, 5]]}, EITHER, ("seq_len",)),
    Refusal("q_0d", lambda c: {"seq_len": np.array(8)}, EITHER, ("seq_len",)),
    Refusal("q_none", lambda c: {"seq_len": None}, TypeError, ("seq_len",)),
    Refusal("kv_string", lambda c: {"kv_seq_len": "20"}, TypeError, ("kv_seq_len",)),
    Refusal("huge_q", lengths("seq_len", 2**31, 5), ValueError, ("seq_len",)),
    Refusal("huge_kv", lengths("kv_seq_len", 20, 2**32 + 37), ValueError, ("kv_seq_len", str(2**32 + 37))),
    Refusal("uint64_kv", lambda c: {"kv_seq_len": np.array([20, 2**64 - 1], np.uint64)}, ValueError, ("kv_seq_len",)),
    Refusal("bigger_than_any_integer_kv", lengths("kv_seq_len", 20, 10**30), EITHER, ("kv_seq_len",)),
]  # fmt: skip

TABLES = [
    Refusal("block_negative", lambda c: table(c, 0, 1, -1), ValueError, ("block_tables", r"\b0\b", r"\b1\b", "-1")),
    Refusal("block_too_big", lambda c: table(c, 1, 2, 7), ValueError, ("block_tables", r"\b1\b", r"\b2\b", r"\b7\b")),
    Refusal("block_wraps", lambda c: table(c, 1, 0, 2**32 + 1), ValueError, ("block_tables", r"\b1\b", r"\b0\b", str(2**32 + 1))),
    Refusal("block_wraps_below", lambda c: table(c, 0, 0, -(2**32)), ValueError, ("block_tables", str(-(2**32)))),
    Refusal("tables_1d", lambda c: {"block_tables": c.block_tables[0]}, ValueError, ("block_tables", r"\(\d+,\)")),
    Refusal("tables_of_one", lambda c: {"block_tables": c.block_tables[:1]}, ValueError, ("block_tables|seq_len", "1", "2")),
    Refusal("tables_float", lambda c: {"block_tables": c.block_tables.astype(float)}, TypeError, ("block_tables", "float64")),
    Refusal("tables_bool", lambda c: {"block_tables": c.block_tables > 0}, TypeError, ("block_tables", "bool")),
    Refusal("tables_none", lambda c: {"block_tables": None}, TypeError, ("block_tables",)),
]  # fmt: skip

ARRAYS = [
    *(
        Refusal(f"{name}_{dtype}", lambda c, n=name, d=dtype: {n: np.zeros(getattr(c, n).shape, d)}, TypeError, (name, dtype))
        for name in ("query", "key", "value")
        for dtype in ("float64", "int16", "uint16", "float32", "complex64", "bool")
    ),
    *(
        Refusal(f"{name}_bfloat16", lambda c, n=name: {n: getattr(c, n).astype(BF16)}, TypeError, (name, "bfloat16"))
        for name in ("query", "key", "value")
    ),
    *(
        Refusal(f"{name}_big_endian", lambda c, n=name: {n: getattr(c, n).astype(">f2")}, TypeError, (name,))
        for name in ("query", "key", "value")
    ),
    *(
        Refusal(f"{name}_{type(thing).__name__}", lambda c, n=name, t=thing: {n: t}, TypeError, (name,))
        for name in ("query", "key", "value")
        for thing in (None, [[1.0]], 3, "text")
    ),
    Refusal("query_1d", lambda c: {"query": c.query.ravel()}, ValueError, ("query", r"\(512,\)")),
    Refusal("query_4d", lambda c: {"query": c.query[None]}, ValueError, ("query",)),
    Refusal("key_2d", lambda c: {"key": c.key.reshape(-1, 32)}, ValueError, ("key",)),
    Refusal("value_5d", lambda c: {"value": c.value[None]}, ValueError, ("value",)),
    Refusal("value_unlike_key", lambda c: {"value": c.value[:-1]}, ValueError, ("value",)),
    Refusal("value_other_block_size", lambda c: {"value": c.value[:, :-1]}, ValueError, ("value",)),
    Refusal("value_other_heads", lambda c: {"value": c.value[:, :, :1]}, ValueError, ("value",)),
    Refusal("head_size_of_key", lambda c: {"key": c.key[..., :8], "value": c.value[..., :8]}, ValueError, ("key", "8", "16")),
    Refusal("head_size_257", lambda c: {n: np.zeros((*getattr(c, n).shape[:-1], 257), np.float16) for n in ("query", "key", "value")}, ValueError, ("query", "257", "256")),
    Refusal("head_size_0", lambda c: {n: getattr(c, n)[..., :0] for n in ("query", "key", "value")}, ValueError, ("head_size|query", "0")),
    Refusal("block_size_0", lambda c: {n: getattr(c, n)[:, :0] for n in ("key", "value")}, ValueError, ("block_size|key", "0")),
]  # fmt: skip

SCALARS = [
    Refusal("head_num_missing", lambda c: {"query": c.query.reshape(8, -1)}, EITHER, ("head_num",)),
    Refusal("head_num_wrong", lambda c: {"head_num": 5}, ValueError, ("head_num", "5", "4")),
    Refusal("head_num_0", lambda c: {"head_num": 0}, ValueError, ("head_num", "0")),
    Refusal("head_num_negative", lambda c: {"head_num": -4}, ValueError, ("head_num", "-4")),
    Refusal("head_num_bool", lambda c: {"head_num": True}, TypeError, ("head_num", "bool")),
    Refusal("head_num_float", lambda c: {"head_num": 4.0}, TypeError, ("head_num", "float")),
    Refusal("head_num_huge", lambda c: {"head_num": 2**70}, ValueError, ("head_num",)),
    Refusal("head_num_no_divisor", lambda c: {"query": c.query.reshape(8, -1), "head_num": 7}, ValueError, ("head_num|query", "7", "64")),
    Refusal("kv_head_num_unlike_cache", lambda c: {"kv_head_num": 4}, ValueError, ("kv_head_num", "4", "2")),
    Refusal("kv_head_num_0_unlike_cache", lambda c: {"kv_head_num": 0}, ValueError, ("kv_head_num|key", "4", "2")),
    Refusal("kv_head_num_no_divisor", lambda c: {"query": c.query[:, :3], "kv_head_num": 2}, ValueError, ("kv_head_num|head_num", "3", "2")),
    Refusal("kv_head_num_negative", lambda c: {"kv_head_num": -2}, ValueError, ("kv_head_num", "-2")),
    Refusal("kv_head_num_bool", lambda c: {"kv_head_num": False}, TypeError, ("kv_head_num", "bool")),
    Refusal("kv_head_num_float", lambda c: {"kv_head_num": 2.0}, TypeError, ("kv_head_num", "float")),
    *(
        Refusal(f"qk_scale_{scale!r}", lambda c, s=scale: {"qk_scale": s}, error, ("qk_scale", re.escape(says)))
        for scale, error, says in (
            (float("nan"), ValueError, "nan"),
            (float("inf"), ValueError, "inf"),
            (float("-inf"), ValueError, "inf"),
            (np.float32("nan"), ValueError, "nan"),
            (1e39, ValueError, "1e+39"),
            (True, TypeError, "bool"),
            ("0.5", TypeError, "str"),
            (None, TypeError, "None"),
            (1j, TypeError, "complex"),
        )
    ),
]  # fmt: skip

MASKS = [
    Refusal("mask_with_none", lambda c: {"mask_type": "none", "mask": TEMPLATE}, ValueError, ("mask",)),
    Refusal("mask_with_causal", lambda c: {"mask": TEMPLATE}, ValueError, ("mask", r"256")),
    Refusal("slopes_with_none", lambda c: {"mask_type": "none", "slopes": SLOPES}, ValueError, ("slopes",)),
    Refusal("slopes_with_causal", lambda c: {"slopes": SLOPES}, ValueError, ("slopes",)),
    Refusal("alibi_without_anything", alibi(), ValueError, ("slopes",)),
    Refusal("mask_shape", alibi(mask=TEMPLATE[:128]), ValueError, ("mask", r"\(128, 256\)", "256")),
    Refusal("mask_128", alibi(mask=TEMPLATE[:128, :128]), ValueError, ("mask", r"\(128, 128\)")),
    Refusal("mask_one_head_less", alibi(mask=np.zeros((3, 64, 128), np.float32)), ValueError, ("mask", "3", "4")),
    Refusal("mask_one_column_less", alibi(mask=np.zeros((4, 64, 127), np.float32)), ValueError, ("mask", "127", "128")),
    Refusal("mask_short", alibi(mask=np.zeros((4, 36, 128), np.float32)), ValueError, ("mask", "36", "37")),
    Refusal("mask_bool", alibi(mask=TEMPLATE > 0), TypeError, ("mask", "bool")),
    Refusal("mask_float64", alibi(mask=TEMPLATE.astype(float)), TypeError, ("mask", "float64")),
    Refusal("mask_bfloat16_for_float16", alibi(mask=TEMPLATE.astype(BF16)), TypeError, ("mask", "bfloat16")),
    Refusal("mask_list", alibi(mask=[[0.0]]), TypeError, ("mask",)),
    Refusal("slopes_short", alibi(slopes=SLOPES[:3]), ValueError, ("slopes", "3", "4")),
    Refusal("slopes_long", alibi(slopes=np.zeros(128, np.float32)), ValueError, ("slopes", "128", "4")),
    Refusal("slopes_per_kv_head", alibi(slopes=SLOPES[:2]), ValueError, ("slopes", "2", "4")),
    Refusal("slopes_2d", alibi(slopes=SLOPES[None]), ValueError, ("slopes",)),
    Refusal("slopes_float64", alibi(slopes=SLOPES.astype(float)), TypeError, ("slopes", "float64")),
    Refusal("slopes_int", alibi(slopes=np.ones(4, int)), TypeError, ("slopes", "int64")),
    Refusal("slopes_negative", alibi(slopes=-SLOPES), ValueError, ("slopes", "-0.5", "positive|>= 0")),
    Refusal("slopes_nan", alibi(slopes=SLOPES * np.float32("nan")), ValueError, ("slopes", "nan")),
    Refusal("slopes_inf", alibi(slopes=SLOPES + np.float32("inf")), ValueError, ("slopes", "inf")),
    Refusal("template_slopes_nan", alibi(mask=TEMPLATE, slopes=SLOPES * np.float32("nan")), ValueError, ("slopes", "nan")),
    Refusal("template_slopes_short", alibi(mask=TEMPLATE, slopes=SLOPES[:3]), ValueError, ("slopes", "3", "4")),
    Refusal("heads_slopes_long", alibi(mask=np.zeros((4, 64, 128), np.float32), slopes=np.zeros(5, np.float32)), ValueError, ("slopes", "5", "4")),
]  # fmt: skip


def refused(refusal: Refusal, target: str, case: Case, given: dict[str, Any]) -> None:
    with pytest.raises(refusal.error) as caught:
        run(case, target, **given)
    message = str(caught.value)
    assert caught.type in (TypeError, ValueError), (
        caught.type
    )  # no subclass such as numba's TypingError or UnicodeError
    for pattern in refusal.says:
        assert re.search(pattern, message), (pattern, message)
    assert not re.search(r"numba\.|typeof|nopython|Traceback", message.replace("numba_prefix", "")), message


@pytest.mark.parametrize("refusal", [*LENGTHS, *TABLES, *ARRAYS, *SCALARS, *MASKS], ids=lambda r: r.what)
def test_edge_refused(target: str, refusal: Refusal) -> None:
    """Wrong input: a ValueError or TypeError that names the argument; a good call right after it
    works."""
    case = base()
    refused(refusal, target, case, refusal.given(case))


DOOR: list[Refusal] = [
    Refusal("out_shape", lambda c: {"out": np.zeros((8, 4, 15), np.float16)}, ValueError, ("out", "15", "16")),
    Refusal("out_merged", lambda c: {"out": np.zeros((8, 64), np.float16)}, ValueError, ("out", r"\(8, 64\)")),
    Refusal("out_dtype", lambda c: {"out": np.zeros(c.query.shape, np.float32)}, TypeError, ("out", "float32", "float16")),
    Refusal("out_list", lambda c: {"out": [0.0]}, TypeError, ("out",)),
    Refusal("out_is_query", lambda c: {"out": c.query}, ValueError, ("out", "query")),
    Refusal("out_in_cache", lambda c: {"out": c.key.ravel()[: c.query.size].reshape(c.query.shape)}, ValueError, ("out", "key")),
    Refusal("target_unknown", lambda c: {"target": "gpu"}, ValueError, ("target", "gpu", "cpu")),
    Refusal("target_type", lambda c: {"target": 1}, EITHER, ("target",)),
    Refusal("validate_unknown", lambda c: {"validate": "none"}, ValueError, ("validate", "none", "shape")),
    Refusal("num_threads_0", lambda c: {"num_threads": 0}, ValueError, ("num_threads", "0")),
    Refusal("num_threads_negative", lambda c: {"num_threads": -1}, ValueError, ("num_threads", "-1")),
    Refusal("num_threads_float", lambda c: {"num_threads": 2.0}, TypeError, ("num_threads", "float")),
    Refusal("num_threads_bool", lambda c: {"num_threads": True}, TypeError, ("num_threads", "bool")),
    Refusal("workspace_type", lambda c: {"workspace": "text"}, TypeError, ("workspace",)),
]  # fmt: skip


@pytest.mark.parametrize("refusal", DOOR, ids=lambda r: r.what)
def test_edge_refused_at_the_door(target: str, refusal: Refusal) -> None:
    """The arguments that nbp.reference does not have."""
    case = base()
    refused(refusal, target, case, refusal.given(case))


def test_edge_refused_read_only_out(target: str) -> None:
    case = base()
    out = np.zeros(case.query.shape, np.float16)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out"):
        run(case, target, out=out)


@pytest.mark.parametrize("refusal", [LENGTHS[0], *TABLES[:3], MASKS[9]], ids=lambda r: r.what)
def test_edge_nothing_is_computed(target: str, refusal: Refusal) -> None:
    """The error comes before anything is computed: out keeps its contents, and the next good call
    is right."""
    case = base()
    expected = run(case, target)
    out = np.full(case.query.shape, 7, np.float16)
    with pytest.raises(refusal.error):
        run(case, target, out=out, **refusal.given(case))
    assert (out == 7).all()
    same_bits(run(case, target, out=out), expected)


def test_edge_bad_block_names_the_place(target: str) -> None:
    """Sequence 2 of 3, column 3 of a table of eight: -9."""
    case = make_case([1, 1, 1], [5, 100, 70], tail=1)
    tables = case.block_tables.copy()
    tables[2, 3] = -9
    with pytest.raises(ValueError, match=r"(?=.*block_tables)(?=.*\b2\b)(?=.*\b3\b)(?=.*-9\b)"):
        run(case, target, block_tables=tables)


def test_edge_bad_block_of_an_empty_sequence(target: str) -> None:
    """A sequence without query rows reads nothing, so its blocks are not looked at."""
    case = make_case([0, 1], [30, 5])
    tables = case.block_tables.copy()
    tables[0] = 10**6
    same_bits(run(case, target, block_tables=tables), run(case, target))


def test_edge_validate_shape(target: str) -> None:
    """validate="shape" skips the check of the ids' values and nothing else."""
    case = base()
    same_bits(run(case, target, validate="shape"), run(case, target))
    with pytest.raises(ValueError, match="kv_seq_len"):
        run(case, target, validate="shape", kv_seq_len=[2, 37])


def test_edge_validate_wait(target: str) -> None:
    """Where a run is over when it returns, "wait" is "full"."""
    case = make_case([2], [37], dtype="float16")
    same_bits(run(case, target, validate="wait"), run(case, target))
    case.block_tables[0, 1] = len(case.key)
    with pytest.raises(ValueError, match=r"block_tables: got block \d+ for sequence 0, column 1"):
        run(case, target, validate="wait")


def test_edge_gradient(target: str) -> None:
    """Tensors that ask for a gradient are refused while gradients are on: there is none."""
    torch = pytest.importorskip("torch")
    case = base()
    query = torch.from_numpy(case.query).requires_grad_()
    with pytest.raises(ValueError, match=r"query.*grad"):
        run(case, target, query=query)
    with torch.no_grad():
        run(case, target, query=query)
