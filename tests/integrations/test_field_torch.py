"""Public bug reports of this field, second round (tests/semantics/bugs.md): N09, torch's default
device and dtype; and of its kind, that no result is memory which nothing has been written to."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import make_case

import numba_prefix as nbp

torch = pytest.importorskip("torch")
ops = pytest.importorskip("numba_prefix.integrations.torch")
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

NAMES = ("query", "key", "value", "block_tables", "seq_len", "kv_seq_len")
Q_LEN, KV_LEN = [3, 20], [9, 40]


def problem(seed: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(23, 4, 16, generator=generator, device="cpu", dtype=torch.float32)
    key, value = (torch.randn(12, 8, 2, 16, generator=generator, device="cpu", dtype=torch.float32) for _ in range(2))
    table = torch.arange(12, dtype=torch.int32, device="cpu").reshape(2, 6)
    return [query, key, value, table, *(torch.tensor(x, dtype=torch.int64, device="cpu") for x in (Q_LEN, KV_LEN))]


def expected(arrays: list[Any]) -> Any:
    q, k, v, table = (x.numpy() for x in arrays[:4])
    return torch.from_numpy(nbp.prefix_encoder(q, k, v, table, Q_LEN, KV_LEN, qk_scale=0.25))


def npu(*arrays: Any, **options: Any) -> Any:
    return ops.npu_self_attention_prefix_encoder(*arrays[:4], *arrays[4:], 4, 0.25, 2, **options)


def operator(*arrays: Any) -> Any:
    return torch.ops.numba_prefix.prefix_encoder(*arrays, qk_scale=0.25)


def operator_lse(*arrays: Any) -> Any:
    return torch.ops.numba_prefix.prefix_encoder_lse(*arrays, qk_scale=0.25)


def function(*arrays: Any) -> Any:
    return nbp.prefix_encoder(*arrays, qk_scale=0.25)


# --- N09: defaults


@pytest.fixture(params=["meta", "float64", "float16"])
def defaults(request: pytest.FixtureRequest) -> Iterator[str]:
    """Another default device, which stands for "cuda" and "npu", or another default dtype."""
    if request.param == "meta":
        torch.set_default_device("meta")
    else:
        torch.set_default_dtype(getattr(torch, request.param))
    try:
        yield request.param
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("lengths", [list, tuple, np.array, lambda x: torch.tensor(x, device="cpu")])
def test_n09_torch_npus_operator(lengths: Callable[[Any], Any], defaults: str) -> None:
    """pytorch#103964: lists became tensors on the default device, and the result was memory that
    torch had just found."""
    arrays = problem()
    given = [*arrays[:4], lengths(Q_LEN), lengths(KV_LEN)]
    assert torch.empty(1).device.type == ("meta" if defaults == "meta" else "cpu")
    assert torch.equal(npu(*given), expected(arrays))


@pytest.mark.parametrize("call", [operator, function])
def test_n09_the_operator(call: Callable[..., Any], defaults: str) -> None:
    arrays = problem()
    assert torch.equal(call(*arrays), expected(arrays))


def test_n09_slopes_and_other_operations(defaults: str) -> None:
    """What the package makes of its own lies where the arrays do, in its own dtype."""
    arrays = problem()
    slopes = [0.5, 0.25, 0.125, 1.0]
    options = {"qk_scale": 0.25, "mask_type": "alibi", "return_lse": True}
    q, k, v, table = (x.numpy() for x in arrays[:4])
    out, lse = nbp.prefix_encoder(*arrays[:4], Q_LEN, KV_LEN, slopes=slopes, **options)
    right, right_lse = nbp.prefix_encoder(q, k, v, table, Q_LEN, KV_LEN, slopes=slopes, **options)
    assert torch.equal(out, torch.from_numpy(right)) and torch.equal(lse, torch.from_numpy(right_lse))
    merged, _ = nbp.merge_states(out, lse, out, lse)
    assert torch.equal(merged, torch.from_numpy(nbp.merge_states(right, right_lse, right, right_lse)[0]))


def test_n09_a_group_of_one(defaults: str, tmp_path: Path) -> None:
    """Exchanges between ranks, on the CPU."""
    dist = torch.distributed
    if not dist.is_available():
        pytest.skip("this torch has no torch.distributed")
    from numba_prefix.integrations.distributed import context_parallel_prefix_encoder, head_parallel_prefix_encoder

    arrays = problem()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        out = head_parallel_prefix_encoder(*arrays[:4], Q_LEN, KV_LEN, qk_scale=0.25, gather=True)
        assert torch.equal(out, expected(arrays))
        held = np.ones((2, 6), bool)
        out = context_parallel_prefix_encoder(*arrays[:4], held, Q_LEN, KV_LEN, qk_scale=0.25)
        torch.testing.assert_close(out, expected(arrays), rtol=1e-5, atol=1e-5)
        with pytest.raises(TypeError, match="seq_len"):
            head_parallel_prefix_encoder(*arrays[:4], [0.5, 1], KV_LEN, qk_scale=0.25)
    finally:
        dist.destroy_process_group()


# --- tensors without memory


@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize("call", [operator, operator_lse, npu, function])
def test_one_tensor_on_meta(call: Callable[..., Any], name: str) -> None:
    """Beside real ones it would choose the operator's description of its output."""
    arrays = problem()
    arrays[NAMES.index(name)] = arrays[NAMES.index(name)].to("meta")
    with pytest.raises(TypeError, match=f"^{name}: got a tensor on meta, expected one on cpu or cuda"):
        call(*arrays)


