"""The commands about this machine: info, warmup (and the function of that name), bench."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from shlex import split
from typing import Any

import numpy as np
import pytest
from cases import make_case, run
from commands import fail, shift_oracle, succeed
from processes import environment

import numba_prefix as nbp
from numba_prefix.__main__ import main
from numba_prefix.cli import bench as bench_command
from numba_prefix.verify import testing

SMALL_BENCH = split("--q-len 9 --kv-len 70 --batch 2 --heads 4 --kv-heads 2 --head-size 32 --block-size 16 --rounds 3")
SMALL_WARMUP = split("--dtypes float32 --head-sizes 16 --mask-types causal 4")


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    report = succeed(capsys, "info")
    assert report["threads"]["default"] >= 1
    assert report["threads"]["reason"]
    assert report["threads"]["is_numba_threading_layer_used"] is False
    assert set(report["cpu"]["paths"]) == {"float16", "bfloat16", "float32"}
    assert report["cache"]["is_writable"] is True
    assert report["versions"]["numba_prefix"] == nbp.__version__
    if not report["cuda"]["is_available"]:
        assert report["cuda"]["reason"]
    assert main(["info"]) == 0
    assert "CUDA" in capsys.readouterr().out


def test_info_of_a_cache_that_cannot_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file"))
    assert succeed(capsys, "info")["cache"]["is_writable"] is False
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "new"))
    assert succeed(capsys, "info")["cache"]["is_writable"] is True
    assert not (tmp_path / "new").exists()


def test_info_compiles_nothing_and_imports_no_torch() -> None:
    program = (
        "import sys\n"
        "from numba_prefix.__main__ import main\n"
        "assert main(['info']) == 0\n"
        "assert 'torch' not in sys.modules\n"
        "from numba_prefix.cpu.compile_times import kernels\n"
        "assert kernels() and not any(kernel.overloads for kernel in kernels())\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_warmup_command(capsys: pytest.CaptureFixture[str]) -> None:
    report = succeed(capsys, "warmup", *SMALL_WARMUP)
    assert {check["mask_type"] for check in report["checks"]} == {"CAUSAL_MASK", "ALIBI_COMPRESS_SQRT"}
    assert report["kernels"]
    assert all(kernel["source"] in ("compiled", "cache", "memory") for kernel in report["kernels"])
    assert main(["warmup", *SMALL_WARMUP]) == 0
    assert "float32" in capsys.readouterr().out


def test_warmup_leaves_nothing_to_compile() -> None:
    """Every kernel that a later call needs is ready, and a second warm-up finds it in memory."""
    nbp.warmup(dtypes="float16", head_sizes=16, mask_types="none")
    from numba_prefix.cpu.compile_times import kernel_times, kernels

    with kernel_times() as times:
        run(make_case([3, 5], [20, 37], head_size=80), "cpu", return_lse=True)
    assert {time.source for time in times} == {"memory"}
    ready = {kernel.__name__ for kernel in kernels() if kernel.overloads}  # other paths' may not be needed
    assert ready and {time.name for time in times} == ready
    again = nbp.warmup("auto", dtypes=["float16"], head_sizes=[16], mask_types=[nbp.MaskType.NONE])
    assert {kernel["source"] for kernel in again["kernels"]} == {"memory"}


def test_warmup_verifies(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shift_oracle(monkeypatch, testing)
    with pytest.raises(RuntimeError, match="wrong result"):
        nbp.warmup(dtypes="float32", head_sizes=16, mask_types="causal")
    assert main(["warmup", *SMALL_WARMUP]) == 1
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"dtypes": "float64"}, ValueError, "dtypes"),
        ({"dtypes": []}, ValueError, "dtypes"),
        ({"head_sizes": 257}, ValueError, "head_sizes"),
        ({"head_sizes": [1.5]}, ValueError, "head_sizes"),
        ({"mask_types": "sideways"}, ValueError, "mask_type"),
        ({"target": "gpu"}, ValueError, "target"),
        ({"target": "cuda"}, nbp.TargetUnavailableError, "target"),
        ({"num_threads": 0}, ValueError, "num_threads"),
    ],
)
def test_warmup_arguments(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        nbp.warmup(**arguments)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("mask_type", ["causal", "none", "alibi_sqrt"])
def test_bench(dtype: str, mask_type: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = succeed(capsys, "bench", *SMALL_BENCH, "--dtype", dtype, "--mask-type", mask_type)
    assert len(report["seconds"]) == 3
    assert report["best_seconds"] <= report["median_seconds"]
    item = 4 if dtype == "float32" else 2
    assert report["kv_bytes"] == 2 * item * 2 * 70 * 2 * 32
    assert report["gate"]["ok"]
    assert report["gate"]["rows"] >= 2


def test_bench_prints_its_assumptions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *SMALL_BENCH]) == 0
    text = capsys.readouterr().out
    assert "GFLOP/s" in text
    assert "GB/s" in text
    assert all(line in text for line in bench_command.ASSUMPTIONS)


def test_bench_shows_no_figures_for_a_wrong_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shift_oracle(monkeypatch, bench_command)
    assert main(["bench", *SMALL_BENCH]) == 1
    text = capsys.readouterr().out
    assert "no figures" in text
    assert "GFLOP" not in text


def test_bench_sees_rows_that_are_not_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = bench_command.first_run

    def forgetful(*arguments: Any) -> Any:
        op, out, kernels = honest(*arguments)
        out[4, 1, 3] = np.nan
        return op, out, kernels

    monkeypatch.setattr(bench_command, "first_run", forgetful)
    assert main(["bench", *SMALL_BENCH, "--dtype", "float32", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["gate"]["is_complete"] is False
    assert "seconds" not in report


def test_bench_impossible_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--kv-len" in fail(capsys, "bench", "--kv-len", "5")
    assert "--kv-heads" in fail(capsys, "bench", "--kv-heads", "5")
    assert "head size" in fail(capsys, "bench", *SMALL_BENCH, "--head-size", "257")
    assert "memory" in fail(capsys, "bench", *SMALL_BENCH, "--heads", "2000000000000")


def test_rows_of_a_problem_are_a_smaller_problem() -> None:
    """What the bench checks: single rows as sequences of their own are the same rows."""
    for mask_type in nbp.MaskType:
        inputs = testing.random_inputs(
            [9, 0, 4],
            [70, 3, 4],
            head_num=4,
            kv_head_num=2,
            head_size=16,
            block_size=16,
            dtype="float32",
            mask_type=mask_type,
        )
        problem = testing.static_problem(
            **{k: v for k, v in inputs.arguments().items() if k not in ("seq_len", "kv_seq_len")}
        )[0]
        rows, cut = testing.sample_rows(inputs, problem, 8)
        assert {0, 12} <= set(rows.tolist())
        assert cut.query.shape[0] == len(rows)
        whole = nbp.reference(**inputs.arguments())
        np.testing.assert_allclose(nbp.reference(**cut.arguments()), whole[rows], rtol=0, atol=1e-12)
