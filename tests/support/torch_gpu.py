"""Torch tensors that claim to be on a fake GPU, and a torch that makes and moves such tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import fake_gpu
import torch
from ptx.device import FakeDriver
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

GPU = torch.device("cuda:0")
_drivers: list[tuple[FakeDriver, dict[int, torch.Tensor]]] = []
# Functions of two devices: CPU indices are allowed, copies are there for that.
_MIXED = ("__getitem__", "__setitem__", "copy_")


class GpuTensor(torch.Tensor):
    """A tensor over host memory. As on a GPU, NumPy cannot see it and arithmetic with tensors of
    the CPU fails."""

    device, is_cuda, is_cpu = GPU, True, False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("numpy", "__array__"):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        given = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        if name not in _MIXED and any(not isinstance(t, cls) and t.dim() for t in given):
            raise RuntimeError(f"{name}: expected all tensors to be on the same device")
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if name == "cpu":
            return result.as_subclass(torch.Tensor).clone()
        return tree_map(lambda t: on_gpu(t) if isinstance(t, torch.Tensor) else t, result)


class _Placement(TorchFunctionMode):
    """Tensors that are made on the GPU or moved there are GpuTensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is not torch.device and _names_gpu((*args, kwargs.get("device"))):
            args = tuple(a for a in args if not _names_gpu((a,)))
            kwargs.pop("device", None)
            return on_gpu(func(*args, **kwargs).as_subclass(torch.Tensor).clone())
        return func(*args, **kwargs)


def _names_gpu(arguments: tuple[Any, ...]) -> bool:
    return any(isinstance(a, torch.device) and a == GPU for a in arguments)


def on_gpu(t: torch.Tensor) -> GpuTensor:
    """The tensor's memory as the GPU's; it stays until the test ends."""
    driver, storages = _drivers[-1]
    plain = t.as_subclass(torch.Tensor)
    storage = plain.untyped_storage()
    if storage.nbytes() and storage.data_ptr() not in storages:
        whole = torch.empty(0, dtype=torch.uint8).set_(storage)
        storages[storage.data_ptr()] = whole
        driver.register(whole.numpy(), "tensor")
    return plain.as_subclass(GpuTensor)


@contextmanager
def fake_torch_gpu(monkeypatch: Any, **options: Any) -> Iterator[FakeDriver]:
    """A fake GPU that torch knows, while the context lasts."""
    driver = fake_gpu.install(monkeypatch, **options)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=0))
    _drivers.append((driver, {}))
    try:
        with _Placement():
            yield driver
    finally:
        driver.finish_all()
        _drivers.pop()
