"""`inspect` and `warmup --cc`: which kernels, for which GPUs, and what is said of them."""

from __future__ import annotations

import collections
import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import fail, succeed
from processes import environment

import numba_prefix as nbp
from numba_prefix.__main__ import main
from numba_prefix.cuda.compile import cubins, prebuild
from numba_prefix.cuda.compile.compiler import Compiled, source_of
from numba_prefix.cuda.kernel.spec import HEAD_DIMS, KernelSpec, family_of, head_dim_of, merge_of
from numba_prefix.inputs.mask_types import MaskType
from numba_prefix.inputs.problem import FLOAT_DTYPES
from numba_prefix.planning.params import BIASES

PLAIN = (MaskType.CAUSAL_MASK, MaskType.NONE)
ONE = ("--cc", "8.0", "--dtypes", "float16", "--head-sizes", "64", "--mask-types", "causal")


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[KernelSpec, tuple[int, int]]]:
    """What was compiled, in order; nothing really is."""
    made: list[tuple[KernelSpec, tuple[int, int]]] = []

    def compile_kernel(spec: KernelSpec, cc: tuple[int, int]) -> Compiled:
        made.append((spec, cc))
        return Compiled(
            spec.name, cc, b"cubin", 128, 4096, 64, 32, registers=40, spill_bytes=8, local_bytes=16, mma_count=2
        )

    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cubins, "compile_kernel", compile_kernel)
    monkeypatch.setattr(cubins, "_ready", {})
    return made


def test_families() -> None:
    assert [family_of(dtype, (8, 0)) for dtype in FLOAT_DTYPES] == ["mma", "mma", "fma"]
    assert {family_of(dtype, (7, 5)) for dtype in FLOAT_DTYPES} == {"fma"}
    assert {family_of("float16", cc) for cc in ((8, 6), (9, 0), (10, 0), (12, 1))} == {"mma"}


def test_padding() -> None:
    assert [head_dim_of(size) for size in HEAD_DIMS] == list(HEAD_DIMS)
    assert [head_dim_of(size) for size in (1, 33, 80, 97, 129, 193)] == [32, 64, 96, 128, 192, 256]


def test_nothing_falls_through() -> None:
    """What is not known is an error, not the last of what is."""
    with pytest.raises(KeyError, match="float64"):
        family_of("float64", (8, 0))
    with pytest.raises(ValueError, match="empty"):
        head_dim_of(HEAD_DIMS[-1] + 1)
    with pytest.raises(KeyError, match="another"):
        cubins._key(KernelSpec("another", "float16", "float16", 64), (8, 0))


@pytest.mark.skipif(importlib.util.find_spec("numba_cuda") is None, reason="numba-cuda is not installed")
@pytest.mark.parametrize(
    "spec",
    [
        KernelSpec("fma", "int8", "float16", 64),
        KernelSpec("fma", "float16", "int8", 64),
        KernelSpec("fma", "float16", "float16", 64, "heads_mask", "int8"),
        KernelSpec("fma", "float16", "float16", 64, "another"),
        KernelSpec("mma", "float32", "float32", 64),
        KernelSpec("merge", "int8", "int8", 64),
    ],
    ids=str,
)
def test_unknown_kernels_are_not_made(spec: KernelSpec) -> None:
    with pytest.raises(KeyError, match="int8|another|float32"):
        source_of(spec)


def test_merges() -> None:
    """One serves all kernels of an output's dtype and a head's size."""
    spec = KernelSpec("mma", "float16", "float32", 128, "heads_mask", "float16", False)
    assert merge_of(spec) == KernelSpec("merge", "float32", "float32", 128)


@pytest.mark.parametrize("cc", prebuild.GENERATIONS)
def test_default_kernels(cc: tuple[int, int]) -> None:
    """Each dtype and head size in the family that the target would choose, which causal and not
    share; and their merges."""
    specs = prebuild.default_specs(cc, FLOAT_DTYPES, HEAD_DIMS, PLAIN)
    assert len(specs) == len(set(specs)) == 3 * 6 + 3 * 6
    families = collections.Counter(spec.family for spec in specs)
    assert families == ({"fma": 18, "merge": 18} if cc == (7, 5) else {"mma": 12, "fma": 6, "merge": 18})
    assert {spec.bias for spec in specs} == {"none"}
    assert all(spec.is_aligned and not spec.mask_dtype and spec.out_dtype == spec.dtype for spec in specs)
    attention = {(s.dtype, s.head_dim) for s in specs if s.family != "merge"}
    assert attention == set(itertools.product(FLOAT_DTYPES, HEAD_DIMS))


