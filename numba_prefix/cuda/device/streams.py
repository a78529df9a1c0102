"""Streams as callers name them, and the order between theirs and ours."""

from __future__ import annotations

import contextlib
import sys
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from numba_prefix.cuda.device.driver import LEGACY_STREAM
from numba_prefix.cuda.device.gpu import Device
from numba_prefix.inputs.arrays import Tensor

_EXPECTED = "an integer handle or a stream of torch, CuPy, Numba or another library with __cuda_stream__"


def stream_for(given: Any, query: Tensor) -> int:
    """The handle of the caller's stream; for None the current one of the library that query belongs
    to, if it is torch or CuPy, else the legacy default stream. Raises TypeError and ValueError."""
    if given is not None:
        return handle_of(given, query.device)
    if query.kind == "torch":
        return current_stream(query)
    if type(query.owner).__module__.partition(".")[0] == "cupy":
        return int(sys.modules["cupy"].cuda.get_current_stream().ptr) or LEGACY_STREAM
    return LEGACY_STREAM


def current_stream(tensor: Tensor) -> int:
    """torch's, on the device of one of its tensors."""
    return int(sys.modules["torch"].cuda.current_stream(tensor.owner.device).cuda_stream) or LEGACY_STREAM


def handle_of(given: Any, device: str) -> int:
    if isinstance(given, (int, np.integer)) and not isinstance(given, bool):
        if given < 0:
            raise ValueError(f"stream: got {given}, expected {_EXPECTED}")
        return int(given) or LEGACY_STREAM
    its_device = str(getattr(given, "device", device))
    if its_device.startswith("cuda:") and its_device != device:
        raise ValueError(f"stream: got one of {its_device}, expected one of {device} (query's device)")
    handle = _handle(given)
    if not isinstance(handle, int) or isinstance(handle, bool):
        raise TypeError(f"stream: got {type(given).__name__}, expected {_EXPECTED}")
    return handle or LEGACY_STREAM


def _handle(given: Any) -> Any:
    """None for what is no stream."""
    if isinstance(given, type):
        return None
    if hasattr(given, "__cuda_stream__"):
        version, handle = given.__cuda_stream__()
        return int(handle) if version == 0 else None
    for name in ("cuda_stream", "ptr"):  # torch's and CuPy's
        if hasattr(given, name):
            return getattr(given, name)
    if hasattr(given, "handle"):  # Numba's: 0, None or a ctypes pointer for the default stream
        handle = getattr(given.handle, "value", given.handle)
        return 0 if handle is None else int(handle)
    return None


def scope(stream: int, tensor: Tensor) -> AbstractContextManager[Any]:
    """A context in which torch allocates and copies on this stream; an empty one for arrays of
    other libraries."""
    if tensor.kind != "torch" or stream == current_stream(tensor):
        return contextlib.nullcontext()
    cuda = sys.modules["torch"].cuda
    return cuda.stream(cuda.ExternalStream(_torch_handle(stream), device=tensor.owner.device))


def _torch_handle(stream: int) -> int:
    return 0 if stream == LEGACY_STREAM else stream


def record_use(tensor: Tensor, stream: int) -> None:
    """Have torch keep a copy that it made until what is on this stream by its end is done."""
    stream_type = sys.modules["torch"].cuda.ExternalStream
    tensor.keeper.record_stream(stream_type(_torch_handle(stream), device=tensor.keeper.device))


def wait_for_producers(device: Device, stream: int, tensors: list[Tensor]) -> None:
    """Put `stream` behind those on which arrays were made, as their protocols demand: the legacy
    default stream for DLPack, the one that a CUDA array interface names. torch's users see to that
    themselves."""
    producers = {producer for t in tensors if (producer := _producer(t)) not in (None, stream)}
    if producers and not device.is_capturing(stream):
        for producer in producers:
            device.order(stream, producer)


def _producer(t: Tensor) -> int | None:
    if t.kind != "dlpack":
        return None
    stream: int | None = t.keeper.get("stream") if isinstance(t.keeper, dict) else LEGACY_STREAM
    return stream
