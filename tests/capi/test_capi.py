"""The C interface, called from ctypes: values, memory, operations, statuses and texts."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import c_side
import numpy as np
import pytest
from c_side import compute, destroy, last_error, nan_like, plan, problem, tensor
from cases import DTYPES, MASK_FORMS, Case, make_case, run, same_bits, with_mask

import numba_prefix as nbp
from numba_prefix.capi.descriptors import MAX_DIMS, CContext
from numba_prefix.capi.status import MOST_TEXTS, Status, remember, status_of
from numba_prefix.cpu.target import CpuTarget
from numba_prefix.front.operation import TARGETS

GUARD = 512
OK = Status.NO_ERROR


def small(**extra: Any) -> Case:
    """qk_scale is 0.25, which float32 holds exactly."""
    return make_case([3, 0, 5], [20, 4, 37], **({"head_num": 4, "kv_head_num": 2, "dtype": "float16"} | extra))


# --- values


@pytest.mark.parametrize("form", MASK_FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_as_python(dtype: str, form: str) -> None:
    case = with_mask(small(dtype=dtype), form)
    out = nan_like(case.query)
    compute(problem(case, out))
    same_bits(out, run(case, "cpu"))


def test_scale_that_float32_rounds() -> None:
    """qkScale is a float."""
    case = small(qk_scale=0.1)
    out = nan_like(case.query)
    compute(problem(case, out))
    same_bits(out, run(case, "cpu", qk_scale=float(np.float32(0.1))))


def spread(array: np.ndarray, axis: int, fill: float = np.nan) -> np.ndarray:
    """The same elements, every second one along an axis of a larger array."""
    shape = list(array.shape)
    shape[axis] *= 2
    wide = np.full(shape, 7 if array.dtype.kind in "iu" else fill, array.dtype)
    view = wide[(*[slice(None)] * (axis % array.ndim), slice(None, None, 2))]
    view[...] = array
    return view


STRIDED: dict[str, Callable[[Case], dict[str, Any]]] = {
    "heads first": lambda c: {
        name: np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
        for name, x in (("key", c.key), ("value", c.value))
    },
    "backwards": lambda c: {"query": c.query[::-1].copy()[::-1], "key": c.key[::-1, ::-1].copy()[::-1, ::-1]},
    "rows apart": lambda c: {
        "query": spread(c.query, 0),
        "value": spread(c.value, 1),
        "blockTables": spread(c.block_tables, 0),
    },
    "last axis apart": lambda c: {"query": spread(c.query, -1), "key": spread(c.key, -1)},
    "tables by column": lambda c: {"blockTables": np.asfortranarray(c.block_tables)},
    "int64 tables": lambda c: {"blockTables": c.block_tables.astype(np.int64)},
    "joined axes": lambda c: {
        "query": c.query.reshape(len(c.query), -1),
        "key": c.key.reshape(*c.key.shape[:2], -1),
        "value": c.value.reshape(*c.value.shape[:2], -1),
    },
    "mask and slopes": lambda c: {"mask": spread(c.mask, 1), "slopes": spread(c.slopes, 0)},
}


@pytest.mark.parametrize("how", STRIDED)
def test_strided_inputs(how: str) -> None:
    case = with_mask(small(), "alibi-template")
    arrays = STRIDED[how](case)
    shape = arrays["query"].shape if how == "joined axes" else case.query.shape
    out = np.full(shape, np.nan, np.float16)
    before = {name: x.copy() for name, x in arrays.items()}
    compute(problem(case, out, **{name: tensor(x) for name, x in arrays.items()}))
    same_bits(out.reshape(case.query.shape), run(case, "cpu"))
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_strided_output(axis: int) -> None:
    """Rows, heads or elements apart: written in place, and what lies between them stays."""
    case = small()
    out = spread(np.zeros_like(case.query), axis, fill=7.0)
    compute(problem(case, out))
    same_bits(out, run(case, "cpu"))
    assert np.count_nonzero(out.base == 7) >= out.size
    between = out.base[(*[slice(None)] * axis, slice(1, None, 2))]
    assert (between == 7).all()


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64"])
def test_lengths(dtype: str) -> None:
    """Any of three types, strided, and copied by the first phase; arrays are read by the second."""
    case = small()
    q_len, kv_len = (spread(np.array(x, dtype), 0) for x in (case.seq_len, case.kv_seq_len))
    out, query = nan_like(case.query), case.query.copy()
    given = {"seqLen": tensor(q_len), "kvSeqLen": tensor(kv_len), "query": tensor(query)}
    status, size, op = plan(problem(case, out, **given))
    assert status == OK, last_error()
    q_len[...], kv_len[...] = 99, 0
    query *= np.float16(0.5)
    assert c_side.run(np.empty(size, np.uint8), size, op) == OK
    same_bits(out, run(replace(case, query=query), "cpu"))
    assert destroy(op) == OK


def test_kv_head_num_0_is_head_num() -> None:
    case = small(kv_head_num=4)
    out = nan_like(case.query)
    compute(problem(case, out, kvHeadNum=0))
    same_bits(out, run(case, "cpu"))


def test_nothing_to_do() -> None:
    """No tokens: no workspace, and data may be NULL."""
    case = make_case([0], [5], head_num=2)
    status, size, op = plan(problem(case, np.empty_like(case.query), query=tensor(case.query, data=None)))
    assert (status, size) == (OK, 0), last_error()
    assert c_side.run(None, 0, op) == OK
    assert destroy(op) == OK


# --- memory


@pytest.mark.parametrize("num_threads", [1, 3])
def test_exact_workspace(num_threads: int) -> None:
    """Exactly that many bytes at odd alignments, nothing around them or around the output; the size
    is Python's."""
    case = make_case([130, 1], [190, 3000], head_num=4, kv_head_num=2, dtype="bfloat16")
    expected = run(case, "cpu")
    around = np.full(case.query.size + 2 * GUARD, 7, case.query.dtype)
    out = around[GUARD:-GUARD].reshape(case.query.shape)
    context = CContext(num_threads, TARGETS.index("cpu"))
    status, size, op = plan(problem(case, out), context=context)
    assert status == OK, last_error()
    arrays = (case.query, case.key, case.value, case.block_tables)
    same, _ = nbp.self_attention_prefix_encoder_get_workspace_size(
        *(*arrays, None, case.seq_len, case.kv_seq_len, None, 9, 4, 2, case.qk_scale, np.empty_like(out)),
        nbp.Context("cpu", num_threads),
    )
    assert size == same
    for alignment in (0, 1, 31, 63):
        raw = np.full(size + 2 * GUARD + 64, 0xFF, np.uint8)
        begin = GUARD + alignment
        out[...] = np.nan
        assert c_side.run(raw[begin : begin + size], size, op, context) == OK
        same_bits(out, expected)
        assert (raw[:begin] == 0xFF).all() and (raw[begin + size :] == 0xFF).all()
        assert (around[:GUARD] == 7).all() and (around[-GUARD:] == 7).all()
    out[...] = 7
    assert c_side.run(np.empty(size, np.uint8), size - 1, op) == Status.ERROR_INVALID_WORKSPACE_SIZE
    assert last_error() == f"workspace_size: got {size - 1} bytes, expected at least {size}"
    assert c_side.run(None, size, op) == Status.ERROR_INVALID_WORKSPACE_ADDR
    assert last_error() == f"workspace: got NULL, expected the address of {size} bytes"
    assert (around == 7).all()
    assert destroy(op) == OK