def test_all_kernels() -> None:
    """Every bias there is, once; given masks are read as the inputs' dtype."""
    specs = [s for s in prebuild.default_specs((9, 0), ["bfloat16"], [64], tuple(MaskType)) if s.family == "mma"]
    assert sorted(spec.bias for spec in specs) == sorted(BIASES)
    for spec in specs:
        is_read = spec.bias.startswith("template") or spec.bias == "heads_mask"
        assert spec.mask_dtype == ("bfloat16" if is_read else "")


def test_head_sizes_that_are_no_whole_chunks() -> None:
    (spec, _) = prebuild.default_specs((8, 0), ["float16"], [20], [MaskType.CAUSAL_MASK])
    assert (spec.head_dim, spec.is_aligned) == (32, False)
    (spec, _) = prebuild.default_specs((8, 0), ["float32"], [20], [MaskType.CAUSAL_MASK])
    assert (spec.head_dim, spec.is_aligned) == (32, True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("8.0", [(8, 0)]),
        (" 8.6 ,12.0", [(8, 6), (12, 0)]),
        ((9, 0), [(9, 0)]),
        ([(9, 0), "10.0"], [(9, 0), (10, 0)]),
    ],
)
def test_compute_capabilities(given: Any, expected: Any) -> None:
    assert prebuild.parsed_ccs(given) == expected


@pytest.mark.parametrize(
    "given", ["", "8", "8.", "80", "sm_80", "8.0,", "8.10", "-8.0", "8.0a", "٨.٠", [], 9.0, [8, 0], True, (True, 0)]
)
def test_no_compute_capabilities(given: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"cc: got .*expected"):
        prebuild.parsed_ccs(given)


def test_inspect(compilations: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    found = succeed(capsys, "inspect", *ONE)
    assert found["target"] == "cuda"
    attention, merge = found["kernels"]
    assert attention["name"] == "mma_float16_d64_none"
    assert merge["name"] == "merge_float16_d64_none"
    facts = {"registers": 40, "spill_bytes": 8, "local_bytes": 16, "shared_bytes": 4096, "mma_count": 2}
    for kernel in (attention, merge):
        assert {name: kernel[name] for name in facts} == facts
        assert (kernel["cc"], kernel["dtype"], kernel["head_size"], kernel["source"]) == (
            "8.0",
            "float16",
            64,
            "compiled",
        )
    assert set(found["versions"]) >= {"numba", "numba-cuda", "nvidia-nvvm", "nvidia-nvjitlink"}
    assert main(["inspect", *ONE]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["mma_float16_d64_none", "8.0", "float16", "64", "40", "8", "16", "4096", "2"]


def test_inspect_everything(compilations: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """By default for each generation; kernels of one source follow each other, since they share
    most of the work."""
    kernels = succeed(capsys, "inspect")["kernels"]
    assert len(kernels) == len(compilations) == 6 * 36
    specs = [spec for spec, _ in compilations]
    assert sum(a != b for a, b in itertools.pairwise(specs)) == len(set(specs)) - 1
    ccs = collections.Counter(kernel["cc"] for kernel in kernels)
    assert ccs == dict.fromkeys(("7.5", "8.0", "8.6", "9.0", "10.0", "12.0"), 36)
    more = succeed(capsys, "inspect", "--all", "--cc", "9.0", "--dtypes", "float32", "--head-sizes", "33")["kernels"]
    assert len(more) == len(BIASES) + 1
    assert {kernel["head_size"] for kernel in more} == {64}


def test_warmup(compilations: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    first = succeed(capsys, "warmup", "--target", "cuda", *ONE)
    assert first["target"] == "cuda"
    assert first["ok"] is True
    assert first["checks"] == []
    assert [(k["name"], k["cc"], k["source"]) for k in first["kernels"]] == [
        ("mma_float16_d64_none", "8.0", "compiled"),
        ("merge_float16_d64_none", "8.0", "compiled"),
    ]
    assert all(kernel["seconds"] >= 0 for kernel in first["kernels"])
    cubins._ready.clear()
    assert {k["source"] for k in succeed(capsys, "warmup", "--target", "cuda", *ONE)["kernels"]} == {"cache"}
    assert main(["warmup", "--target", "cuda", *ONE]) == 0
    text = capsys.readouterr().out
    assert "mma_float16_d64_none for 8.0" in text
    assert "nothing was run" in text


def test_warmup_function(compilations: list[Any]) -> None:
    """64 and 128, all dtypes, causal and none, unless told otherwise."""
    found = nbp.warmup("cuda", cc=[(8, 0), "9.0"])
    assert len(found["kernels"]) == 2 * (3 * 2 + 3 * 2)
    assert "9.0" in found["reason"]
    found = nbp.warmup("cuda", cc=(9, 0), dtypes="float16", head_sizes=128, mask_types="alibi")
    assert [kernel["name"] for kernel in found["kernels"]] == [
        "mma_float16_d128_linear",
        "mma_float16_d128_template_linear_float16_mask",
        "mma_float16_d128_heads_mask_float16_mask",
        "merge_float16_d128_none",
    ]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"target": "cpu", "cc": "8.0"}, ValueError, "cc: got '8.0', expected None for target 'cpu'"),
        ({"target": "auto", "cc": "8.0"}, ValueError, "cc: got"),
        ({"target": "cuda", "cc": "eight"}, ValueError, "cc: got 'eight', expected"),
        ({"target": "cuda", "cc": 8}, TypeError, "cc: got int"),
        ({"target": "cuda", "cc": []}, ValueError, "cc: got nothing"),
        ({"target": "cuda", "cc": "8.0", "dtypes": "float64"}, ValueError, "dtypes"),
        ({"target": "cuda", "cc": "8.0", "head_sizes": 257}, ValueError, "head_sizes"),
    ],
)
def test_warmup_arguments(
    arguments: dict[str, Any], error: type[Exception], words: str, compilations: list[Any]
) -> None:
    with pytest.raises(error, match=words):
        nbp.warmup(**arguments)
    assert compilations == []


