"""Section 6 of tests/contract.md: the Python surface."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import DTYPES, Case, assert_near, check, chunk, judge, make_case, run, same_bits, to_numpy, with_mask

import numba_prefix as nbp
from numba_prefix.reference.oracle import naive, reference

PUBLIC = (
    "MaskType",
    "alibi_mask",
    "alibi_slopes",
    "get_num_threads",
    "merge_states",
    "prefix_encoder",
    "reference",
    "reshape_and_cache",
    "self_attention_prefix_encoder",
    "self_attention_prefix_encoder_get_workspace_size",
    "set_num_threads",
    "warmup",
    "__version__",
)
POSITIONAL = ["query", "key", "value", "block_tables", "seq_len", "kv_seq_len"]
KEYWORDS = {
    "mask_type": "causal", "mask": None, "slopes": None, "head_num": None, "kv_head_num": None, "qk_scale": 1.0,
    "out": None, "return_lse": False, "target": "auto", "num_threads": None, "workspace": None, "stream": None,
    "validate": "full", "held_blocks": None,
}  # fmt: skip
TWO_PHASE = "query key value block_tables mask seq_len kv_seq_len slopes mask_type head_num kv_head_num qk_scale attn_out context"


def small(**extra: Any) -> Case:
    return make_case([3, 5], [20, 37], **({"head_num": 4, "kv_head_num": 2, "dtype": "float16"} | extra))


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name(name: str) -> None:
    assert hasattr(nbp, name) and name in nbp.__all__


def test_signature_of_one_call() -> None:
    parameters = inspect.signature(nbp.prefix_encoder).parameters
    assert list(parameters) == POSITIONAL + list(KEYWORDS)
    assert {n: p.default for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY} == KEYWORDS


def test_signature_of_two_phases() -> None:
    """ATB's names in ATB's order."""
    first = inspect.signature(nbp.self_attention_prefix_encoder_get_workspace_size).parameters
    assert " ".join(first) == TWO_PHASE
    assert first["context"].default is None
    second = inspect.signature(nbp.self_attention_prefix_encoder).parameters
    assert list(second) == ["workspace", "workspace_size", "op", "context"]


def test_return_lse(target: str) -> None:
    """return_lse adds lse and changes no bit of out."""
    case = small()
    out, lse = run(case, target, return_lse=True)
    same_bits(run(case, target), out)
    assert lse.dtype == np.float32 and lse.shape == (8, 4)


def test_target_auto_is_cpu_here() -> None:
    """auto picks the CPU for arrays in CPU memory, and says so."""
    case = small()
    out = np.empty(case.query.shape, np.float16)
    arguments = {"mask": None, "slopes": None, "head_num": None, "kv_head_num": None, "attn_out": out}
    _, op = nbp.self_attention_prefix_encoder_get_workspace_size(**(case.arguments() | arguments))
    assert op.target == "cpu"
    assert "CPU" in op.reason
    same_bits(run(case, "auto"), run(case, "cpu"))


def test_target_that_cannot_run_raises() -> None:
    """CUDA asked for with arrays in CPU memory: an error that names the target; no fallback."""
    case = small()
    out = np.full(case.query.shape, 7, np.float16)
    with pytest.raises((RuntimeError, ValueError), match="(?i)cuda"):
        nbp.prefix_encoder(**case.arguments(), target="cuda", out=out)
    assert (out == 7).all()


def test_stream_without_cuda(kernel: str) -> None:
    """A stream means nothing on the CPU, so giving one is an error."""
    if kernel == "cpu":
        with pytest.raises(ValueError, match="stream"):
            run(small(), kernel, stream=1)


# --- arrays


class Exchanged:
    """An array that can do nothing but DLPack."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


def as_torch(array: np.ndarray) -> Any:
    torch = pytest.importorskip("torch")
    if array.dtype == DTYPES["bfloat16"]:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