# --- operations


def test_operation_runs_again_and_is_planned_anew() -> None:
    """With other contents, with other arguments behind the same handle; an error leaves it as it
    was."""
    case, other = small(), small(seed=1, dtype="float32")
    out, other_out = nan_like(case.query), nan_like(other.query)
    _, size, op = plan(problem(case, out))
    workspace = np.empty(size, np.uint8)
    for _ in range(2):
        out[...] = np.nan
        assert c_side.run(workspace, size, op) == OK
        same_bits(out, run(case, "cpu"))
    status, written, same = plan(problem(other, other_out, maskType=1), op)
    assert (status, written, same) == (Status.ERROR_INVALID_PARAM, -1, op)
    out[...] = np.nan
    assert c_side.run(workspace, size, op) == OK
    same_bits(out, run(case, "cpu"))
    status, size, same = plan(problem(other, other_out), op)
    assert (status, same) == (OK, op)
    assert c_side.run(np.empty(size, np.uint8), size, op) == OK
    same_bits(other_out, run(other, "cpu"))
    assert destroy(op) == OK


def test_block_ids_are_checked_at_every_run() -> None:
    case = small()
    table, out = case.block_tables.copy(), nan_like(case.query)
    _, size, op = plan(problem(case, out, blockTables=tensor(table)))
    table[2, 1] = 1000
    assert c_side.run(np.empty(size, np.uint8), size, op) == Status.ERROR_INVALID_PARAM
    assert re.match("block_tables: got block 1000 for sequence 2, column 1, expected ", last_error())
    assert np.isnan(out).all()
    assert destroy(op) == OK