def test_bad_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--target: got 'cpu', expected 'cuda'" in fail(capsys, "inspect", "--target", "cpu")
    assert "cc: got '8'" in fail(capsys, "inspect", "--cc", "8")
    assert "cc: got 7.0, expected at least 7.5" in fail(capsys, "inspect", *ONE, "--cc", "7.0")
    assert "head_sizes: got 300" in fail(capsys, "inspect", "--head-sizes", "300")
    assert "cc: got '8.0', expected None" in fail(capsys, "warmup", "--target", "cpu", "--cc", "8.0")


@pytest.mark.parametrize("command", [("inspect",), ("warmup", "--target", "cuda")])
def test_without_the_extra(command: tuple[str, ...], tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['numba_cuda'] = None\n"
        "from numba_prefix.__main__ import main\n"
        f"sys.exit(main({[*command, *ONE]!r}))"
    )
    env = environment(NUMBA_CACHE_DIR=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "install numba_prefix[cuda] (numba-cuda is missing)" in done.stderr.splitlines()[-1]


def test_a_failure_in_the_middle_keeps_what_is_done(
    compilations: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = cubins.compile_kernel

    def failing(spec: KernelSpec, cc: tuple[int, int]) -> Compiled:
        if spec.family == "merge":
            raise nbp.TargetUnavailableError("target: got 'cuda', expected more")
        return honest(spec, cc)

    monkeypatch.setattr(cubins, "compile_kernel", failing)
    assert "expected more" in fail(capsys, "inspect", *ONE)
    monkeypatch.setattr(cubins, "compile_kernel", honest)
    monkeypatch.setattr(cubins, "_ready", {})
    assert [kernel["source"] for kernel in succeed(capsys, "inspect", *ONE)["kernels"]] == ["cache", "compiled"]


def test_slow_kernels_are_announced(compilations: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from numba_prefix.cli import table

    monkeypatch.setattr(table, "SLOW_SECONDS", -1.0)
    assert main(["inspect", *ONE, "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)
    assert "1 of 2: mma_float16_d64_none for 8.0 (compiled" in printed.err
