"""The command line: what is printed, written and returned for good problems and for bad files."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import Case, make_case, run, same_bits
from commands import fail, shift_oracle, succeed
from processes import ROOT, environment

import numba_prefix as nbp
from numba_prefix.__main__ import main
from numba_prefix.cli import table
from numba_prefix.verify import testing


def example(**extra: Any) -> Case:
    return make_case([3, 5], [20, 37], **({"head_num": 4, "kv_head_num": 2, "dtype": "float16"} | extra))


def contents(case: Case, **changes: Any) -> dict[str, Any]:
    """A file's arrays; a change to None leaves a key out."""
    given = {name: value for name, value in case.arguments().items() if value is not None} | changes
    return {name: np.asarray(value) for name, value in given.items() if value is not None}


@pytest.fixture
def file(tmp_path: Path) -> str:
    return write(tmp_path, contents(example()))


def write(directory: Path, arrays: dict[str, Any], name: str = "case.npz") -> str:
    np.savez(directory / name, **arrays)
    return str(directory / name)


# --- run


def test_run_sample(capsys: pytest.CaptureFixture[str]) -> None:
    report = succeed(capsys, "run", "--threads", "1")
    assert report["target"] == "cpu"
    assert report["reason"]
    assert report["texts"]
    assert report["ok"]
    assert report["out_error"]["max_error"] <= report["out_error"]["max_allowed"]
    assert report["median_seconds"] > 0
    assert report["gflop_per_second"] > 0