@pytest.mark.parametrize("name", ["mask", "slopes"])
def test_an_option_on_meta(name: str) -> None:
    options = {"mask_type": "alibi", "mask": torch.zeros(256, 256), "slopes": torch.ones(4)}
    options[name] = options[name].to("meta")
    for call in (torch.ops.numba_prefix.prefix_encoder, torch.ops.numba_prefix.prefix_encoder_lse):
        with pytest.raises(TypeError, match=f"^{name}: got a tensor on meta"):
            call(*problem(), **options)
        with pytest.raises(TypeError, match=f"^{name}: got a tensor on meta"):
            call(*problem(), *options.values())


def test_a_network_on_meta() -> None:
    """All on meta, with lengths that are known: shapes without values, as torch's own give."""
    arrays = [x.to("meta") for x in problem()[:4]] + problem()[4:]
    out, lse = operator_lse(*arrays)
    assert out.is_meta and lse.is_meta and (out.shape, lse.shape) == ((23, 4, 16), (23, 4))
    with pytest.raises(TypeError, match="^query: got a tensor on meta"):
        function(*arrays)


def test_fake_tensors() -> None:
    """Described by the operator, and refused where memory is needed."""
    real = problem()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = [mode.from_tensor(x) for x in real]
    for arrays in (fake, [real[0], *fake[1:]], [*real[:4], fake[4], real[5]]):
        assert type(operator(*arrays)).__name__ == "FakeTensor"
        with pytest.raises(TypeError, match=r"^\w+: got FakeTensor without memory"):
            function(*arrays)
    with mode:
        assert type(npu(*fake[:4], Q_LEN, KV_LEN)).__name__ == "FakeTensor"
        with pytest.raises(TypeError, match="^out: got FakeTensor without memory"):
            function(*real)


# --- graphs


class Layer(torch.nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, q: Any, k: Any, v: Any, table: Any, q_len: Any, kv_len: Any) -> Any:
        return self.call(q, k, v, table, q_len, kv_len) * 2


