"""What only a GPU can show: streams, CUDA graphs, caches over 4 GiB, other libraries' arrays,
NVIDIA's own checker."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from cases import Case, assert_close, make_case, naming, same_bits, to_numpy
from processes import ROOT, environment

import numba_prefix as nbp
from numba_prefix.cuda.device.array import GpuArray
from numba_prefix.cuda.device.driver import LEGACY_STREAM, Driver, get_driver
from numba_prefix.cuda.device.gpu import get_device
from numba_prefix.inputs.arrays import Tensor

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def driver() -> Driver:
    try:
        return get_driver()
    except nbp.TargetUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def torch() -> Any:
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("torch has no CUDA here")
    return module


def case_of(dtype: str = "float16") -> Case:
    return make_case([5, 0, 33, 1], [21, 7, 150, 4200], head_num=8, kv_head_num=2, head_size=64, dtype=dtype)


def planned(case: Case, context: nbp.Context | None = None) -> tuple[int, nbp.Op, Any]:
    a = {name: GpuArray.of(value) for name, value in case.arguments().items() if isinstance(value, np.ndarray)}
    out = GpuArray.of(np.full(case.query.shape, np.nan, case.query.dtype))
    size, op = nbp.self_attention_prefix_encoder_get_workspace_size(
        a["query"], a["key"], a["value"], a["block_tables"], None, case.seq_len, case.kv_seq_len, None, "causal",
        case.query.shape[1], case.key.shape[2], case.qk_scale, out, context,
    )  # fmt: skip
    return size, op, out


@contextmanager
def current() -> Iterator[Driver]:
    device = get_device(0)
    with device.current():
        yield device.driver


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_two_phases(dtype: str) -> None:
    """The exact workspace, at odd addresses; nothing else of its buffer is touched; bits do not
    change between runs."""
    case = case_of(dtype)
    size, op, out = planned(case)
    whole = GpuArray.of(np.full(size + 128, 0xAB, np.uint8))
    outs = []
    for begin in (0, 1, 63):
        workspace = Tensor("w", whole, "dlpack", whole.address + begin, "uint8", (size,), (1,), "cuda:0", True)
        nbp.self_attention_prefix_encoder(workspace, size, op)
        op.check()
        outs.append(out.get())
        assert (np.delete(whole.get(), np.s_[begin : begin + size]) == 0xAB).all()
        whole.set(np.full(size + 128, 0xAB, np.uint8))
    assert_close(outs[0], case)
    for other in outs[1:]:
        same_bits(outs[0], other)


def test_runs_do_not_wait(driver: Driver) -> None:
    """Many runs on a stream of one's own, and then the result."""
    case = case_of()
    with current():
        stream = driver.create_stream()
    size, op, out = planned(case, nbp.Context(stream=stream))
    with current():
        driver.synchronize(LEGACY_STREAM)
    workspace = GpuArray((size,), "uint8")
    for _ in range(200):
        op.run(workspace)
    op.run()
    op.check()
    assert_close(out.get(), case)


def test_bad_block_ids() -> None:
    case = case_of()
    tables = case.block_tables.copy()
    tables[2, 1] = 2**31 - 1
    _, op, _ = planned(Case(**{**vars(case), "block_tables": tables}))
    op.run()
    with pytest.raises(ValueError, match=naming("block 2147483647 for sequence 2, column 1")):
        op.check()
    op.rebind(block_tables=GpuArray.of(case.block_tables)).run()
    op.check()
    assert_close(op.out.get(), case)