@pytest.mark.parametrize("form", ["causal", "alibi-template"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_torch(target: str, dtype: str, form: str) -> None:
    """torch in, torch out, in torch's dtype; out= too."""
    torch = pytest.importorskip("torch")
    case = with_mask(small(dtype=dtype), form)
    given = {name: as_torch(x) for name, x in case.arguments().items() if isinstance(x, np.ndarray)}
    expected, expected_lse = run(case, target, return_lse=True)
    out, lse = run(case, target, return_lse=True, **given)
    assert isinstance(out, torch.Tensor) and out.dtype == getattr(torch, dtype) and out.is_contiguous()
    assert isinstance(lse, torch.Tensor) and lse.dtype == torch.float32
    same_bits(out, expected)
    same_bits(lse, expected_lse)
    mine = torch.full_like(out, float("nan"))
    assert run(case, target, out=mine, **given) is mine
    same_bits(mine, expected)
    assert not out.requires_grad


def test_arrays_torch_views(target: str) -> None:
    """Strided torch views: a slice of a fused projection, a transposed query, every second page."""
    torch = pytest.importorskip("torch")
    case = small()
    fused = torch.zeros(8, 12, 16, dtype=torch.float16)
    fused[:, 4:8] = torch.from_numpy(case.query)
    turned = torch.from_numpy(case.query).permute(1, 0, 2).contiguous().permute(1, 0, 2)
    pool = torch.full((case.key.shape[0] * 2, *case.key.shape[1:]), float("nan"), dtype=torch.float16)
    pool[1::2] = torch.from_numpy(case.key)
    rest = {"value": torch.from_numpy(case.value), "block_tables": torch.from_numpy(case.block_tables)}
    for query in (fused[:, 4:8], turned):
        same_bits(run(case, target, query=query, key=pool[1::2], **rest), run(case, target))


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_dlpack(target: str, dtype: str) -> None:
    """Any DLPack object, without a copy; nothing else is known about it."""
    case = small(dtype=dtype)
    source = as_torch if dtype == "bfloat16" else np.asarray
    given = {name: Exchanged(source(getattr(case, name))) for name in ("query", "key", "value")}
    out = run(case, target, head_num=4, **given)
    same_bits(out, run(case, target))


class OnGpu:
    """Says that it lives on a GPU, and has nothing there."""

    def __init__(self, array: np.ndarray) -> None:
        typestr = array.dtype.str
        self.__cuda_array_interface__ = {"shape": array.shape, "typestr": typestr, "data": (4096, False), "version": 3}


def test_arrays_on_a_gpu_are_not_for_the_cpu() -> None:
    """An explicit CPU target and memory on a GPU, all of it or one argument: a ValueError, no copy,
    no access."""
    case = small()
    everything = {n: OnGpu(getattr(case, n)) for n in ("query", "key", "value", "block_tables")}
    for name in ("query", "key", "value", "all"):
        given = everything if name == "all" else {name: everything[name]}
        with pytest.raises(ValueError, match="cuda"):
            run(case, "cpu", head_num=4, **given)


def test_arrays_zero_copy(kernel: str) -> None:
    """The caller's memory is read in place: what a bound operation computes follows its
    contents."""
    case = small()
    query, out = case.query.copy(), np.empty(case.query.shape, np.float16)
    arguments = {"head_num": None, "kv_head_num": None, "attn_out": out, "query": query}
    arguments["context"] = nbp.Context(target=kernel)
    size, op = nbp.self_attention_prefix_encoder_get_workspace_size(**(case.arguments() | arguments))
    for seed in (1, 2):
        query[...] = np.random.default_rng(seed).standard_normal(query.shape)
        nbp.self_attention_prefix_encoder(np.empty(size, np.uint8), size, op)
        same_bits(out, run(replace(case, query=query.copy()), kernel))


# --- helpers


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
def test_reshape_and_cache(dtype: str, index_dtype: str) -> None:
    """Token t goes to slot slot_mapping[t] of block slot // block_size; -1 is skipped; nothing else
    is written."""
    rng = np.random.default_rng(0)
    key, value = (rng.standard_normal((5, 2, 8)).astype(DTYPES[dtype]) for _ in range(2))
    caches = [np.full((4, 3, 2, 8), 9, DTYPES[dtype]) for _ in range(2)]
    slots = np.array([11, -1, 0, 4, -1], index_dtype)
    nbp.reshape_and_cache(key, value, *caches, slots)
    for cache, new in zip(caches, (key, value), strict=True):
        expected = np.full((12, 2, 8), 9, DTYPES[dtype])
        expected[[11, 0, 4]] = new[[0, 2, 3]]
        same_bits(cache, expected.reshape(cache.shape))


@pytest.mark.parametrize("bad", [-2, 12])
def test_reshape_and_cache_checks_slots(bad: int) -> None:
    """A slot outside the cache: ValueError naming it, and nothing is written."""
    new, cache = np.ones((2, 2, 8), np.float32), np.zeros((4, 3, 2, 8), np.float32)
    other = cache.copy()
    with pytest.raises(ValueError, match=rf"slot_mapping.*{bad}"):
        nbp.reshape_and_cache(new, new, cache, other, np.array([0, bad]))
    assert not cache.any() and not other.any()


def test_reshape_and_cache_feeds_the_operator(target: str) -> None:
    """A cache written token by token in the order of the table gives the oracle's answer."""
    case = make_case([7], [21], head_num=2, block_size=4, dtype="float16", poison=np.inf)
    caches = [np.full_like(case.key, np.nan) for _ in range(2)]
    j = np.arange(21)
    slots = case.block_tables[0, j // 4] * 4 + j % 4
    order = np.random.default_rng(0).permutation(21)
    nbp.reshape_and_cache(case.keys[0][order], case.values[0][order], *caches, slots[order])
    check(replace(case, key=caches[0], value=caches[1]), target)


@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_states(target: str, dtype: str) -> None:
    """Attention over two disjoint halves of the keys, merged, is attention over all of them."""
    case = make_case([6], [64], head_num=3, dtype=dtype, mask_type="none")
    halves = []
    for begin, end in ((0, 40), (40, 64)):
        keys, values = case.keys[0][begin:end], case.values[0][begin:end]
        half = make_case([6], [end - begin], head_num=3, dtype=dtype, mask_type="none", block_size=end - begin)
        cache = {"key": keys[None], "value": values[None], "block_tables": np.zeros((1, 1), np.int32)}
        halves += run(replace(half, query=case.query, **cache), target, return_lse=True)
    out, lse = nbp.merge_states(*halves)
    ref, ref_lse = reference(**case.arguments(), return_lse=True)
    assert out.dtype == case.query.dtype and lse.dtype == np.float32
    # The halves arrive rounded to the output's dtype, so one more rounding than the operator's own
    # is inside.
    eps = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23}[dtype]
    plain = np.asarray(naive(**case.arguments()), np.float64)
    allowed = 2 * np.abs(plain - ref).max() + 2 * eps * np.abs(ref).max()
    assert np.abs(out.astype(np.float64) - ref).max() <= allowed
    judge(lse, ref_lse, naive(**case.arguments(), return_lse=True)[1], "lse")


def test_merge_states_by_hand() -> None:
    """Weights 3 : 1; a half that saw nothing (out 0, lse -inf) changes nothing; two of them stay
    empty."""
    a, b = np.full((4, 1, 2), 8, np.float32), np.full((4, 1, 2), 4, np.float32)
    lse_a = np.log(
        np.float32([[3], [3], [0], [0]]),
        where=[[True], [True], [False], [False]],
        out=np.full((4, 1), -np.inf, np.float32),
    )
    lse_b = np.float32([[0], [-np.inf], [1], [-np.inf]])
    a[2:], b[[1, 3]] = 0, 0
    out, lse = nbp.merge_states(a, lse_a, b, lse_b)
    np.testing.assert_allclose(out[:, 0, 0], [7, 8, 4, 0], rtol=3e-7)
    np.testing.assert_allclose(lse[:, 0], [np.log(4), np.log(3), 1, -np.inf], rtol=3e-7)


def test_merge_states_of_chunks(target: str) -> None:
    """A prefix attended without a mask and the new tokens causally, merged: the prefix call in one
    go."""
    case = make_case([5], [45], head_num=2, block_size=8)
    tail = make_case([5], [5], head_num=2, block_size=5)
    cache = {"key": case.keys[0][None, 40:], "value": case.values[0][None, 40:], "block_tables": np.int32([[0]])}
    new = run(replace(tail, query=case.query, **cache), target, return_lse=True)
    old = run(case, target, return_lse=True, kv_seq_len=(40,), mask_type="none")
    out, lse = nbp.merge_states(*old, *new)
    ref, ref_lse = reference(**case.arguments(), return_lse=True)
    assert_near(out, ref)
    assert_near(lse, ref_lse)


def test_warmup_changes_nothing() -> None:
    """warmup compiles (or loads) every kernel and reports each; a call after it gives the right
    result."""
    report = nbp.warmup()
    assert report["target"] == "cpu"
    assert {kernel["name"] for kernel in report["kernels"]} >= {"drain"}
    check(small(), "cpu")


def test_version() -> None:
    assert nbp.__version__.count(".") >= 1 and nbp.__version__[0].isdigit()


def test_reference_is_float64() -> None:
    """The oracle's own door: float64, shaped as query, lse too; the same result the reference
    target rounds."""
    case = small()
    out, lse = nbp.reference(**case.arguments(), return_lse=True)
    assert out.dtype == lse.dtype == np.float64
    assert out.shape == case.query.shape and lse.shape == (8, 4)
    same_bits(run(case, "reference"), out.astype(np.float16))
    assert to_numpy(run(case, "reference")).dtype == np.float16


def test_one_shot_and_chunked_agree(target: str) -> None:
    """300 rows at once, and as 128 + 128 + 44 with a growing prefix."""
    case = make_case([300], [300], head_num=2, dtype="float16", block_size=48)
    for begin, end in ((0, 128), (128, 256), (256, 300)):
        check(chunk(case, begin, end), target)
