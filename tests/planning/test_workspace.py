"""The two-phase pair: an exact workspace, and an operation that can be run and bound again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import Case, make_case, repaged, run, same_bits, with_mask

import numba_prefix as nbp

GUARD = 256
SHAPES = {
    "decode": make_case([1, 1], [700, 3000], head_num=8, kv_head_num=2, head_size=64, dtype="bfloat16"),
    "prefill": make_case([130, 70, 1], [130, 200, 1], head_num=4, kv_head_num=4, dtype="float16"),
    "odd": make_case([33, 0, 5], [2500, 7, 40], head_num=3, kv_head_num=1, head_size=17, block_size=3),
    "wide": make_case([9], [300], head_num=2, kv_head_num=1, head_size=256, dtype="float16", block_size=128),
}


def plan(case: Case, kernel: str, **extra: Any) -> tuple[int, nbp.Op, np.ndarray]:
    out = np.full(case.query.shape, np.nan, case.query.dtype)
    context = nbp.Context(target=kernel, num_threads=extra.pop("num_threads", None))
    size, op = nbp.self_attention_prefix_encoder_get_workspace_size(
        **(case.arguments() | {"head_num": None, "kv_head_num": None, "attn_out": out, "context": context} | extra)
    )
    return size, op, extra.get("attn_out", out)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_threads", [1, 2, 7])
def test_exact_at_every_alignment(kernel: str, shape: str, num_threads: int) -> None:
    """A buffer of exactly that many bytes works at all 64 alignments; no byte before or after it
    changes."""
    case = SHAPES[shape]
    expected = run(case, kernel)
    size, op, out = plan(case, kernel, num_threads=num_threads)
    assert isinstance(size, int) and size == op.workspace_size
    raw = np.empty(size + 2 * GUARD + 64, np.uint8)
    for alignment in range(64):
        raw[...] = 0xFF  # NaN in every float format, -1 in every integer
        begin = (alignment - raw.ctypes.data) % 64 + GUARD
        workspace = raw[begin : begin + size]
        assert size == 0 or workspace.ctypes.data % 64 == (alignment + GUARD) % 64
        out[...] = np.nan
        assert nbp.self_attention_prefix_encoder(workspace, size, op) is None
        same_bits(out, expected)
        assert (raw[:begin] == 0xFF).all() and (raw[begin + size :] == 0xFF).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fill", [0x00, 0x7F, 0xFF])
def test_contents_do_not_matter(kernel: str, shape: str, fill: int) -> None:
    """Whatever the workspace holds before a run, the bits are the same."""
    case = with_mask(SHAPES[shape], "alibi_sqrt-generator")
    size, op, out = plan(case, kernel)
    nbp.self_attention_prefix_encoder(np.full(size, fill, np.uint8), size, op)
    same_bits(out, run(case, kernel))


@pytest.mark.parametrize("shape", SHAPES)
def test_one_byte_less(kernel: str, shape: str) -> None:
    """One byte less, in the buffer or in the number: ValueError with both numbers, and out is not
    touched."""
    size, op, out = plan(SHAPES[shape], kernel)
    assert size > 0
    for buffer, told in ((size - 1, size), (size, size - 1)):
        with pytest.raises(ValueError, match=rf"workspace.*\b{size - 1}\b.*\b{size}\b"):
            nbp.self_attention_prefix_encoder(np.empty(buffer, np.uint8), told, op)
    with pytest.raises(ValueError, match=rf"workspace.*\b{size - 1}\b.*\b{size}\b"):
        run(SHAPES[shape], kernel, workspace=np.empty(size - 1, np.uint8))
    with pytest.raises(ValueError, match=rf"workspace.*{size}"):
        nbp.self_attention_prefix_encoder(None, size, op)
    assert np.isnan(out.astype(np.float32)).all()


@pytest.mark.parametrize("kind", ["bytearray", "memoryview", "float32", "int64", "2-D", "torch", "larger"])
def test_kinds_of_workspace(kernel: str, kind: str) -> None:
    """Any writable buffer will do."""
    case = SHAPES["prefill"]
    size, op, out = plan(case, kernel)
    made: Any = {
        "bytearray": lambda: bytearray(size),
        "memoryview": lambda: memoryview(bytearray(size)),
        "float32": lambda: np.full(size // 4 + 1, np.nan, np.float32),
        "int64": lambda: np.empty(size // 8 + 1, np.int64),
        "2-D": lambda: np.empty((2, size), np.uint8),
        "torch": lambda: pytest.importorskip("torch").empty(size, dtype=pytest.importorskip("torch").uint8),
        "larger": lambda: np.empty(size * 3 + 5, np.uint8),
    }[kind]()
    nbp.self_attention_prefix_encoder(made, size, op)
    same_bits(out, run(case, kernel))


@pytest.mark.parametrize("kind", ["bytes", "read_only", "strided", "list", "text"])
def test_workspaces_that_are_refused(kernel: str, kind: str) -> None:
    size, op, _ = plan(SHAPES["prefill"], kernel)
    read_only = np.empty(size, np.uint8)
    read_only.flags.writeable = False
    made: Any = {
        "bytes": bytes(size),
        "read_only": read_only,
        "strided": np.empty(2 * size, np.uint8)[::2],
        "list": [0] * 8,
        "text": "x" * size,
    }[kind]
    with pytest.raises((TypeError, ValueError), match="workspace"):
        nbp.self_attention_prefix_encoder(made, size, op)


def test_arguments_of_the_second_phase(kernel: str) -> None:
    size, op, out = plan(SHAPES["prefill"], kernel)
    buffer = np.empty(size, np.uint8)
    with pytest.raises(TypeError, match="op"):
        nbp.self_attention_prefix_encoder(buffer, size, None)
    with pytest.raises(TypeError, match="workspace_size"):
        nbp.self_attention_prefix_encoder(buffer, float(size), op)
    nbp.self_attention_prefix_encoder(buffer, size, op, nbp.Context(target=kernel))
    same_bits(out, run(SHAPES["prefill"], kernel))


def test_attn_out_is_required(kernel: str) -> None:
    with pytest.raises((TypeError, ValueError), match="attn_out|out"):
        plan(SHAPES["odd"], kernel, attn_out=None)


def test_first_phase_checks(kernel: str) -> None:
    """Everything is refused in the first phase already."""
    case = SHAPES["odd"]
    for given, name in (({"kv_seq_len": [32, 7, 40]}, "kv_seq_len"), ({"qk_scale": np.nan}, "qk_scale")):
        with pytest.raises(ValueError, match=name):
            plan(case, kernel, **given)
    tables = case.block_tables.copy()
    tables[2, 0] = -1
    with pytest.raises(ValueError, match=r"block_tables.*-1"):
        plan(case, kernel, block_tables=tables)


def test_target_and_reason(kernel: str) -> None:
    """op says what was chosen and why."""
    _, op, _ = plan(SHAPES["odd"], kernel)
    assert op.target == kernel
    assert isinstance(op.reason, str) and op.reason
    _, op, _ = plan(SHAPES["odd"], "auto")
    assert op.target == "cpu" and isinstance(op.reason, str)


@pytest.mark.parametrize("form", ["causal", "alibi_sqrt-template"])
def test_run_again(kernel: str, form: str) -> None:
    """Ten runs of one plan, one buffer, changing contents: each is the fresh call's bits."""
    case = with_mask(SHAPES["prefill"], form)
    query = case.query.copy()
    size, op, out = plan(replace(case, query=query), kernel)
    buffer = np.empty(size, np.uint8)
    for seed in range(10):
        query[...] = np.random.default_rng(seed).standard_normal(query.shape)
        out[...] = np.nan
        nbp.self_attention_prefix_encoder(buffer, size, op)
        same_bits(out, run(replace(case, query=query.copy()), kernel))