def test_graph(driver: Driver) -> None:
    """A captured run computes again, with whatever the arrays hold then, also with memory of the
    graph's own."""
    from cuda.bindings import driver as api

    def ok(result: Any) -> Any:
        assert not result[0], result[0]
        return result[1] if len(result) > 1 else None

    case = case_of()
    with current():
        stream = driver.create_stream()
    size, op, out = planned(case, nbp.Context(stream=stream))
    op.run()
    op.check()
    for workspace in (GpuArray((size,), "uint8"), None):
        with current():
            ok(api.cuStreamBeginCapture(api.CUstream(stream), api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
            op.run(workspace)
            graph = ok(api.cuStreamEndCapture(api.CUstream(stream)))
            runnable = ok(api.cuGraphInstantiate(graph, 0))
        for _ in range(3):
            out.set(np.full(out.shape, np.nan, out.dtype))
            with current():
                ok(api.cuGraphLaunch(runnable, api.CUstream(stream)))
            op.check()
            assert_close(out.get(), case)
        with current():
            ok(api.cuGraphExecDestroy(runnable))
            ok(api.cuGraphDestroy(graph))


def test_cache_over_4_gib() -> None:
    """Pages on both sides of 2**31 and 2**32 bytes, and of 2**31 elements, from the cache's
    start."""
    case = make_case([33, 1], [150, 77], head_num=4, kv_head_num=2, head_size=128, block_size=16, dtype="float16")
    page_bytes = case.key[0].nbytes
    num_blocks = (5 << 30) // page_bytes
    places = np.linspace(0, num_blocks - 1, len(case.key)).astype(np.int32)
    caches = []
    for pages in (case.key, case.value):
        cache = GpuArray((num_blocks, *pages.shape[1:]), "float16")
        for page, place in zip(pages, places, strict=True):
            cache.set(page, int(place) * page_bytes)
        caches.append(cache)
    is_used = (case.block_tables >= 0) & (case.block_tables < len(case.key))
    tables = np.where(is_used, places[np.where(is_used, case.block_tables, 0)], case.block_tables).astype(np.int32)
    out = nbp.prefix_encoder(
        GpuArray.of(case.query), *caches, GpuArray.of(tables), case.seq_len, case.kv_seq_len, qk_scale=case.qk_scale,
        validate="wait",
    )  # fmt: skip
    assert_close(out.get(), case)


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck", "initcheck"])
def test_sanitizer(tool: str) -> None:
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable]
    command.append(str(ROOT / "tests" / "support" / "scripts" / "on_gpu.py"))
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=590, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


# --- torch


def tensors(torch: Any, case: Case) -> dict[str, Any]:
    def tensor(array: np.ndarray) -> Any:
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).cuda().view(torch.bfloat16)
        return torch.from_numpy(array).cuda()

    return {name: tensor(v) if isinstance(v, np.ndarray) else v for name, v in case.arguments().items()}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("table_dtype", ["int32", "int64"])
def test_torch(torch: Any, dtype: str, table_dtype: str) -> None:
    """On torch's current stream, behind what made the tensors, and without a word about streams."""
    case = case_of(dtype)
    given = tensors(torch, case)
    given["block_tables"] = given["block_tables"].to(getattr(torch, table_dtype))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        given["query"] = given["query"].clone()
        out, lse = nbp.prefix_encoder(**given, return_lse=True)
        out, lse = out.cpu(), lse.cpu()
    assert_close(to_numpy(out), case, to_numpy(lse))


def test_torch_strided_heads(torch: Any) -> None:
    case = case_of()
    given = tensors(torch, case)
    given["query"] = given["query"].transpose(1, 2).contiguous().transpose(1, 2)
    out = torch.full((*case.query.shape[:2], 128), torch.nan, dtype=torch.float16, device="cuda")[..., ::2]
    assert nbp.prefix_encoder(**given, out=out) is out
    assert_close(to_numpy(out.cpu().contiguous()), case)


def test_torch_graph(torch: Any) -> None:
    case = case_of()
    given = tensors(torch, case)
    out = torch.empty_like(given["query"])
    size, op = nbp.self_attention_prefix_encoder_get_workspace_size(
        given["query"], given["key"], given["value"], given["block_tables"], None, case.seq_len, case.kv_seq_len, None,
        "causal", 8, 2, case.qk_scale, out,
    )  # fmt: skip
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op.run(workspace)
        with pytest.raises(ValueError, match="captured"):
            nbp.prefix_encoder(**given)
    graph.replay()
    assert_close(to_numpy(out.cpu()), case)
    given["query"].neg_()
    graph.replay()
    torch.cuda.synchronize()
    assert not np.array_equal(to_numpy(out.cpu()), to_numpy(nbp.prefix_encoder(**tensors(torch, case)).cpu()))


def test_torch_operator(torch: Any) -> None:
    import numba_prefix.integrations.torch  # noqa: F401

    case = case_of()
    given = tensors(torch, case)
    lengths = [torch.tensor(getattr(case, name)) for name in ("seq_len", "kv_seq_len")]
    arrays = [given[name] for name in ("query", "key", "value", "block_tables")]
    for encoder in (
        torch.ops.numba_prefix.prefix_encoder,
        torch.compile(torch.ops.numba_prefix.prefix_encoder, fullgraph=True),
    ):
        out = encoder(*arrays, *lengths, qk_scale=case.qk_scale)
        assert_close(to_numpy(out.cpu()), case)


def test_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    case = case_of()
    given = {name: cupy.asarray(v) if isinstance(v, np.ndarray) else v for name, v in case.arguments().items()}
    with cupy.cuda.Stream(non_blocking=True):
        out = nbp.prefix_encoder(**given)
        assert type(out) is cupy.ndarray
        assert_close(out.get(), case)