def test_run_prints_a_table(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", file]) == 0
    text = capsys.readouterr().out
    for word in ("float16 [8, 4, 16]", "20, 37", "CAUSAL_MASK", "workspace", "GFLOP/s", "within the error budget"):
        assert word in text
    assert text.isascii()


def test_run_counts_flops(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """4 * head_size * heads for every pair: rows of 18, 19, 20 and of 33 … 37 visible keys."""
    assert succeed(capsys, "run", file)["flops"] == 4 * 16 * 4 * (18 + 19 + 20 + 33 + 34 + 35 + 36 + 37)
    assert succeed(capsys, "run", file, "--mask-type", "none")["flops"] == 4 * 16 * 4 * (3 * 20 + 5 * 37)


def test_run_writes_what_the_library_computes(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "result"
    succeed(capsys, "run", file, "--out", str(target))
    out, lse = run(example(), "cpu", return_lse=True)
    with np.load(target, allow_pickle=False) as written:
        same_bits(written["out"], out)
        same_bits(written["lse"], lse)


@pytest.mark.parametrize("stored", ["uint16", "ml_dtypes"])
@pytest.mark.parametrize("has_ml_dtypes", [True, False])
def test_run_bfloat16(
    stored: str,
    has_ml_dtypes: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = example(dtype="bfloat16")
    arrays = contents(case, dtype="bfloat16")
    if stored == "uint16":
        arrays |= {name: arrays[name].view(np.uint16) for name in ("query", "key", "value")}
    expected = run(case, "cpu")
    if not has_ml_dtypes:
        monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    report = succeed(capsys, "run", write(tmp_path, arrays), "--out", str(tmp_path / "out.npz"))
    assert report["arrays"]["query"]["dtype"] == "bfloat16"
    with np.load(tmp_path / "out.npz", allow_pickle=False) as written:
        assert written["dtype"] == "bfloat16"
        same_bits(written["out"].view(ml_dtypes.bfloat16), expected)


def test_run_overrides(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = succeed(capsys, "run", file, "--mask-type", "alibi_sqrt", "--qk-scale", "0.5", "--target", "reference")
    assert report["problem"]["mask_type"] == "ALIBI_COMPRESS_SQRT"
    assert report["problem"]["qk_scale"] == 0.5
    assert report["target"] == "reference"
    assert "slopes" in report["remarks"][0]
    with_slopes = write(tmp_path, contents(example(), mask_type=3, slopes=nbp.alibi_slopes(4)), "alibi.npz")
    report = succeed(capsys, "run", with_slopes, "--mask-type", "9")
    assert report["problem"]["mask_type"] == "CAUSAL_MASK"
    assert "slopes" in report["remarks"][0]


def test_run_two_dimensional_with_head_num(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = example()
    arrays = contents(case, query=case.query.reshape(8, -1), head_num=4, kv_head_num=2, mask_type="none")
    assert succeed(capsys, "run", write(tmp_path, arrays))["problem"]["mask_type"] == "NONE"


def test_run_shows_texts_of_a_file_harmlessly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, contents(example(), note="a\x1b[2Jb\nc", huge=np.zeros(10**5), odd=[1, 2]))
    assert main(["run", file]) == 0
    text = capsys.readouterr().out
    assert "a?[2Jb c" in text
    assert "huge" not in text
    assert "odd" not in text


def test_run_over_budget(file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shift_oracle(monkeypatch, testing)
    assert main(["run", file]) == 1
    assert "OVER THE ERROR BUDGET" in capsys.readouterr().out


# --- bad files


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"key": None}, "key"),
        ({"seq_len": None, "kv_seq_len": None}, "seq_len, kv_seq_len"),
        ({"value": np.zeros((3, 16, 2, 16), np.float16)}, "value: got"),
        ({"query": np.zeros((8, 4, 16))}, "float64"),
        ({"query": np.zeros((8, 4, 16), np.uint16)}, "dtype='bfloat16'"),
        ({"dtype": "bfloat16"}, "uint16"),
        ({"dtype": "float32"}, "dtype: got 'float32'"),
        ({"seq_len": [3, 6]}, "seq_len: got lengths that sum to 9"),
        ({"kv_seq_len": [20, 3700]}, "kv_seq_len"),
        ({"block_tables": np.full((2, 3), 77, np.int32)}, "block_tables: got block 77"),
        ({"mask_type": "sideways"}, "mask_type"),
        ({"mask_type": [0, 9]}, "mask_type: got shape (2,)"),
        ({"mask_type": 3}, "slopes"),
        ({"qk_scale": np.nan}, "qk_scale"),
        ({"qk_scale": "much"}, "qk_scale"),
        ({"query": np.array([{}], object)}, "query"),
        ({"mask_type": np.array({"a": 1}, object)}, "mask_type"),
        ({"head_num": 3}, "head_num"),
    ],
)
def test_run_bad_contents(
    changes: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, contents(example(), **changes))
    line = fail(capsys, "run", file)
    assert words in line
    assert file in line


@pytest.mark.parametrize(
    "kind", ["missing", "directory", "empty", "text", "npy", "truncated", "damaged", "foreign", "pickle"]
)
def test_run_bad_file(kind: str, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.npz"
    whole = Path(file).read_bytes()
    if kind == "directory":
        bad.mkdir()
    elif kind == "npy":
        np.save(tmp_path / "one.npy", np.zeros(3))
        (tmp_path / "one.npy").rename(bad)
    elif kind == "foreign":
        with zipfile.ZipFile(bad, "w") as archive:
            archive.writestr("query", b"not an array")
    elif kind == "pickle":
        np.array([{}], object).dump(bad)
    elif kind != "missing":
        middle = len(whole) // 2
        damaged = whole[:200] + bytes(byte ^ 0xFF for byte in whole[200:middle]) + whole[middle:]
        bad.write_bytes({"empty": b"", "text": b"hello\n", "truncated": whole[:middle], "damaged": damaged}[kind])
    assert str(bad) in fail(capsys, "run", str(bad))


def test_run_never_replaces_a_file_unasked(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = Path(file).read_bytes()
    link = tmp_path / "link.npz"
    link.symlink_to(file)
    for target in (file, str(link)):
        assert "is the input" in fail(capsys, "run", file, "--out", target, "--force")
    assert Path(file).read_bytes() == before
    other = tmp_path / "other.npz"
    other.write_bytes(b"precious")
    assert "--force" in fail(capsys, "run", file, "--out", str(other))
    assert other.read_bytes() == b"precious"
    assert "directory" in fail(capsys, "run", file, "--out", str(tmp_path))
    assert "directory" in fail(capsys, "run", file, "--out", str(tmp_path / "no" / "out.npz"))
    succeed(capsys, "run", file, "--out", str(other), "--force")
    assert other.read_bytes() != b"precious"


def test_run_without_out_writes_nothing(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    succeed(capsys, "run", file)
    assert [path.name for path in tmp_path.iterdir()] == ["case.npz"]


def test_explicit_target_never_falls_back(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cuda" in fail(capsys, "run", file, "--target", "cuda")
    assert "cuda" in fail(capsys, "warmup", "--target", "cuda")


# --- manners


@pytest.mark.parametrize(
    "arguments", [[], ["fly"], ["run", "--threads", "0"], ["run", "--target", "tpu"], ["bench", "--rounds", "x"]]
)
def test_bad_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_unknown_mask_type_lists_what_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--mask-type", "7"])
    assert "ALIBI_COMPRESS" in capsys.readouterr().err


def test_interrupted(file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("numba_prefix.cli.run.first_run", interrupt)
    assert main(["run", file]) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal")
def test_interrupted_while_compiling(tmp_path: Path) -> None:
    """At once, although LLVM is busy."""
    env = environment(NUMBA_CACHE_DIR=str(tmp_path))
    command = [sys.executable, "-m", "numba_prefix", "run"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=env, **pipes) as process:
        assert process.stderr.readline().startswith("loading kernels, or compiling them")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    table.emit_json({"a": float("inf"), "b": [float("nan"), (1, 2.5)]})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, [1, 2.5]]}


def test_from_a_zip_file(tmp_path: Path) -> None:
    """The package's own sample is found wherever the package is imported from."""
    archive = tmp_path / "package.zip"
    with zipfile.ZipFile(archive, "w") as package:
        for path in (ROOT / "numba_prefix").rglob("*"):
            if path.suffix in (".py", ".npz"):
                package.write(path, path.relative_to(ROOT))
    command = [sys.executable, "-m", "numba_prefix", "run", "--target", "reference", "--json"]
    env = environment(PYTHONPATH=str(archive))
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"] is True
