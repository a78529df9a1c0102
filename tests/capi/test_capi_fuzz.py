"""Descriptors that make no sense: the C functions answer with a status and a text, and never crash
or raise."""

from __future__ import annotations

import sys
from typing import Any

import c_side
import numpy as np
import pytest
from c_side import last_error, plan, problem, tensor
from cases import make_case, run, same_bits
from hypothesis import given
from hypothesis import strategies as st

from numba_prefix.capi.descriptors import DTYPES, MAX_DIMS, CContext
from numba_prefix.capi.status import Status

GOOD = make_case([3, 1], [9, 20], head_num=4, kv_head_num=2, head_size=8, block_size=4, dtype="float16", qk_scale=0.5)
MOST_AXIS, MOST_STRIDE, MOST_ITEM = 9, 40, 8
# From its middle, a room holds every element that small axes and strides reach, of any type.
REACH = MAX_DIMS * MOST_AXIS * MOST_STRIDE * MOST_ITEM
NASTY = st.sampled_from([-1, -(2**63), 2**62, 2**63 - 1])
DENSE = MOST_AXIS**4 * MOST_ITEM  # an array of four axes

SMALL_AXES = st.one_of(
    st.lists(st.integers(0, MOST_AXIS), min_size=1, max_size=4), st.lists(st.integers(0, 2), min_size=5, max_size=8)
)
TYPICAL_AXES = st.sampled_from(
    [[4, 4, 8], [4, 32], [9, 4, 2, 8], [9, 4, 16], [2, 5], [2, 7], [2], [4], [0], [1, 1], [0, 4, 8], [4, 0, 8], [4, 4, 0]]
)  # fmt: skip
NUMBERS = {
    "maskType": st.sampled_from([0, 3, 4, 5, 9, 1, -1, 2**31 - 1]),
    "headNum": st.sampled_from([4, 0, -1, 1, 2, 8, 2**31 - 1, -(2**31)]),
    "kvHeadNum": st.sampled_from([2, 0, 1, 4, 3, -1, 2**31 - 1, -(2**31)]),
    "qkScale": st.floats(width=32),
}


class Room:
    """Memory that a descriptor's data may point into the middle of."""

    def __init__(self, array: np.ndarray) -> None:
        self.memory = np.zeros(REACH + max(REACH, DENSE, array.size * MOST_ITEM) + MOST_ITEM, np.uint8)
        self.start = REACH
        inside = self.memory[self.start : self.start + array.nbytes]
        inside.view(array.dtype)[...] = array.reshape(-1)
        self.array = inside.view(array.dtype).reshape(array.shape)


@st.composite
def descriptors(draw: Any) -> dict[str, Any] | None:
    """Fields that differ from a sound descriptor's; None for no descriptor. Small numbers stay
    inside a room."""
    if draw(st.integers(0, 9)) == 0:
        return None
    changes: dict[str, Any] = {}
    if draw(st.booleans()):
        axes = draw(st.one_of(SMALL_AXES, TYPICAL_AXES))
        strides = draw(
            st.none() | st.lists(st.integers(-MOST_STRIDE, MOST_STRIDE), min_size=len(axes), max_size=len(axes))
        )
        changes |= {"dims": axes, "strides": strides, "num_dims": len(axes)}
        if draw(st.integers(0, 3)) == 0:
            nasty = changes[draw(st.sampled_from(["dims", "strides"]))]
            if nasty is not None:
                nasty[draw(st.integers(0, len(axes) - 1))] = draw(NASTY)
        if draw(st.integers(0, 5)) == 0:
            changes["num_dims"] = draw(st.sampled_from([-1, 0, MAX_DIMS + 1, 2**31 - 1, -(2**31)]))
    if draw(st.integers(0, 3)) == 0:
        changes["dtype"] = draw(st.sampled_from([*DTYPES, -1, 5, 26, 2**31 - 1]))
    changes |= draw(
        st.sampled_from([{}, {}, {}, {}, {"data": None}, {"dims": None}, {"device": 1}, {"offset": 1}, {"offset": 8}])
    )
    return changes


def changed(room: Room, changes: dict[str, Any] | None) -> Any:
    if changes is None:
        return None
    changes = dict(changes)
    offset = changes.pop("offset", 0)
    return tensor(room.array, **({"data": room.array.ctypes.data + offset} | changes))


@given(
    changes=st.dictionaries(st.sampled_from(c_side.TENSORS), descriptors(), max_size=3),
    numbers=st.fixed_dictionaries({}, optional=NUMBERS),
    context=st.none() | st.tuples(st.sampled_from([0, 1, 2, -1, -(2**31)]), st.sampled_from([0, 1, 2, 3, 4, -1])),
    less=st.sampled_from([0, 0, 0, 1, 100]),
    bad_handle=st.none() | st.sampled_from([0, 1, 2**63, 2**64 - 1]),
)
def test_senseless_calls(
    changes: dict[str, Any], numbers: dict[str, Any], context: Any, less: int, bad_handle: int | None
) -> None:
    """Each call gives a known status, with a text if it is an error; and the next sound problem is
    right."""
    mask, slopes = np.zeros((256, 256), np.float16), np.full(4, 0.5, np.float32)
    sound = {"mask": mask, "slopes": slopes} if numbers.get("maskType") in (3, 4, 5) else {}
    arguments = problem(GOOD, np.zeros_like(GOOD.query), **numbers)
    arguments |= {name: tensor(array) for name, array in sound.items()}
    arrays = {"mask": mask, "slopes": slopes} | {
        n: arguments[n].array for n in c_side.TENSORS if arguments[n] is not None
    }
    rooms = {name: Room(arrays[name]) for name in changes}
    arguments |= {name: changed(rooms[name], change) for name, change in changes.items()}
    arguments["context"] = None if context is None else CContext(*context)
    status, size, op = plan(arguments)
    answered(status)
    if status == Status.NO_ERROR:
        assert 0 <= size < 1 << 30 and op
        workspace = np.empty(size, np.uint8)
        told = max(0, size - less)
        answered(c_side.run(workspace[:told], told, op if bad_handle is None else bad_handle, arguments["context"]))
        answered(c_side.destroy(op))
    else:
        assert (size, op) == (-1, None)
    out = c_side.nan_like(GOOD.query)
    c_side.compute(problem(GOOD, out))
    same_bits(out, run(GOOD, "cpu"))


def answered(status: int) -> None:
    """Never a fault of the package's own, for arguments of any kind."""
    assert status in set(Status) - {Status.ERROR_INTERNAL_ERROR}, (status, last_error())
    assert (status == Status.NO_ERROR) == (last_error() == "")
    if status != Status.NO_ERROR:
        assert ": got " in last_error() or "memory" in last_error().lower(), last_error()


@pytest.mark.skipif(sys.maxsize < 2**32, reason="a number of a 64-bit address space")
def test_a_nasty_number_is_refused_whatever_the_type() -> None:
    """2**62 elements of one byte fit an address space in principle; planning does not try to copy
    them."""
    table = tensor(np.zeros(4, np.int8), dims=[2, 2**61], num_dims=2)
    status, _, _ = plan(problem(GOOD, np.zeros_like(GOOD.query), blockTables=table))
    answered(status)
    assert status != Status.NO_ERROR