def test_bad_handles() -> None:
    """NULL, never made, destroyed: for a run, for planning anew, and for destroying."""
    case = small()
    _, size, op = plan(problem(case, nan_like(case.query)))
    assert destroy(op) == OK
    workspace = np.empty(size, np.uint8)
    for handle in (None, 1, 2**64 - 1, op):
        for status in (c_side.run(workspace, size, handle), destroy(handle)):
            assert status == Status.ERROR_INVALID_OPERATION_ADDR
            assert re.match(r"op: got (NULL|0x\w+), expected an operation", last_error())
        if handle is not None:
            status, written, same = plan(problem(case, nan_like(case.query)), handle)
            assert (status, written, same) == (Status.ERROR_INVALID_OPERATION_ADDR, -1, handle)


def test_one_operation_on_several_threads() -> None:
    """Each with its own workspace (ctypes has no GIL during a call); all write the same bits."""
    case = make_case([200, 1], [300, 2500], head_num=4, kv_head_num=2, head_size=64, dtype="float16")
    expected, out = run(case, "cpu", qk_scale=0.125), nan_like(case.query)
    _, size, op = plan(problem(case, out))

    def calls(number: int) -> set[int]:
        workspace = np.full(size, number, np.uint8)
        return {c_side.run(workspace, size, op) for _ in range(10)}

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(calls, range(4))) == [{OK}] * 4
    same_bits(out, expected)
    assert destroy(op) == OK


def test_context() -> None:
    case = small()
    out = nan_like(case.query)
    compute(problem(case, out, context=CContext(2, TARGETS.index("auto"))))
    same_bits(out, run(case, "cpu"))
    compute(problem(case, out, context=CContext(0, TARGETS.index("reference"))))
    same_bits(out, run(case, "reference"))
    _, size, op = plan(problem(case, out))
    workspace = np.empty(size, np.uint8)
    assert c_side.run(workspace, size, op, CContext(0, TARGETS.index("reference"))) == Status.ERROR_INVALID_PARAM
    assert last_error().startswith("context: got target 'reference', expected 'cpu'")
    assert destroy(op) == OK


# --- statuses

