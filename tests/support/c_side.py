"""A C caller's use of the C interface, in ctypes: descriptors of NumPy arrays, and the four
functions."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import Case
from processes import SCRIPTS

import numba_prefix as nbp
from numba_prefix import capi
from numba_prefix.capi.descriptors import DTYPES, CContext, CTensor
from numba_prefix.capi.status import Status

CODES = {name: code for code, name in DTYPES.items()}
TENSORS = ("query", "key", "value", "blockTables", "mask", "seqLen", "kvSeqLen", "slopes", "attnOut")
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-pedantic")

api = capi.load()
_P = ctypes.c_void_p
_first = ctypes.CFUNCTYPE(
    ctypes.c_int32, *[_P] * 8, ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.c_float, *[_P] * 4
)(api.AtbSelfAttentionPrefixEncoderGetWorkspaceSize)
_second = ctypes.CFUNCTYPE(ctypes.c_int32, _P, ctypes.c_uint64, _P, _P)(api.AtbSelfAttentionPrefixEncoder)
_destroy = ctypes.CFUNCTYPE(ctypes.c_int32, _P)(api.NumbaPrefixDestroyOperation)
_last_error = ctypes.CFUNCTYPE(ctypes.c_uint64, _P, ctypes.c_uint64)(api.NumbaPrefixGetLastError)


def tensor(array: np.ndarray | None, **changes: Any) -> CTensor | None:
    """A descriptor of the array, with fields changed; dims and strides may be given as lists."""
    if array is None:
        return None
    given = {
        "data": array.ctypes.data,
        "dims": array.shape,
        "strides": None if array.flags.c_contiguous else [s // array.itemsize for s in array.strides],
        "num_dims": array.ndim,
        "dtype": CODES[array.dtype.name],
    } | changes
    for name in ("dims", "strides"):
        if given[name] is not None:
            given[name] = (ctypes.c_int64 * len(given[name]))(*given[name])
    made = CTensor(**given)
    made.array = array  # lives as long as the descriptor
    return made


def problem(case: Case, out: np.ndarray | None, **changes: Any) -> dict[str, Any]:
    """The first phase's arguments except the addresses of its results: descriptors, numbers and
    None."""
    lengths = {"seqLen": np.array(case.seq_len, np.int32), "kvSeqLen": np.array(case.kv_seq_len, np.int32)}
    arrays = {"query": case.query, "key": case.key, "value": case.value, "blockTables": case.block_tables}
    arrays |= {"mask": case.mask, "slopes": case.slopes, "attnOut": out} | lengths
    numbers = {
        "maskType": int(nbp.MaskType.parse(case.mask_type)),
        "headNum": case.query.shape[1],
        "kvHeadNum": case.key.shape[2],
        "qkScale": case.qk_scale,
        "context": None,
    }
    return {name: tensor(array) for name, array in arrays.items()} | numbers | changes


def nan_like(query: np.ndarray) -> np.ndarray:
    return np.full(query.shape, np.nan, query.dtype)


def address(thing: Any) -> int | None:
    return None if thing is None else ctypes.addressof(thing)


def plan(
    arguments: dict[str, Any], op: int | None = None, context: CContext | None = None
) -> tuple[int, int, int | None]:
    """Status, workspace size (-1: not written) and handle."""
    size, handle = ctypes.c_uint64(2**64 - 1), _P(op)
    a = {name: address(arguments[name]) for name in TENSORS}
    status = _first(
        *(a[name] for name in TENSORS[:-1]),
        *(arguments[name] for name in ("maskType", "headNum", "kvHeadNum", "qkScale")),
        *(a["attnOut"], ctypes.addressof(size), ctypes.addressof(handle), address(context or arguments["context"])),
    )
    return status, -1 if size.value == 2**64 - 1 else size.value, handle.value


def run(workspace: np.ndarray | None, size: int, op: int | None, context: CContext | None = None) -> int:
    return _second(None if workspace is None else workspace.ctypes.data, size, op, address(context))


def destroy(op: int | None) -> int:
    return _destroy(op)


def last_error() -> str:
    text = ctypes.create_string_buffer(1000)
    length = _last_error(text, 1000)
    assert length == len(text.value)
    return text.value.decode("ascii")


def last_error_into(size: int) -> tuple[int, bytes]:
    """The length returned, and a buffer of which all but `size` bytes are x."""
    text = ctypes.create_string_buffer(b"x" * 100, 100)
    return _last_error(text, size), text.raw


def compute(arguments: dict[str, Any]) -> None:
    """Run both phases, which have to succeed."""
    status, size, op = plan(arguments)
    assert (status, last_error()) == (Status.NO_ERROR, "")
    status = run(np.full(size, 0xFF, np.uint8), size, op)
    assert (status, last_error()) == (Status.NO_ERROR, "")
    assert destroy(op) == Status.NO_ERROR


def compiler(*names: str) -> str:
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip(f"none of {', '.join(names)} is installed")
    return found


def compiled_caller(directory: Path) -> Path:
    """A shared library of scripts/caller.c."""
    if sys.platform == "win32":
        pytest.skip("caller.c uses pthreads")
    library = directory / "caller.so"
    command = [compiler("cc", "gcc", "clang"), "-std=gnu99", *WARNINGS, "-O1", "-shared", "-fPIC", "-pthread"]
    command += [f"-I{capi.include_directory()}", str(SCRIPTS / "caller.c"), "-o", str(library)]
    subprocess.run(command, check=True, timeout=60)
    return library
