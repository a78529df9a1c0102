"""The CUDA target's own kernels under tests/contract.md, through the front door: interpreted
("ptx"), and on a GPU.

What is interpreted is a cut of what a GPU runs, on few kernels: each takes seconds to compile.

"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import (
    MASK_FORMS,
    Case,
    assert_close,
    make_case,
    naming,
    repaged,
    repeated_heads,
    same_bits,
    select,
    with_mask,
)
from cases import run as run_elsewhere

import numba_prefix as nbp
from numba_prefix.cuda.device.array import GpuArray
from numba_prefix.cuda.device.driver import get_driver
from numba_prefix.front.encoder import plan_partial
from numba_prefix.front.operation import Context

Run = Callable[..., Any]
GPU = pytest.mark.gpu
INTERPRETED = pytest.param("ptx", id="ptx")
ON_GPU = pytest.param("gpu", id="gpu", marks=GPU)


def call(case: Case, **overrides: Any) -> Any:
    """The result in host memory, from arrays that were all on the GPU."""
    given = case.arguments() | overrides
    there = {name: GpuArray.of(value) if isinstance(value, np.ndarray) else value for name, value in given.items()}
    for name in ("seq_len", "kv_seq_len", "held_blocks"):
        if name in given:
            there[name] = given[name]
    result = nbp.prefix_encoder(**there, validate="wait")
    return tuple(part.get() for part in result) if isinstance(result, tuple) else result.get()


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """call(), on kernels that are interpreted or on a GPU's: the test's parameter `where`."""
    if request.node.callspec.params["where"] == "gpu":
        try:
            get_driver()
        except nbp.TargetUnavailableError as error:
            pytest.skip(str(error))
        yield call
        return
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
    import cuda_target

    with cuda_target.gpu((8, 0)):
        yield call


def close(run: Run, case: Case, **overrides: Any) -> Any:
    out, lse = run(case, return_lse=True, **overrides)
    assert_close(out, case, lse)
    return out


both = pytest.mark.parametrize("where", [INTERPRETED, ON_GPU])


@both
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_lengths(run: Run, where: str, dtype: str) -> None:
    """Around tiles, pages and splits; an empty sequence and single rows between them."""
    q_len, kv_len = [1, 0, 17, 64, 65, 5], [1, 9, 63, 64, 130, 2060]
    close(run, make_case(q_len, kv_len, head_num=4, kv_head_num=2, head_size=32, dtype=dtype))


@GPU
@pytest.mark.parametrize("where", ["gpu"])
@pytest.mark.parametrize("form", MASK_FORMS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_kinds(run: Run, where: str, form: str, dtype: str) -> None:
    case = make_case([33, 1, 130], [150, 2100, 390], head_num=6, kv_head_num=2, head_size=64, dtype=dtype)
    close(run, with_mask(case, form, mask_dtype=dtype))


@GPU
@pytest.mark.parametrize("where", ["gpu"])
@pytest.mark.parametrize("head_size", [1, 7, 16, 48, 64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_head_sizes(run: Run, where: str, head_size: int, dtype: str) -> None:
    close(run, make_case([33, 1], [150, 77], head_num=4, kv_head_num=2, head_size=head_size, dtype=dtype))


@both
@pytest.mark.parametrize("block_size", [1, 3, 48, 256])
def test_block_sizes(run: Run, where: str, block_size: int) -> None:
    close(run, make_case([5, 33], [70, 90], head_num=2, head_size=32, block_size=block_size, dtype="float16"))


@both
@pytest.mark.parametrize("group", [3, 7, 16])
def test_groups(run: Run, where: str, group: int) -> None:
    """Grouped heads are repeated heads."""
    case = make_case([5, 1], [21, 90], head_num=group, kv_head_num=1, head_size=32, dtype="float16")
    np.testing.assert_allclose(
        close(run, case).astype(float), close(run, repeated_heads(case)).astype(float), atol=2e-3
    )


@both
def test_exact_probes(run: Run, where: str) -> None:
    """No query: the mean of what is seen. One key: its value, bit for bit."""
    case = make_case([40], [100], head_size=32, dtype="float16", query=0.0, value=lambda b, j, h, c: j % 8)
    out = run(case).astype(float)
    seen = np.cumsum(np.arange(100) % 8)[60:] / np.arange(61, 101)
    np.testing.assert_allclose(out[:, 0, 0], seen, atol=2e-3)
    single = make_case([1, 1], [1, 1], head_size=32, dtype="float16")
    same_bits(run(single)[:, 0], np.concatenate([v[:, 0] for v in single.values]))


@both
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_bits(run: Run, where: str, dtype: str) -> None:
    """Of a sequence alone, among others in another order, in other pages, with other numbers where
    nobody reads."""
    case = make_case([5, 17, 1], [21, 90, 70], head_num=2, head_size=32, dtype=dtype)
    out = run(case)
    mixed = run(select(case, [2, 0, 1]))
    for place, b in enumerate([2, 0, 1]):
        same_bits(case.rows(out, b), select(case, [2, 0, 1]).rows(mixed, place))
    same_bits(out, run(repaged(case, seed=3, poison=60_000.0)))
    same_bits(case.rows(out, 1), run(select(case, [1])))


@both
@pytest.mark.parametrize("what", [np.nan, np.inf])
def test_what_is_not_finite(run: Run, where: str, what: float) -> None:
    """It reaches exactly the rows that may see it."""

    def value(b: int, j: Any, h: Any, c: Any) -> Any:
        return np.where((j == 80) & (c == 3), what, 1.0 + 0 * j + 0 * h + 0 * c)

    case = make_case([40], [100], head_size=32, dtype="float16", value=value)
    out = run(case)
    assert np.isfinite(out[:20]).all()
    assert not np.isfinite(out[20:, 0, 3]).any()
    assert np.isfinite(np.delete(out[20:, 0], 3, axis=1)).all()


@both
def test_held_blocks(run: Run, where: str) -> None:
    case = make_case([5, 33], [70, 200], head_num=2, head_size=32, dtype="float16")
    held = np.random.default_rng(0).random(case.block_tables.shape) < 0.5
    out, lse = run(case, held_blocks=held, return_lse=True)
    want, want_lse = run_elsewhere(case, "reference", held_blocks=held, return_lse=True)
    np.testing.assert_allclose(out.astype(float), want.astype(float), atol=2e-3)
    np.testing.assert_allclose(lse, want_lse, atol=2e-4)


@both
def test_parts(run: Run, where: str) -> None:
    """Of 16-bit inputs, in float32."""
    case = with_mask(make_case([5, 33], [70, 200], head_num=2, head_size=32, dtype="float16"), "causal")
    held = np.random.default_rng(0).random(case.block_tables.shape) < 0.5
    arrays = (case.query, case.key, case.value, case.block_tables)
    options = {"mask_type": "causal", "qk_scale": case.qk_scale}
    parts = []
    for target, of in (("cuda", GpuArray.of), ("reference", np.asarray)):
        op = plan_partial(*map(of, arrays), case.seq_len, case.kv_seq_len, held, Context(target), **options)
        op.run()
        op.check()
        parts.append([part.get() if target == "cuda" else part for part in (op.out, op.lse)])
    assert parts[0][0].dtype == np.float32
    np.testing.assert_allclose(parts[0][0], parts[1][0], atol=2e-4)
    np.testing.assert_allclose(parts[0][1], parts[1][1], atol=2e-4)


@both
def test_bad_blocks(run: Run, where: str) -> None:
    """They are never followed, and told of."""
    case = make_case([5, 33], [70, 90], head_num=2, head_size=32, dtype="float16")
    for bad in (len(case.key), -1, 2**31 - 1, -(2**31)):
        tables = case.block_tables.copy()
        tables[1, 2] = bad
        with pytest.raises(
            ValueError, match=naming(f"block {bad} for sequence 1, column 2", f"0 to {len(case.key) - 1}")
        ):
            run(replace(case, block_tables=tables))
    close(run, case)