X = np.zeros(64, np.float16)
HUGE = 2**62
DTYPE, DIM, SIZE = Status.ERROR_INVALID_TENSOR_DTYPE, Status.ERROR_INVALID_TENSOR_DIM, Status.ERROR_INVALID_TENSOR_SIZE
ADDR, DIM_NUM, PARAM = Status.ERROR_INVALID_TENSOR_ADDR, Status.ERROR_INVALID_TENSOR_DIM_NUM, Status.ERROR_INVALID_PARAM
REQUIRED = ("query", "key", "value", "blockTables", "seqLen", "kvSeqLen", "attnOut")
# Argument, what it becomes (a descriptor's fields, an array, or a value), status, and the beginning
# of the text.
REFUSED: list[tuple[str, Any, Status, str]] = [
    *[(name, None, ADDR, r"\w+: got NULL, expected a tensor") for name in REQUIRED],
    *[(name, {"data": None}, ADDR, r"\w+: got NULL for data") for name in REQUIRED],
    *[(name, {"dims": None}, DIM, r"\w+: got NULL for dims") for name in REQUIRED],
    *[("query", {"num_dims": n}, DIM_NUM, f"query: got {n} axes, expected 1 to {MAX_DIMS}") for n in (-1, 0, 9, 2**31 - 1)],
    *[("key", {"dtype": code}, DTYPE, f"key: got dtype code {code}, expected one of 0 .float32.") for code in (-1, 5, 28)],
    ("query", {"dims": (8, -4, 16)}, DIM, r"query: got shape \(8, -4, 16\)"),
    ("query", {"dims": (HUGE, 4, 16)}, SIZE, "query: got shape .* expected memory that can be addressed"),
    ("key", {"dims": (0, HUGE, HUGE, 2)}, SIZE, "key: got shape"),
    ("query", {"strides": (HUGE, 16, 1)}, SIZE, "query: got shape"),
    ("query", {"strides": (-HUGE, 16, 1)}, SIZE, "query: got shape"),
    ("value", {"device": 1}, ADDR, "value: got device 1"),
    ("query", {"data": X.ctypes.data + 1}, ADDR, r"query: got data at 0x\w+, expected a multiple of 2"),
    ("kvSeqLen", {"data": X.ctypes.data + 2}, ADDR, r"kv_seq_len: got data at 0x\w+, expected a multiple of 4"),
    ("query", X.reshape(4, 4, 2, 2), DIM, "query: got shape"),
    ("query", X.astype(np.float64), DTYPE, "query: got dtype float64"),
    ("key", np.zeros((9, 16, 2, 8), np.float16), DIM, "key: got shape"),
    ("value", np.zeros((9, 16, 2, 16), np.float32), DTYPE, "value: got dtype float32"),
    ("blockTables", np.zeros((3, 4), np.float32), DTYPE, "block_tables: got dtype float32"),
    ("blockTables", np.zeros(3, np.int32), DIM, "block_tables: got shape"),
    ("blockTables", np.full((3, 5), 999, np.int32), PARAM, "block_tables: got block 999"),
    ("mask", np.zeros((4, 4), np.float16), DIM, "mask: got shape|mask: got a mask"),
    ("slopes", np.zeros(4, np.float32), PARAM, "slopes: got slopes"),
    ("seqLen", np.array([3, 0, 4], np.int32), PARAM, "seq_len: got lengths that sum to 7"),
    ("seqLen", np.array([3, 0], np.int32), DIM, "seq_len: got shape"),
    ("kvSeqLen", np.array([20, 4, -1], np.int32), PARAM, "kv_seq_len: got -1 for sequence 2"),
    ("kvSeqLen", np.array([20.0, 4.0, 37.0], np.float32), DTYPE, "kv_seq_len: got dtype float32"),
    ("attnOut", np.zeros((8, 4, 16), np.float32), DTYPE, "attn_out: got dtype float32"),
    ("attnOut", np.zeros((8, 4, 15), np.float16), DIM, "out: got shape"),
    ("attnOut", {"strides": (0, 16, 1)}, PARAM, "out: got strides"),
    ("maskType", 6, PARAM, "mask_type: got 6, expected one of 0 NONE"),
    ("headNum", 3, PARAM, "head_num: got 3"),
    ("kvHeadNum", 3, PARAM, "kv_head_num: got 3"),
    ("kvHeadNum", -2, PARAM, "kv_head_num: got -2"),
    ("qkScale", float("nan"), PARAM, "qk_scale: got nan"),
    ("context", CContext(-1, 0), PARAM, "num_threads: got -1"),
    ("context", CContext(0, 9), PARAM, r"context: got target 9, expected one of 0 \(auto\)"),
    ("context", CContext(0, TARGETS.index("cuda")), Status.ERROR_RT_FAIL, "target: got 'cuda'"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "status", "text"), REFUSED, ids=[f"{name}-{n}" for n, (name, *_) in enumerate(REFUSED)]
)
def test_refused(name: str, value: Any, status: Status, text: str) -> None:
    """A status and a text; no size, no handle, nothing written."""
    case = small()
    out = nan_like(case.query)
    arguments = problem(case, out)
    if isinstance(value, dict):
        arguments[name] = tensor(arguments[name].array, **value)
    else:
        arguments[name] = tensor(value) if isinstance(value, np.ndarray) else value
    assert plan(arguments) == (status, -1, None), last_error()
    assert re.match(text, last_error()), last_error()
    assert np.isnan(out).all()