@pytest.mark.parametrize("shape", SHAPES)
def test_rebind(kernel: str, shape: str) -> None:
    """One plan serves other layers: other query, cache, table and output of the same shapes."""
    case = SHAPES[shape]
    size, op, first = plan(case, kernel)
    buffer = np.empty(size, np.uint8)
    rng = np.random.default_rng(7)
    values = tuple(rng.standard_normal(v.shape).astype(v.dtype) for v in case.values)
    layer = repaged(replace(case, values=values), seed=3)
    layer = replace(layer, query=rng.standard_normal(case.query.shape).astype(case.query.dtype))
    out = np.full_like(first, np.nan)
    tables = layer.block_tables
    op.rebind(query=layer.query, key=layer.key, value=layer.value, block_tables=tables, attn_out=out)
    nbp.self_attention_prefix_encoder(buffer, size, op)
    same_bits(out, run(layer, kernel))
    assert np.isnan(first.astype(np.float32)).all()
    op.rebind(query=case.query, key=case.key, value=case.value, block_tables=case.block_tables)
    nbp.self_attention_prefix_encoder(buffer, size, op)
    same_bits(out, run(case, kernel))


def test_rebind_checks(kernel: str) -> None:
    """Another shape or dtype, or a bad table, is refused, and the operation still runs as it was
    bound."""
    case = SHAPES["odd"]
    size, op, out = plan(case, kernel)
    tables = case.block_tables.copy()
    tables[0, 1] = 10**6
    wrong = [
        {"query": case.query[:-1]},
        {"query": case.query.astype(np.float16)},
        {"key": case.key[:, :-1]},
        {"attn_out": out[:, :, :-1]},
        {"block_tables": tables},
        {"block_tables": case.block_tables[:2]},
    ]
    for given in wrong:
        with pytest.raises((TypeError, ValueError)):
            op.rebind(**given)
        out[...] = np.nan
        nbp.self_attention_prefix_encoder(np.empty(size, np.uint8), size, op)
        same_bits(out, run(case, kernel))


