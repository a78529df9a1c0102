"""The CUDA target among others' streams, contexts, captures and mistakes, and where it cannot run;
on a fake GPU."""

from __future__ import annotations

import builtins
import ctypes
import gc
import os
import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import standins
from cases import assert_close, make_case, naming
from device_arrays import DeviceArray
from fake_gpu import SHORT, buffer, case_of, install, on_gpu, planned, spoilt
from ptx.device import FakeDriver, Launched, each_call

import numba_prefix as nbp
from numba_prefix.cuda import target
from numba_prefix.cuda.device import driver as driver_module
from numba_prefix.cuda.device import gpu, streams
from numba_prefix.cuda.device.driver import LEGACY_STREAM, DriverError, get_driver
from numba_prefix.front.operation import Context

# --- streams


class HasProtocol:
    def __init__(self, handle: int, version: int = 0) -> None:
        self.answer = version, handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return self.answer


STREAMS = [
    (None, LEGACY_STREAM), (0, LEGACY_STREAM), (1, 1), (2, 2), (np.int64(77), 77), (HasProtocol(78), 78),
    (HasProtocol(0), LEGACY_STREAM), (SimpleNamespace(cuda_stream=79, device="cuda:0"), 79), (SimpleNamespace(ptr=80), 80),
    (SimpleNamespace(handle=81), 81), (SimpleNamespace(handle=ctypes.c_void_p(82)), 82),
    (SimpleNamespace(handle=ctypes.c_void_p(None)), LEGACY_STREAM),
]  # fmt: skip


@pytest.mark.parametrize(("given", "handle"), STREAMS, ids=[str(i) for i in range(len(STREAMS))])
def test_stream(idle: FakeDriver, given: Any, handle: int) -> None:
    case = case_of()
    nbp.prefix_encoder(**on_gpu(idle, case), stream=given)
    size, op, _ = planned(idle, case, Context(stream=given))
    workspace, _ = buffer(idle, size)
    op.run(workspace)
    nbp.self_attention_prefix_encoder(workspace, size, op, Context(stream=HasProtocol(99)))
    assert [target.stream for target in idle.launches] == [handle] * 4 + [99] * 2


@pytest.mark.parametrize(
    ("given", "error", "what"),
    [
        ("5", TypeError, "got str"),
        (True, TypeError, "got bool"),
        (1.5, TypeError, "got float"),
        (object(), TypeError, "got object"),
        (HasProtocol, TypeError, "got type"),
        (HasProtocol(5, version=1), TypeError, "got HasProtocol"),
        (-1, ValueError, "got -1"),
        (SimpleNamespace(cuda_stream=79, device="cuda:1"), ValueError, "cuda:1"),
    ],
)
def test_no_stream(idle: FakeDriver, given: Any, error: type[Exception], what: str) -> None:
    with pytest.raises(error, match=naming("^stream: ", what)):
        nbp.prefix_encoder(**on_gpu(idle, case_of(lengths=SHORT)), stream=given)
    assert idle.launches == []


@pytest.mark.parametrize(
    ("protocol", "producer", "stream", "waits_for"),
    [
        ("cuda", None, 50, set()), ("cuda", 1, 50, {1}), ("cuda", 60, None, {60}), ("cuda", 60, 60, set()),
        ("dlpack", None, 50, {LEGACY_STREAM}), ("dlpack", None, None, set()),
    ],
)  # fmt: skip
def test_producers_streams(idle: FakeDriver, protocol: str, producer: Any, stream: Any, waits_for: set[int]) -> None:
    """The run comes after whatever made the arrays, by their protocols' word."""
    case = case_of(lengths=SHORT)
    given = on_gpu(idle, case, protocol=protocol, stream=producer)
    out = DeviceArray(idle, np.zeros_like(case.query), protocol=protocol)
    nbp.prefix_encoder(**given, out=out, stream=stream)
    before = idle.log[: idle.names().index("launch")]
    waiting = {arguments[0] for name, arguments in before if name == "wait"} - {gpu.get_device(0).stream}
    recorded = {arguments[1] for name, arguments in before if name == "record"}
    assert recorded == waits_for
    assert waiting == ({stream or LEGACY_STREAM} if waits_for else set())


def test_torch_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    tensor = streams.Tensor("query", torch.zeros(1), "torch", 64, "float16", (1,), (1,), "cuda:0", True)
    for handle, expected in ((0, LEGACY_STREAM), (1234, 1234)):
        current = SimpleNamespace(cuda_stream=handle)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, current=current: current)
        assert streams.stream_for(None, tensor) == expected
        assert streams.stream_for(5, tensor) == 5


