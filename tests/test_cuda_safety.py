"""The CUDA target among others' streams, contexts, captures and mistakes, and where it cannot run; on a fake GPU."""

from __future__ import annotations

import builtins
import ctypes
import gc
import os
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import standins
from cases import Case, assert_close, make_case, naming, run, with_mask
from device_arrays import DeviceArray
from ptx.device import FakeDriver, Launched, each_call
from standins import on_gpu
from test_cuda_launch import buffer, case_of, nothing, planned

import numba_prefix as nbp
from numba_prefix.cuda import driver as driver_module
from numba_prefix.cuda import gpu, launch, spec, streams
from numba_prefix.cuda.driver import LEGACY_STREAM, DriverError, get_driver
from numba_prefix.front import Context, plan_partial

BAD_BLOCK = ("block_tables: got block 9999 for sequence 2, column 1", "0 to")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return standins.install(monkeypatch)


@pytest.fixture
def lazy(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """A GPU that is behind: nothing is done before it is waited for."""
    return standins.install(monkeypatch, is_lazy=True)


@pytest.fixture(autouse=True)
def _nothing_pending() -> Any:
    yield
    launch._pending.calls.clear()


def spoilt(case: Case) -> Case:
    tables = case.block_tables.copy()
    tables[2, 1] = 9999
    return Case(**{**vars(case), "block_tables": tables})


# --- block ids -------------------------------------------------------------------------------------------------------


def test_bad_block_is_told_by_the_next_run(lazy: FakeDriver) -> None:
    case = case_of()
    table = DeviceArray(lazy, spoilt(case).block_tables)
    size, op, out = planned(lazy, case, block_tables=table)
    workspace, _ = buffer(lazy, size)
    lazy.log.clear()
    op.run(workspace)
    op.run(workspace)  # nothing is known yet, and nothing waited for
    assert lazy.names("synchronize", "to_host", "finish") == []
    lazy.finish_all()
    with pytest.raises(ValueError, match=naming(*BAD_BLOCK)):
        op.run(workspace)
    assert len(lazy.launches) == 4
    table.array[2, 1] = case.block_tables[2, 1]
    op.run(workspace)
    op.check()
    assert_close(out.array, case)


@pytest.mark.parametrize("how", ["check", "rebind", "second phase"])
def test_bad_block_is_told_by(lazy: FakeDriver, how: str) -> None:
    case = case_of()
    size, op, _ = planned(lazy, case, block_tables=DeviceArray(lazy, spoilt(case).block_tables))
    workspace, _ = buffer(lazy, size)
    op.run(workspace)
    if how != "check":
        lazy.finish_all()
    with pytest.raises(ValueError, match=naming(*BAD_BLOCK)):
        if how == "check":
            op.check()
        elif how == "rebind":
            op.rebind(block_tables=DeviceArray(lazy, case.block_tables))
        else:
            nbp.self_attention_prefix_encoder(workspace, size, op)
    op.check()


def test_bad_block_of_a_table_that_was_bound_before(lazy: FakeDriver) -> None:
    case = case_of()
    _, op, _ = planned(lazy, case, block_tables=DeviceArray(lazy, spoilt(case).block_tables))
    op.run()
    op.rebind(block_tables=DeviceArray(lazy, case.block_tables)).run()
    with pytest.raises(ValueError, match=naming(*BAD_BLOCK)):
        op.check()


def test_bad_block_that_is_gone_by_then(fake: FakeDriver) -> None:
    case = case_of()
    table = DeviceArray(fake, spoilt(case).block_tables)
    _, op, _ = planned(fake, case, block_tables=table)
    op.run()
    table.array[...] = case.block_tables
    with pytest.raises(ValueError, match=naming("block_tables", "changed since", f"0 to {len(case.key) - 1}")):
        op.check()


def test_bad_block_of_a_strided_table(fake: FakeDriver) -> None:
    case = case_of()
    wide = np.zeros((8, 2 * case.block_tables.shape[1]), np.int32)
    wide[::-2, ::2] = spoilt(case).block_tables
    _, op, _ = planned(fake, case, block_tables=DeviceArray(fake, wide[::-2, ::2]))
    op.run()
    with pytest.raises(ValueError, match=naming(*BAD_BLOCK)):
        op.check()


@pytest.mark.parametrize("validate", ["full", "wait", "shape"])
def test_one_call_and_bad_blocks(lazy: FakeDriver, validate: str) -> None:
    """ "wait" tells at once, "full" at the thread's next call, "shape" never; bad blocks count as zeros."""
    case = case_of()
    bad, good = on_gpu(lazy, spoilt(case)), on_gpu(lazy, case)
    if validate == "wait":
        with pytest.raises(ValueError, match=naming(*BAD_BLOCK)):
            nbp.prefix_encoder(**bad, validate=validate)
    else:
        out = nbp.prefix_encoder(**bad, validate=validate)
        lazy.finish_all()
        assert np.isfinite(out.array).all()
    elsewhere = threading.Thread(target=lambda: nbp.prefix_encoder(**good))
    elsewhere.start()
    elsewhere.join()
    if validate == "full":
        with pytest.raises(ValueError, match=naming(*BAD_BLOCK, "earlier call")):
            nbp.prefix_encoder(**good)
    out = nbp.prefix_encoder(**good)
    lazy.finish_all()
    assert_close(out.array, case)


def test_calls_do_not_pile_up(lazy: FakeDriver) -> None:
    """What a thread's calls leave behind is bounded, on a GPU that never catches up by itself."""
    given = on_gpu(lazy, make_case([1], [3], dtype="float16"))
    for _ in range(launch.MAX_PENDING + 20):
        nbp.prefix_encoder(**given)
    assert len(launch._pending.calls) <= launch.MAX_PENDING + 1
    assert len(lazy._host_pages) == 1


def test_unread_blocks_do_not_matter(fake: FakeDriver) -> None:
    """Those behind the last key, and those of blocks that are not held."""
    case = case_of()
    held = np.ones(case.block_tables.shape, bool)
    held[2, 1] = False
    out = nbp.prefix_encoder(**on_gpu(fake, spoilt(case)), held_blocks=held, validate="wait")
    expected = run(case, "reference", held_blocks=held)
    np.testing.assert_allclose(out.array.astype(float), expected.astype(float), atol=2e-3)


# --- streams ---------------------------------------------------------------------------------------------------------


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
def test_stream(fake: FakeDriver, given: Any, handle: int) -> None:
    case = case_of()
    nbp.prefix_encoder(**on_gpu(fake, case), stream=given)
    size, op, _ = planned(fake, case, Context(stream=given))
    workspace, _ = buffer(fake, size)
    op.run(workspace)
    nbp.self_attention_prefix_encoder(workspace, size, op, Context(stream=HasProtocol(99)))
    assert [launch.stream for launch in fake.launches] == [handle] * 4 + [99] * 2


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
def test_no_stream(fake: FakeDriver, given: Any, error: type[Exception], what: str) -> None:
    with pytest.raises(error, match=naming("^stream: ", what)):
        nbp.prefix_encoder(**on_gpu(fake, case_of()), stream=given)
    assert fake.launches == []


@pytest.mark.parametrize(
    ("protocol", "producer", "stream", "waits_for"),
    [
        ("cuda", None, 50, set()), ("cuda", 1, 50, {1}), ("cuda", 60, None, {60}), ("cuda", 60, 60, set()),
        ("dlpack", None, 50, {LEGACY_STREAM}), ("dlpack", None, None, set()),
    ],
)  # fmt: skip
def test_producers_streams(fake: FakeDriver, protocol: str, producer: Any, stream: Any, waits_for: set[int]) -> None:
    """The run comes after whatever made the arrays, by their protocols' word."""
    case = case_of()
    given = on_gpu(fake, case, protocol=protocol, stream=producer)
    out = DeviceArray(fake, np.zeros_like(case.query), protocol=protocol)
    nbp.prefix_encoder(**given, out=out, stream=stream)
    before = fake.log[: fake.names().index("launch")]
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


# --- contexts, threads, captures -------------------------------------------------------------------------------------


def test_contexts_are_restored(fake: FakeDriver) -> None:
    case = case_of()
    for before in ([], [7], [7, 1000], [1000]):
        fake.contexts[:] = before
        _, op, _ = planned(fake, case)
        op.run()
        op.check()
        nbp.prefix_encoder(**on_gpu(fake, spoilt(case)))
        with pytest.raises(ValueError, match="earlier call"):
            nbp.prefix_encoder(**on_gpu(fake, case))
        with pytest.raises(ValueError, match="workspace"):
            op.run(buffer(fake, 1)[0])
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
    """Another thread, or a signal handler, may run the same operation between two launches of a run."""
    inner: list[Any] = []

    def execute(launched: Launched, memory: Any) -> None:
        if inner:
            inner.pop().run(workspaces[1])

    fake = standins.install(monkeypatch, execute=execute)
    size, op, _ = planned(fake, case_of())
    workspaces = [buffer(fake, size)[0] for _ in range(2)]
    inner.append(op)
    op.run(workspaces[0])
    places = [-(-w.array.ctypes.data // 64) * 64 for w in workspaces]
    used = [launch.call[spec.PARTIALS] for launch in fake.launches]
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


def test_capture(fake: FakeDriver) -> None:
    """A run may be captured: it is launches and nothing else, with its workspace's memory in the graph if need be."""
    size, op, _ = planned(fake, case_of(), Context(stream=50))
    workspace, _ = buffer(fake, size)
    fake.capturing.add(50)
    fake.log.clear()
    op.run(workspace)
    assert set(fake.names()) == {"current_context", "push", "launch", "pop"}
    fake.log.clear()
    op.run()
    assert set(fake.names()) == {"current_context", "push", "malloc", "launch", "free", "pop"}


def test_one_call_is_not_captured(fake: FakeDriver) -> None:
    fake.capturing.add(50)
    with pytest.raises(ValueError, match=naming("stream", "captured", "two-phase")):
        nbp.prefix_encoder(**on_gpu(fake, case_of()), stream=50)
    case = case_of()
    assert_close(
        nbp.prefix_encoder(**on_gpu(fake, case), stream=60).array, case
    )  # another stream's capture is no matter


def test_plans_go_during_a_capture(fake: FakeDriver) -> None:
    """What a plan borrowed is not given back on a stream that is being captured, but after that."""
    _, op, _ = planned(fake, case_of(), Context(stream=50))
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
    case = case_of()
    _, op, out = planned(lazy, case, Context(stream=50))
    op.run()
    flag = op._runner._plan.loan.flag
    del op
    gc.collect()
    _, other, _ = planned(lazy, make_case([1], [3], dtype="float16"))
    assert other._runner._plan.loan.flag is not flag
    lazy.finish_all()
    assert_close(out.array, case)
    del other
    gc.collect()
    lazy.finish_all()
    assert lazy.live == {}
    flags = {planned(lazy, make_case([1], [3], dtype="float16"))[1]._runner._plan.loan.flag for _ in range(3)}
    assert len(lazy._host_pages) == 1 and flags


# --- where it cannot run ---------------------------------------------------------------------------------------------


def unavailable(monkeypatch: pytest.MonkeyPatch, *parts: str) -> None:
    case = case_of()
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
    fake = standins.install(monkeypatch, cc=(7, 0))
    with pytest.raises(nbp.TargetUnavailableError, match=naming(r"Test GPU 0", r"7\.0", r"7\.5 or newer")):
        nbp.prefix_encoder(**on_gpu(fake, case_of()))


def test_forked_child(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child has its parent's driver, operations and pending calls, and may use none of them."""
    case = case_of()
    _, op, _ = planned(fake, case)
    nbp.prefix_encoder(**on_gpu(fake, case))
    fake.log.clear()
    monkeypatch.setattr(os, "getpid", lambda: fake.pid + 1)
    for call in (get_driver, op.run, op.check, lambda: nbp.prefix_encoder(**on_gpu(fake, case))):
        with pytest.raises(nbp.TargetUnavailableError, match=naming("forked", "spawn")):
            call()
    del op
    launch._pending.calls.clear()
    gc.collect()
    assert fake.log == []


def test_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above 48 KB kernels ask; where they get too little another family runs, or none does."""
    fake = standins.install(monkeypatch)
    nbp.prefix_encoder(**on_gpu(fake, case_of()))
    assert [num_bytes for _, _, num_bytes in each_call(fake, "allow_shared")] == [standins.SHARED_BYTES["mma"]]
    fake = standins.install(monkeypatch, max_shared_bytes=64 << 10)
    case = case_of()
    assert_close(nbp.prefix_encoder(**on_gpu(fake, case)).array, case)
    assert fake.launches[0].kernel.startswith("fma") and fake.names("allow_shared") == []
    fake = standins.install(monkeypatch, max_shared_bytes=16 << 10)
    with pytest.raises(nbp.TargetUnavailableError, match=naming("shared memory", 16 << 10, 40 << 10, "head size 32")):
        nbp.prefix_encoder(**on_gpu(fake, case))


# --- parts of the keys -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["causal", "alibi_left_align-generator", "alibi-template"])
def test_parts(fake: FakeDriver, form: str) -> None:
    """float32 outputs of held keys, with an lse that lacks the part's shift; slopes on either side."""
    case = with_mask(case_of(), form)
    held = np.random.default_rng(0).random(case.block_tables.shape) < 0.5
    a = case.arguments()
    options = {name: a.pop(name) for name in ("mask_type", "mask", "slopes", "qk_scale")}
    want = plan_partial(*a.values(), held, Context("reference"), **options)
    want.run()
    there = {name: DeviceArray(fake, value) for name, value in options.items() if isinstance(value, np.ndarray)}
    given = on_gpu(fake, case)
    op = plan_partial(*(given[name] for name in a), held, Context(), **options | there)
    op.run()
    assert op.out.dtype == np.float32
    np.testing.assert_allclose(op.out.array, want.out, atol=2e-5)
    np.testing.assert_allclose(op.lse.array, want.lse, atol=2e-4)
    assert (op.part_shift is None) == (want.part_shift is None)
    if op.part_shift is not None:
        np.testing.assert_array_equal(op.part_shift, want.part_shift)


def test_lengths_belong_on_the_host(fake: FakeDriver) -> None:
    case = case_of()
    for name in ("seq_len", "kv_seq_len"):
        lengths = DeviceArray(fake, np.array(getattr(case, name), np.int32))
        with pytest.raises(TypeError, match=naming(name, "cuda:0", "host-side")):
            nbp.prefix_encoder(**on_gpu(fake, case) | {name: lengths})


def test_no_launch_is_left_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins are no proof of themselves: a wrong stride, told to the GPU, shows."""
    fake = standins.install(monkeypatch, execute=nothing)
    case = case_of()
    _, op, out = planned(fake, case)
    op.run()
    call = list(fake.launches[0].call)
    call[spec.K_SLOT] += 64
    wrong = Launched(**{**vars(fake.launches[0]), "call": tuple(call)})
    with pytest.raises((AssertionError, ValueError)):
        standins.execute(wrong, fake.memory)
        standins.execute(fake.launches[1], fake.memory)
        assert_close(out.array, case)
