"""Arrays that say that they are on a GPU, and speak the protocols: over host memory for a fake one, or really there."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np
from ptx.device import FakeDriver

from numba_prefix.arrays import contiguous_strides
from numba_prefix.cuda.driver import LEGACY_STREAM
from numba_prefix.cuda.gpu import get_device


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 2),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_CODES = {"i": 0, "u": 1, "f": 2, "V": 4}  # V: ml_dtypes.bfloat16


def make_capsule(address: int, shape: Any, strides: Any, dtype: np.dtype, ordinal: int) -> tuple[Any, Any]:
    """A DLPack capsule of CUDA memory, strides in bytes, and what it points into, which has to outlive its use."""
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    steps = (ctypes.c_int64 * len(shape))(*(s // dtype.itemsize for s in strides))
    tensor = _DLTensor(data=address, device=(2, ordinal), ndim=len(shape), lanes=1)
    tensor.dtype[:] = _CODES[dtype.kind], 8 * dtype.itemsize
    tensor.shape, tensor.strides = sizes, steps
    return _new_capsule(ctypes.addressof(tensor), b"dltensor", None), (tensor, sizes, steps)


class DeviceArray:
    """An array on a fake GPU, over memory of NumPy's. protocol: "dlpack", or "cuda" for the CUDA array interface."""

    def __init__(
        self,
        driver: FakeDriver,
        array: np.ndarray,
        *,
        ordinal: int = 0,
        protocol: str = "dlpack",
        stream: int | None = None,
    ) -> None:
        self.driver, self.array, self.ordinal, self.protocol = driver, array, ordinal, protocol
        self.stream = stream
        weakref.finalize(self, driver.forget, driver.register(array, "array"), array).atexit = False
        if protocol == "dlpack":
            self.__dlpack__ = self._capsule
            self.__array_namespace__ = lambda: _Namespace(self)
        else:
            interface = {"shape": array.shape, "typestr": array.dtype.str, "strides": array.strides, "version": 3}
            interface |= {"data": (array.ctypes.data, not array.flags.writeable), "stream": stream}
            self.__cuda_array_interface__ = interface

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def _capsule(self, **_: Any) -> Any:
        a = self.array
        capsule, self._last = make_capsule(a.ctypes.data, a.shape, a.strides, a.dtype, self.ordinal)
        return capsule

    def __getitem__(self, index: Any) -> Any:
        return self.array[index]

    def tolist(self) -> Any:
        return self.array.tolist()

    def copy(self, order: str) -> DeviceArray:
        return self._like(np.array(self.array, order=order))  # type: ignore[arg-type]

    def _like(self, array: np.ndarray) -> DeviceArray:
        return DeviceArray(self.driver, array, ordinal=self.ordinal, protocol=self.protocol, stream=self.stream)


class _Namespace:
    __name__ = "device_arrays"
    float16, float32 = np.dtype(np.float16), np.dtype(np.float32)

    def __init__(self, owner: DeviceArray) -> None:
        self._owner = owner

    def empty(self, shape: Any, dtype: Any, device: Any = None) -> DeviceArray:
        """Filled with NaN, so that what is never written shows."""
        return self._owner._like(np.full(shape, np.nan, dtype))


class GpuArray:
    """A dense array in memory that the process's driver gave, be it a fake one or a GPU's. Copies wait for the GPU."""

    def __init__(self, shape: Any, dtype: Any) -> None:
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self.num_bytes = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
        device = get_device(0)
        with device.current():
            self.address = device.driver.malloc(0, max(1, self.num_bytes), LEGACY_STREAM)
            device.driver.synchronize(LEGACY_STREAM)
        weakref.finalize(self, _free, device, self.address).atexit = False

    @classmethod
    def of(cls, array: np.ndarray) -> GpuArray:
        made = cls(array.shape, array.dtype)
        made.set(array)
        return made

    def set(self, array: np.ndarray) -> None:
        self.set_bytes(array, 0)

    def set_bytes(self, array: np.ndarray, begin: int) -> None:
        source, device = np.ascontiguousarray(array), get_device(0)
        if source.nbytes:
            with device.current():
                device.driver.to_device(self.address + begin, source.ctypes.data, source.nbytes, LEGACY_STREAM)
                device.driver.synchronize(LEGACY_STREAM)

    def get(self) -> np.ndarray:
        array, device = np.empty(self.shape, self.dtype), get_device(0)
        if self.num_bytes:
            with device.current():
                device.driver.to_host(array.ctypes.data, self.address, self.num_bytes, LEGACY_STREAM)
                device.driver.synchronize(LEGACY_STREAM)
        return array

    def __dlpack__(self, **_: Any) -> Any:
        strides = [s * self.dtype.itemsize for s in contiguous_strides(self.shape)]
        capsule, self._last = make_capsule(self.address, self.shape, strides, self.dtype, 0)
        return capsule

    def __getitem__(self, index: Any) -> Any:
        return self.get()[index]

    def tolist(self) -> Any:
        return self.get().tolist()

    def __array_namespace__(self) -> Any:
        return _GpuNamespace


def _free(device: Any, address: int) -> None:
    with device.current():
        device.driver.free(0, address, LEGACY_STREAM)


class _GpuNamespace:
    float16, float32 = np.dtype(np.float16), np.dtype(np.float32)

    @staticmethod
    def empty(shape: Any, dtype: Any, device: Any = None) -> GpuArray:
        """Filled with NaN, so that what is never written shows."""
        return GpuArray.of(np.full(shape, np.nan, dtype))