def test_rebind_to_a_smaller_cache(kernel: str) -> None:
    """A cache with fewer blocks than the table names is refused although its shape is legal."""
    case = SHAPES["prefill"]
    _, op, _ = plan(case, kernel)
    with pytest.raises(ValueError, match="block_tables|key"):
        op.rebind(key=case.key[:2], value=case.value[:2])


def test_op_keeps_arrays_alive(kernel: str) -> None:
    """Nothing but the operation holds the arrays."""
    case = make_case([40], [300], head_num=2, seed=9)
    expected = run(case, kernel)
    size, op, out = plan(replace(case, query=case.query.copy(), key=case.key.copy(), value=case.value.copy()), kernel)
    junk = [np.full(case.key.shape, np.nan, np.float32) for _ in range(20)]
    nbp.self_attention_prefix_encoder(np.empty(size, np.uint8), size, op)
    same_bits(out, expected)
    assert junk


def test_size_does_not_depend_on_contents(kernel: str) -> None:
    """One number for one shape, whatever the arrays hold."""
    case = SHAPES["decode"]
    assert plan(case, kernel)[0] == plan(repaged(case, seed=1), kernel)[0]
    assert plan(case, kernel)[0] == plan(replace(case, query=case.query * 0), kernel)[0]


def test_concurrent_runs_of_two_operations(kernel: str) -> None:
    """Two operations with a buffer each, run from two threads at once, many times."""
    from concurrent.futures import ThreadPoolExecutor

    def work(name: str) -> None:
        case = SHAPES[name]
        size, op, out = plan(case, kernel)
        expected, buffer = run(case, kernel), np.empty(size, np.uint8)
        for _ in range(30):
            out[...] = np.nan
            nbp.self_attention_prefix_encoder(buffer, size, op)
            same_bits(out, expected)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, name) for name in SHAPES]:
            done.result()