def test_null_result_pointers() -> None:
    function = ctypes.CFUNCTYPE(
        *[ctypes.c_int32, *[ctypes.c_void_p] * 8, *[ctypes.c_int] * 3, ctypes.c_float, *[ctypes.c_void_p] * 4]
    )(c_side.api.AtbSelfAttentionPrefixEncoderGetWorkspaceSize)
    number = ctypes.c_uint64()
    place = ctypes.addressof(number)
    assert function(*[None] * 8, 9, 4, 2, 1.0, None, None, place, None) == PARAM
    assert last_error().startswith("workspace_size: got NULL")
    assert function(*[None] * 8, 9, 4, 2, 1.0, None, place, None, None) == Status.ERROR_INVALID_OPERATION_ADDR
    assert last_error().startswith("op: got NULL")


def test_strides_that_no_element_needs() -> None:
    """Of axes of length 1 and of empty arrays: any number."""
    case = make_case([1], [5], head_num=4)
    out = nan_like(case.query)
    far = -(2**63)
    compute(
        problem(case, out, query=tensor(case.query, strides=(far, 16, 1)), attnOut=tensor(out, strides=(far, 16, 1)))
    )
    same_bits(out, run(case, "cpu"))


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("x: got 1, expected 2"), PARAM),
        (ValueError("array is too big"), Status.ERROR_INTERNAL_ERROR),
        (TypeError("unsupported operand"), Status.ERROR_INTERNAL_ERROR),
        (ZeroDivisionError(), Status.ERROR_INTERNAL_ERROR),
        (MemoryError(), Status.ERROR_OUT_OF_HOST_MEMORY),
    ],
)
def test_status_of_other_errors(error: Exception, status: Status) -> None:
    assert status_of(error) == status


def test_fault_of_the_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception that nobody expects is a status too, with its name where it says nothing."""
    case = small()
    out = nan_like(case.query)
    _, size, op = plan(problem(case, out))
    for error, text in ((ZeroDivisionError(), "ZeroDivisionError"), (RuntimeError("öd"), r"\xf6d")):

        def failing(*_: Any, error: Exception = error) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(CpuTarget, "run", failing)
            assert c_side.run(np.empty(size, np.uint8), size, op) == Status.ERROR_INTERNAL_ERROR
            assert last_error() == text
    assert np.isnan(out).all()
    assert c_side.run(np.empty(size, np.uint8), size, op) == OK
    same_bits(out, run(case, "cpu"))
    assert destroy(op) == OK


def test_last_error_belongs_to_a_thread() -> None:
    assert destroy(None) == Status.ERROR_INVALID_OPERATION_ADDR
    text = last_error()
    assert text.startswith("op: got NULL")
    seen: list[str] = []
    other = threading.Thread(target=lambda: seen.append(last_error()))
    other.start()
    other.join()
    assert seen == [""] and last_error() == text
    for size in (0, 1, 5):
        length, raw = c_side.last_error_into(size)
        assert length == len(text)
        written = text[: size - 1].encode() + b"\0" if size else b""
        assert raw == written + b"x" * (100 - len(written))


def test_texts_of_threads_that_are_gone_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba_prefix.capi import status

    texts: dict[int, str] = {}
    monkeypatch.setattr(status, "_texts", texts)
    idents = iter(range(MOST_TEXTS * 2))
    monkeypatch.setattr(status.threading, "get_ident", lambda: next(idents))
    for _ in range(MOST_TEXTS * 2):
        remember("a text")
    assert MOST_TEXTS // 2 <= len(texts) <= MOST_TEXTS and max(texts) == MOST_TEXTS * 2 - 1