def test_cupy_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = type("ndarray", (), {"__module__": "cupy._core.core"})()
    query = streams.Tensor("query", owner, "dlpack", 64, "float16", (1,), (1,), "cuda:0", True)
    for handle, expected in ((0, LEGACY_STREAM), (1234, 1234)):
        current = SimpleNamespace(get_current_stream=lambda handle=handle: SimpleNamespace(ptr=handle))
        monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=current))
        assert streams.stream_for(None, query) == expected


# --- contexts, threads, captures


def test_contexts_are_restored(fake: FakeDriver) -> None:
    case = case_of(lengths=SHORT)
    for before in ([], [7], [7, 1000], [1000]):
        fake.contexts[:] = before
        _, op, _ = planned(fake, case)
        op.run()
        op.check()
        nbp.prefix_encoder(**on_gpu(fake, spoilt(case)))
        with pytest.raises(ValueError, match="earlier call"):
            nbp.prefix_encoder(**on_gpu(fake, case))
        with pytest.raises(ValueError, match="workspace"):
            op.run(bytearray(1))
        del op
        assert fake.contexts == before
    assert {context for (context,) in each_call(fake, "push")} == {1000}


def test_contexts_are_restored_after_driver_errors(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    _, op, _ = planned(fake, case_of())
    fake.contexts[:] = [7]

    def refuse(*_: Any) -> None:
        raise DriverError("cuLaunchKernel", "CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr(fake, "launch", refuse)
    with pytest.raises(DriverError, match="cuLaunchKernel failed with CUDA_ERROR_ILLEGAL_ADDRESS"):
        op.run()
    assert fake.contexts == [7]
    assert fake.names("malloc")[-1:] == ["malloc"] and len(fake.live) == 1  # the workspace is given back


def test_runs_within_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread, or a signal handler, may run the same operation between two launches of a
    run."""
    inner: list[Any] = []

    def execute(launched: Launched, memory: Any) -> None:
        if inner:
            inner.pop().run(workspaces[1])

    fake = install(monkeypatch, execute=execute)
    size, op, _ = planned(fake, case_of())
    workspaces = [buffer(fake, size)[0] for _ in range(2)]
    inner.append(op)
    op.run(workspaces[0])
    places = [-(-w.array.ctypes.data // 64) * 64 for w in workspaces]
    used = [target.params.partials_ptr for target in fake.launches]
    assert used == [places[0], places[1], places[1], places[0]]


def test_threads(fake: FakeDriver) -> None:
    case = case_of()
    size, op, out = planned(fake, case)
    threads = [threading.Thread(target=op.run, args=(buffer(fake, size)[0],)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fake.launches) == 8
    assert_close(out.array, case)


def test_capture(idle: FakeDriver) -> None:
    """A run may be captured: it is launches and nothing else, with its workspace's memory in the
    graph if need be."""
    size, op, _ = planned(idle, case_of(), Context(stream=50))
    workspace, _ = buffer(idle, size)
    idle.capturing.add(50)
    idle.log.clear()
    op.run(workspace)
    assert set(idle.names()) == {"current_context", "push", "launch", "pop"}
    idle.log.clear()
    op.run()
    assert set(idle.names()) == {"current_context", "push", "malloc", "launch", "free", "pop"}


def test_one_call_is_not_captured(fake: FakeDriver) -> None:
    fake.capturing.add(50)
    with pytest.raises(ValueError, match=naming("stream", "captured", "two-phase")):
        nbp.prefix_encoder(**on_gpu(fake, case_of(lengths=SHORT)), stream=50)
    case = case_of(lengths=SHORT)
    assert_close(
        nbp.prefix_encoder(**on_gpu(fake, case), stream=60).array, case
    )  # another stream's capture is no matter


def test_plans_go_during_a_capture(fake: FakeDriver) -> None:
    """A plan's memory is not given back on a stream that is being captured, but after that."""
    _, op, _ = planned(fake, case_of("float16", SHORT), Context(stream=50))
    op.run()
    fake.capturing.add(50)
    del op
    gc.collect()
    assert len(fake.live) == 1
    fake.capturing.clear()
    _, other, _ = planned(fake, make_case([1], [3], dtype="float16"))
    assert len(fake.live) == 1
    del other
    gc.collect()
    assert len(fake.live) == 0


def test_memory_is_given_back_behind_the_runs(lazy: FakeDriver) -> None:
    """A plan that is gone while the GPU still works for it: its tables stay until then."""
    case = case_of(lengths=SHORT)
    _, op, out = planned(lazy, case, Context(stream=50))
    op.run()
    flag = op.planned.plan.allocation.flag
    del op
    gc.collect()
    _, other, _ = planned(lazy, make_case([1], [3], dtype="float16"))
    assert other.planned.plan.allocation.flag is not flag
    lazy.finish_all()
    assert_close(out.array, case)
    del other
    gc.collect()
    lazy.finish_all()
    assert lazy.live == {}
    flags = {planned(lazy, make_case([1], [3], dtype="float16"))[1].planned.plan.allocation.flag for _ in range(3)}
    assert len(lazy._host_pages) == 1 and flags


# --- where it cannot run


def unavailable(monkeypatch: pytest.MonkeyPatch, *parts: str) -> None:
    case = case_of(lengths=SHORT)
    fake = FakeDriver()
    for given in (case.arguments() | {"target": "cuda"}, on_gpu(fake, case)):
        with pytest.raises(nbp.TargetUnavailableError, match=naming("^target: got 'cuda'", *parts)):
            nbp.prefix_encoder(**given)


def test_without_the_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.startswith("cuda"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return honest(name, *rest)

    monkeypatch.setattr(driver_module, "_driver", None)
    monkeypatch.setattr(builtins, "__import__", refuse)
    unavailable(monkeypatch, "cuda-bindings is missing", "pip install", "cuda")


@pytest.mark.parametrize(
    ("error", "parts"),
    [
        (RuntimeError("Failed to dlopen libcuda.so.1"), ("no NVIDIA driver", "libcuda")),
        (DriverError("cuInit", "CUDA_ERROR_NO_DEVICE"), ("finds no GPU", "CUDA_VISIBLE_DEVICES")),
        (DriverError("cuInit", "CUDA_ERROR_NOT_INITIALIZED"), ("forked", "spawn")),
        (DriverError("cuInit", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"), ("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",)),
    ],
)
def test_without_a_driver(monkeypatch: pytest.MonkeyPatch, error: Exception, parts: tuple[str, ...]) -> None:
    def refuse() -> Any:
        raise error

    monkeypatch.setattr(driver_module, "_driver", None)
    monkeypatch.setattr(driver_module, "Driver", refuse)
    unavailable(monkeypatch, *parts)


def test_old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, cc=(7, 0))
    with pytest.raises(nbp.TargetUnavailableError, match=naming(r"Test GPU 0", r"7\.0", r"7\.5 or newer")):
        nbp.prefix_encoder(**on_gpu(fake, case_of(lengths=SHORT)))


def test_forked_child(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child has its parent's driver, operations and pending calls, and may use none of them."""
    case = case_of(lengths=SHORT)
    _, op, _ = planned(fake, case)
    nbp.prefix_encoder(**on_gpu(fake, case))
    fake.log.clear()
    monkeypatch.setattr(os, "getpid", lambda: fake.pid + 1)
    for call in (get_driver, op.run, op.check, op.rebind, lambda: nbp.prefix_encoder(**on_gpu(fake, case))):
        with pytest.raises(nbp.TargetUnavailableError, match=naming("forked", "spawn")):
            call()
    del op
    target._pending.calls.clear()
    gc.collect()
    assert fake.log == []


def test_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above 48 KB kernels ask; where they get too little another family runs, or none does."""
    fake = install(monkeypatch)
    nbp.prefix_encoder(**on_gpu(fake, case_of(lengths=SHORT)))
    assert [num_bytes for _, _, num_bytes in each_call(fake, "allow_shared")] == [standins.SHARED_BYTES["mma"]]
    fake = install(monkeypatch, max_shared_bytes=64 << 10)
    case = case_of(lengths=SHORT)
    assert_close(nbp.prefix_encoder(**on_gpu(fake, case)).array, case)
    assert fake.launches[0].kernel.startswith("fma") and fake.names("allow_shared") == []
    fake = install(monkeypatch, max_shared_bytes=16 << 10)
    with pytest.raises(nbp.TargetUnavailableError, match=naming("shared memory", 16 << 10, 40 << 10, "head size 32")):
        nbp.prefix_encoder(**on_gpu(fake, case))


def test_no_launch_is_left_unchecked(idle: FakeDriver) -> None:
    """The stand-ins are no proof of themselves: a wrong stride, told to the GPU, shows."""
    case = case_of(lengths=SHORT)
    _, op, out = planned(idle, case)
    op.run()
    params = idle.launches[0].params
    params = params._replace(k_slot_stride=params.k_slot_stride + 64)
    wrong = Launched(**{**vars(idle.launches[0]), "params": params})
    with pytest.raises((AssertionError, ValueError)):
        standins.execute(wrong, idle.memory)
        assert_close(out.array, case)
