"""The driver's Python binding, without a driver: it takes what it is given, and only then misses
the library."""

from __future__ import annotations

import inspect
import os
from typing import Any

import pytest

import numba_prefix as nbp
from numba_prefix.cuda.device.driver import Driver, get_driver

api = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "attribute": (0, "COMPUTE_CAPABILITY_MAJOR"),
    "load_library": (b"cubin",),
    "get_kernel": (5, "name"),
    "exchange_capture_mode": (2,),
}
METHODS = {name: m for name, m in inspect.getmembers(Driver, inspect.isfunction) if not name.startswith("_")}


class Binding:
    """Every call is made, and found to fail for no other reason than the missing library; then it
    is a success."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(api, name)
        if not callable(found) or not name.startswith("cu") or isinstance(found, type):
            return found

        def call(*arguments: Any) -> Any:
            with pytest.raises(RuntimeError):
                found(*arguments)
            self.called.append(name)
            result = b"name" if name == "cuDeviceGetName" else api.CUmemoryPool(3) if name == "cuMemPoolCreate" else 1
            nothing = ("Push", "Launch", "Synchronize", "Set", "Destroy", "Record", "Wait", "Query", "Free", "Memcpy")
            return (0,) if any(word in name for word in nothing) else (0, result)

        return call


@pytest.mark.parametrize("name", METHODS)
def test_binding(name: str) -> None:
    try:
        get_driver()
    except nbp.TargetUnavailableError:
        pass
    else:
        pytest.skip("there is a driver, which would do as it is told")
    driver: Any = object.__new__(Driver)
    driver._api = binding = Binding()
    driver._launch = binding.cuLaunchKernel
    driver._pools, driver.kept, driver.pid = {}, {}, os.getpid()
    count = len(inspect.signature(METHODS[name]).parameters) - 1
    getattr(driver, name)(*ARGUMENTS.get(name, (7,) * count))
    assert binding.called
