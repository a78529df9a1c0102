"""Arrays over host memory that claim to be on a GPU, with the protocols of one."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
from ptx.device import FakeDriver

from numba_prefix.cuda.device.array import make_capsule


class DeviceArray:
    """An array on a fake GPU, over NumPy's memory. protocol: "dlpack", or "cuda" for the CUDA array
    interface."""

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
        strides = tuple(stride // a.itemsize for stride in a.strides)
        capsule, self._last = make_capsule(a.ctypes.data, a.shape, strides, a.dtype.name, self.ordinal)
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
        """An array filled with NaN, so that elements never written show."""
        return self._owner._like(np.full(shape, np.nan, dtype))
