"""Arguments and files that make no sense: only documented exceptions and exit codes come of them,
and nothing crashes."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import fractions
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import check, make_case, run, same_bits
from faults import fault
from fuzz_npz import Reader, corpus, fuzz
from hypothesis import given
from hypothesis import strategies as st

import numba_prefix as nbp

DOCUMENTED = (TypeError, ValueError, nbp.TargetUnavailableError)
GOOD = make_case([3, 1], [9, 20], head_num=4, kv_head_num=2, head_size=8, block_size=4, dtype="float16")
EXPECTED: dict[str, Any] = {}


class BadDLPack:
    def __dlpack__(self, **_: Any) -> Any:
        raise RuntimeError("no")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


class NoCapsule(BadDLPack):
    def __dlpack__(self, **_: Any) -> Any:
        return 7


class Mine(np.ndarray):
    """A subclass, which is an array all the same."""


SHAPES = st.one_of(
    st.sampled_from(
        [(), (0,), (4, 4, 8), (4, 32), (0, 4, 8), (4, 0, 8), (4, 4, 0), (9, 4, 2, 8), (9, 4, 16), (2, 5), (256, 256)]
    ),
    st.lists(st.integers(0, 9), max_size=5).map(tuple),
)
ARRAY_DTYPES = st.sampled_from(
    ["f2", "f4", "f8", ">f2", ">i4", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "?", "c8", "O", "U3", "S2", "M8[s]", "V2"]
    + ["f2,f4", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]
)  # fmt: skip
NUMBERS = st.one_of(
    st.integers(-3, 12),
    st.sampled_from([2**31 - 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**40, 1 << 40]),
    st.floats(),
    st.sampled_from(
        [
            1e-45,
            3.4e38,
            1e300,
            np.float32(2),
            np.int64(4),
            np.uint8(3),
            np.float16(1),
            np.bool_(True),
            np.float64("nan"),
        ]
    ),
    st.sampled_from([fractions.Fraction(1, 3), decimal.Decimal("0.1"), 1j, True, False]),
)


@st.composite
def arrays(draw: Any) -> Any:
    """Arrays of odd shapes, dtypes, orders and strides, with odd values."""
    made = np.zeros(draw(SHAPES), draw(ARRAY_DTYPES))
    with contextlib.suppress(TypeError, ValueError, OverflowError), np.errstate(all="ignore"):
        made[...] = draw(st.sampled_from([0, 1, -1, 5, 300, float("nan"), float("inf"), -(2**31)]))
    change: Callable[[Any], Any] = draw(
        st.sampled_from(
            [
                lambda a: a, lambda a: a[::2] if a.ndim else a, lambda a: a[::-1] if a.ndim else a, lambda a: a.T,
                lambda a: a.view(Mine), np.ma.masked_array, lambda a: np.broadcast_to(a, (2, *a.shape)), np.asfortranarray,
                lambda a: a[..., :1], read_only, list, memoryview, lambda a: a.tolist(), misaligned,
            ]
        )
    )  # fmt: skip
    try:
        return change(made)
    except (TypeError, ValueError, IndexError):
        return made


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


def misaligned(array: Any) -> Any:
    if array.dtype.hasobject:
        return array
    return np.frombuffer(b"\0" + array.tobytes(), np.uint8)[1:].view(array.dtype).reshape(array.shape)


THINGS = st.one_of(
    st.none(),
    NUMBERS,
    arrays(),
    st.builds(bytearray, st.sampled_from([0, 4000, 1 << 16])),
    st.builds(iter, st.just([3, 1])),
    st.text(max_size=4),
    st.binary(max_size=4),
    st.lists(NUMBERS, max_size=3),
    st.sampled_from([
        "causal", "none", "ALIBI", "alibi_sqrt", "cpu", "cuda", "reference", "auto", "full", "shape", b"causal", object(), object,
        np.ndarray, BadDLPack(), NoCapsule(), BadDLPack, {}, {"a": 1}, {3}, (), [], [[1]], [None, None], slice(1), ..., nbp,
        datetime.date(2020, 1, 1), range(2), bytearray(3), memoryview(b"abc"),
        np.array(None), np.zeros((), np.float32), [True, False], [2**70, 1], ["3", "1"], nbp.MaskType.ALIBI_COMPRESS,
        np.int32([3, 1]), np.int64([9, 20]), (9, 20), [np.int32(3), np.uint64(1)], nbp.Context(), nbp.alibi_slopes(4),
    ]),
)  # fmt: skip
SLOTS = (
    *("query", "key", "value", "block_tables", "seq_len", "kv_seq_len", "mask_type", "mask", "slopes", "head_num"),
    *("kv_head_num", "qk_scale", "out", "return_lse", "target", "num_threads", "workspace", "stream", "validate"),
)
ONE_CALL = st.dictionaries(st.sampled_from(SLOTS), THINGS, min_size=1, max_size=3)
FIRST_PHASE = (
    *("query", "key", "value", "block_tables", "mask", "seq_len", "kv_seq_len", "slopes", "mask_type", "head_num"),
    *("kv_head_num", "qk_scale", "attn_out", "context"),
)


def good() -> np.ndarray:
    if not EXPECTED:
        EXPECTED["out"] = run(GOOD, "cpu")
    out: np.ndarray = EXPECTED["out"]
    return out


def attempt(call: Callable[[], Any]) -> str:
    """What came of it: "done", or the name of a documented exception with a message that names an
    argument."""
    error: BaseException | None = None
    try:
        call()
    except DOCUMENTED as raised:
        error = raised
    if error is None:
        return "done"
    assert ": got " in str(error) or "workspace" in str(error), f"{type(error).__name__}: {error}"
    return type(error).__name__


@given(changes=ONE_CALL)
def test_one_call(changes: dict[str, Any]) -> None:
    """TypeError, ValueError, TargetUnavailableError or a result; and the next call is right."""
    good()
    if isinstance(changes.get("validate"), str) and changes["validate"] == "shape":
        changes.pop("block_tables", None)  # whoever says so has checked the ids
        changes.pop("key", None)
        changes.pop("value", None)
    with (
        fault("arguments"),
        np.errstate(all="ignore"),
    ):
        attempt(lambda: nbp.prefix_encoder(**(GOOD.arguments() | changes)))
    same_bits(run(GOOD, "cpu"), good())


@given(
    changes=st.dictionaries(st.sampled_from(FIRST_PHASE), THINGS, max_size=2),
    second=st.dictionaries(st.sampled_from(["workspace", "workspace_size", "op", "context"]), THINGS, max_size=2),
    bound=st.dictionaries(
        st.sampled_from(["query", "key", "value", "block_tables", "mask", "slopes", "attn_out"]), THINGS, max_size=2
    ),
)
def test_two_phases(changes: dict[str, Any], second: dict[str, Any], bound: dict[str, Any]) -> None:
    """The same for planning, running and binding anew; after an error an operation is bound as
    before."""
    out = np.zeros_like(GOOD.query)
    sound = GOOD.arguments() | {"head_num": 4, "kv_head_num": 2, "attn_out": out}
    first = sound | changes
    made: list[Any] = []

    def plan(arguments: dict[str, Any]) -> None:
        made[:] = nbp.self_attention_prefix_encoder_get_workspace_size(**arguments)

    with fault("arguments"):
        if attempt(lambda: plan(first)) != "done":
            plan(sound)
        size, op = made
        arguments = {"workspace": bytearray(size), "workspace_size": size, "op": op} | second
        attempt(lambda: nbp.self_attention_prefix_encoder(**arguments))
        plan(sound)
        size, op = made
        if attempt(lambda: op.rebind(**bound)) != "done":
            nbp.self_attention_prefix_encoder(bytearray(size), size, op)
            same_bits(out, good())


@pytest.mark.parametrize("qk_scale", [1e-37, 1e-40, 1e-45, 1e-46, -1e-304, 0.0])
def test_scales_that_are_small_in_float32(kernel: str, qk_scale: float) -> None:
    """Found by mutated files: any finite number is a scale, also one that float32 cannot hold."""
    check(make_case([3, 1], [9, 20], head_num=2, head_size=8, qk_scale=qk_scale), kernel)


def test_damaged_npz_files() -> None:
    """Seeded mutations of small files: exit codes 0, 1 and 2, never a traceback."""
    good()
    with fault("npz"):
        codes = fuzz(seconds=15.0, most=500, seed=0)
        assert codes[2] > 50 and codes[0] > 5, codes


@pytest.mark.parametrize("number", range(5))
def test_the_corpus_is_sound(number: int) -> None:
    with Reader() as reader:
        assert reader.read(corpus()[number]) == 0