GRAPHS: dict[str, Callable[[Any, tuple[Any, ...]], Any]] = {
    "jit.trace": lambda layer, arrays: torch.jit.trace(layer, arrays),
    "export": lambda layer, arrays: torch.export.export(layer, arrays).module(),
    "make_fx": lambda layer, arrays: make_fx(layer)(*arrays),
    "compile": lambda layer, arrays: torch.compile(layer, backend="eager", fullgraph=True),
    "functionalize": lambda layer, arrays: torch.func.functionalize(layer),
}


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("call", [operator, npu])
def test_graphs_hold_the_operator(call: Callable[..., Any], graph: str) -> None:
    """Recorded with one problem, right for another."""
    made = GRAPHS[graph](Layer(call), tuple(problem(1)))
    arrays = problem(2)
    assert torch.equal(made(*arrays), expected(arrays) * 2)


@pytest.mark.parametrize("graph", ["jit.trace", "export", "make_fx", "functionalize"])
def test_graphs_that_would_lose_the_function(graph: str) -> None:
    """The function writes to memory behind torch's back: a graph would have the allocation of its
    output and nothing more."""
    with pytest.raises(TypeError, match=r"^query: got .* expected (torch.ops.numba_prefix|a plain strided tensor)"):
        GRAPHS[graph](Layer(function), tuple(problem(1)))(*problem(2))
    arrays = problem(3)
    assert torch.equal(function(*arrays), expected(arrays))  # afterwards as ever


def test_vmap_of_the_operator() -> None:
    """One call for each."""
    one, two = problem(1), problem(2)
    queries = torch.stack([one[0], two[0]])
    out = torch.vmap(operator, in_dims=(0, *[None] * 5))(queries, *one[1:])
    assert torch.equal(out[0], expected(one)) and torch.equal(out[1], expected([two[0], *one[1:]]))


# --- arrays that must not be written, and operations that are one process's


def library(name: str) -> type:
    """A stand-in for the arrays of a library that shares their memory among values, which it shows
    by capsules of before DLPack 1.0: these cannot say so."""

    class Array:
        def __init__(self, data: np.ndarray) -> None:
            self.data = data

        def __dlpack__(self) -> Any:
            return self.data.__dlpack__()

        def __dlpack_device__(self) -> Any:
            return self.data.__dlpack_device__()

    Array.__module__ = name
    return Array


@pytest.mark.parametrize("name", ["jaxlib._jax", "jax", "tensorflow.python.framework.ops"])
def test_immutable_arrays(name: str) -> None:
    """Read like any other, never written."""
    make = library(name)
    case = make_case([3, 20], [9, 40], head_num=4, kv_head_num=2)
    given = case.arguments()
    read = given | {array: make(given[array]) for array in ("query", "key", "value", "block_tables")}
    out = np.full_like(case.query, 7)
    with pytest.raises(ValueError, match="^out: got a read-only array"):
        nbp.prefix_encoder(**read, out=make(out))
    cache, slots = np.full((2, 8, 2, 16), 7, np.float32), np.zeros(1, np.int32)
    rows = np.zeros((1, 2, 16), np.float32)
    with pytest.raises(ValueError, match="key_cache: got read-only memory"):
        nbp.reshape_and_cache(rows, rows, make(cache), cache, slots)
    assert (out == 7).all() and (cache == 7).all()
    right = nbp.prefix_encoder(**given)
    np.testing.assert_array_equal(np.asarray(nbp.prefix_encoder(**read)), right)
    nbp.prefix_encoder(**read, out=out)
    np.testing.assert_array_equal(out, right)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps, lambda op: copy.deepcopy([{"op": op}])])
def test_an_operation_is_not_copied(duplicate: Callable[[Any], Any]) -> None:
    """A copy would write to the original's output, and show one of its own."""
    arrays = problem()
    out = torch.zeros(23, 4, 16)
    _, op = nbp.self_attention_prefix_encoder_get_workspace_size(
        *arrays[:4], None, Q_LEN, KV_LEN, None, "causal", 4, 2, 0.25, out
    )
    with pytest.raises(TypeError, match="^Op: got a request for a copy or a pickle, expected another"):
        duplicate(op)
    op.run()
    assert torch.equal(out, expected(arrays))
