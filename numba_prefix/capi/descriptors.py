"""C callers' structs, and the tensors and contexts that they describe."""

from __future__ import annotations

import ctypes
import math
import sys

from numba_prefix.capi.status import Refusal, Status
from numba_prefix.front.operation import TARGETS, Context
from numba_prefix.inputs.arrays import ITEM_BYTES, Tensor, contiguous_strides, span

MAX_DIMS = 8  # as in ATB
DEVICE_CPU = 0
DTYPES = {
    0: "float32", 1: "float16", 2: "int8", 3: "int32", 4: "uint8", 6: "int16", 7: "uint16", 8: "uint32", 9: "int64",
    10: "uint64", 11: "float64", 12: "bool", 27: "bfloat16",
}  # fmt: skip


class CTensor(ctypes.Structure):
    """NumbaPrefixTensor of the header."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("num_dims", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("device", ctypes.c_int32),
    )


class CContext(ctypes.Structure):
    """NumbaPrefixContext of the header."""

    _fields_ = (("num_threads", ctypes.c_int32), ("target", ctypes.c_int32))


def tensor(address: int | None, name: str) -> Tensor:
    """The caller's memory that the NumbaPrefixTensor at `address` describes, in place.

    Raises Refusal for anything that cannot be an array in memory; inputs/problem.py checks what an
    argument needs.
    """
    if not address:
        raise Refusal(Status.ERROR_INVALID_TENSOR_ADDR, f"{name}: got NULL, expected a tensor")
    given = CTensor.from_address(address)
    dtype = DTYPES.get(given.dtype)
    if dtype is None:
        known = ", ".join(f"{code} ({known})" for code, known in DTYPES.items())
        raise Refusal(
            Status.ERROR_INVALID_TENSOR_DTYPE, f"{name}: got dtype code {given.dtype}, expected one of {known}"
        )
    if given.device != DEVICE_CPU:
        raise Refusal(
            Status.ERROR_INVALID_TENSOR_ADDR, f"{name}: got device {given.device}, expected {DEVICE_CPU} (CPU memory)"
        )
    shape, strides = _extents(given, name)
    data = given.data or 0
    _check_memory(data, shape, strides, ITEM_BYTES[dtype], name)
    return Tensor(name, None, "c", data, dtype, shape, strides, "cpu", True)


def optional_tensor(address: int | None, name: str) -> Tensor | None:
    return tensor(address, name) if address else None


def context(address: int | None) -> Context | None:
    """The caller's context. Raises Refusal for an unknown target; front/encoder.py checks the
    number of threads."""
    if not address:
        return None
    given = CContext.from_address(address)
    if not 0 <= given.target < len(TARGETS):
        known = ", ".join(f"{code} ({target})" for code, target in enumerate(TARGETS))
        raise Refusal(Status.ERROR_INVALID_PARAM, f"context: got target {given.target}, expected one of {known}")
    return Context(TARGETS[given.target], given.num_threads or None)


def buffer(address: int, size: int, name: str) -> Tensor:
    """`size` writable bytes at `address`."""
    _check_memory(address, (size,), (1,), 1, name)
    return Tensor(name, None, "c", address, "uint8", (size,), (1,), "cpu", True)


def _extents(given: CTensor, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides. Strides that no element's address depends on are made dense: they may be
    any numbers."""
    if not 1 <= given.num_dims <= MAX_DIMS:
        raise Refusal(
            Status.ERROR_INVALID_TENSOR_DIM_NUM, f"{name}: got {given.num_dims} axes, expected 1 to {MAX_DIMS}"
        )
    if not given.dims:
        raise Refusal(Status.ERROR_INVALID_TENSOR_DIM, f"{name}: got NULL for dims, expected {given.num_dims} numbers")
    shape = tuple(given.dims[: given.num_dims])
    if min(shape) < 0:
        raise Refusal(Status.ERROR_INVALID_TENSOR_DIM, f"{name}: got shape {shape}, expected numbers >= 0")
    dense = contiguous_strides(shape)
    if not given.strides or 0 in shape:
        return shape, dense
    strides = tuple(given.strides[: given.num_dims])
    return shape, tuple([d if n == 1 else s for n, s, d in zip(shape, strides, dense, strict=True)])


def _check_memory(data: int, shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int, name: str) -> None:
    """Raise Refusal for memory that no address space can hold.

    Zero-length axes are ignored in the overflow check (as NumPy does), because strides of empty
    arrays must still be valid. Elements count as 8 bytes, because lengths and tables of other types
    are copied to wider ones.
    """
    first, end = span(shape, strides)
    is_within = data + first * item_bytes >= 0 and data + end * item_bytes <= sys.maxsize
    if math.prod(n or 1 for n in shape) * 8 > sys.maxsize or not is_within:
        raise Refusal(
            Status.ERROR_INVALID_TENSOR_SIZE,
            f"{name}: got shape {shape} with strides {strides} at {data:#x}, expected memory that can be addressed",
        )
    if not data and 0 not in shape:
        raise Refusal(Status.ERROR_INVALID_TENSOR_ADDR, f"{name}: got NULL for data, expected memory of shape {shape}")
    if data % item_bytes:
        raise Refusal(
            Status.ERROR_INVALID_TENSOR_ADDR, f"{name}: got data at {data:#x}, expected a multiple of {item_bytes}"
        )
