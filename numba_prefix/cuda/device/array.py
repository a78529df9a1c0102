"""Dense arrays on a GPU for callers without a library that makes them: DLPack producers like any
other."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_prefix.cuda.device.driver import LEGACY_STREAM, DriverError
from numba_prefix.cuda.device.gpu import Device, get_device
from numba_prefix.inputs.arrays import (
    BITS,
    DLPACK_DTYPES,
    ITEM_BYTES,
    DLTensor,
    as_numpy,
    bits,
    contiguous_strides,
    describe,
)

_CUDA = 2  # DLPack's number of the device type

_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


def make_capsule(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, ordinal: int
) -> tuple[Any, Any]:
    """A DLPack capsule of CUDA memory, and what it points into, which has to outlive its use."""
    sizes, steps = ((ctypes.c_int64 * len(shape))(*values) for values in (shape, strides))
    managed = _Managed()
    tensor = managed.tensor
    tensor.data, tensor.device_type, tensor.device_id, tensor.ndim = address, _CUDA, ordinal, len(shape)
    kind = dtype.rstrip("0123456789")
    tensor.code = next(code for code, name in DLPACK_DTYPES.items() if name == kind)
    tensor.bits, tensor.lanes = 8 * ITEM_BYTES[dtype], 1
    tensor.shape, tensor.strides = sizes, steps
    return _new_capsule(ctypes.addressof(managed), b"dltensor", None), (managed, sizes, steps)


class GpuArray:
    """Memory of the driver. dtype: "float16", "bfloat16", "float32", "int32", …; copies are done
    when they return, and come after what came on the legacy default stream."""

    def __init__(self, shape: tuple[int, ...], dtype: str, ordinal: int = 0) -> None:
        """Uninitialised."""
        self.shape, self.dtype, self.ordinal = tuple(shape), dtype, ordinal
        self.nbytes = math.prod(self.shape) * ITEM_BYTES[dtype]
        device = get_device(ordinal)
        with device.current():
            self.address = device.driver.malloc(ordinal, max(1, self.nbytes), LEGACY_STREAM)
        weakref.finalize(self, _free, device, self.address).atexit = False

    @classmethod
    def of(cls, array: Any, ordinal: int = 0) -> GpuArray:
        """A copy of an array in CPU memory, of any kind that prefix_encoder takes."""
        t = describe(array, "array")
        made = cls(t.shape, t.dtype, ordinal)
        made.set(bits(t))
        return made

    def set(self, array: NDArray[Any], begin: int = 0) -> None:
        """Copy an array's bytes to those from `begin` on."""
        source, device = np.ascontiguousarray(array), get_device(self.ordinal)
        if source.nbytes:
            with device.current():
                device.driver.to_device(self.address + begin, source.ctypes.data, source.nbytes, LEGACY_STREAM)
                device.driver.synchronize(LEGACY_STREAM)

    def get(self) -> NDArray[Any]:
        """A copy; bfloat16 as ml_dtypes.bfloat16 where that can be imported, else its bits."""
        array, device = np.empty(self.shape, BITS.get(self.dtype, self.dtype)), get_device(self.ordinal)
        if self.nbytes:
            with device.current():
                device.driver.to_host(array.ctypes.data, self.address, self.nbytes, LEGACY_STREAM)
                device.driver.synchronize(LEGACY_STREAM)
        t = describe(array, "array")
        t.dtype, t.keeper = self.dtype, array
        return as_numpy(t)

    def __dlpack__(self, **_: Any) -> Any:
        strides = contiguous_strides(self.shape)
        capsule, self._exported = make_capsule(self.address, self.shape, strides, self.dtype, self.ordinal)
        return capsule

    def __getitem__(self, index: Any) -> Any:
        return self.get()[index]

    def tolist(self) -> Any:
        return self.get().tolist()

    def __array_namespace__(self) -> Any:
        return _Namespace


class _Namespace:
    float16, float32 = "float16", "float32"

    @staticmethod
    def empty(shape: tuple[int, ...], dtype: str, device: Any = None) -> GpuArray:
        return GpuArray(shape, dtype)


def _free(device: Device, address: int) -> None:
    if device.driver.pid == os.getpid():
        with contextlib.suppress(DriverError), device.current(may_capture=True):
            device.driver.free(device.ordinal, address, LEGACY_STREAM)
