"""Instruction-set paths: which one a call takes, and that each computes the same operator.

Paths that this CPU lacks run with their instructions imitated (emulated.py), and are compiled for a
CPU that has them.
"""

from __future__ import annotations

import json
import os
import platform
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import MASK_FORMS, check, make_case, run, same_bits, select, to_numpy, with_mask
from commands import fail, succeed
from processes import ROOT, SCRIPTS, TESTS, environment, run_script

import numba_prefix as nbp
from numba_prefix.cpu import isa, plan, self_test, target
from numba_prefix.cpu.paths import PATHS, VECTOR, amx, by_name
from numba_prefix.cpu.simd import features
from numba_prefix.inputs.problem import FLOAT_DTYPES, Problem

X86 = pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="x86 CPUs")
NOT_A_CHILD = pytest.mark.skipif("NUMBA_CPU_NAME" in os.environ, reason="such a process is one of these tests")
NAMES = tuple(path.name for path in PATHS)
FASTER = [path.name for path in PATHS if path is not VECTOR]
SUITES = (
    *(
        "semantics/test_semantics.py",
        "semantics/test_semantics_alibi.py",
        "semantics/test_contract_edges.py",
        "semantics/test_bugs_masks.py",
    ),
    *("semantics/test_properties.py", "planning/test_workspace.py"),
)
SAPPHIRE_RAPIDS = (
    *(
        "sse3",
        "ssse3",
        "sse4.1",
        "sse4.2",
        "popcnt",
        "cx16",
        "avx",
        "avx2",
        "fma",
        "f16c",
        "bmi",
        "bmi2",
        "lzcnt",
        "movbe",
    ),
    *("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd", "avx512bf16", "amx-tile", "amx-bf16", "evex512"),
)


def reason_of(dtype: str) -> str:
    case = make_case((20,), (30,), dtype=dtype)
    _, op = nbp.self_attention_prefix_encoder_get_workspace_size(
        *(case.query, case.key, case.value, case.block_tables, None, case.seq_len, case.kv_seq_len, None, 9, 1, 1, 1.0),
        np.empty_like(case.query),
    )
    return str(op.reason)


@pytest.fixture
def some_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Has the paths that a test says, others not."""

    def has(*paths: str) -> None:
        monkeypatch.setattr(isa, "_missing", lambda path: "" if path.name in paths else f"no {path.name} here")
        monkeypatch.setattr(isa, "_wrong", {})
        isa._usable_from.cache_clear()

    monkeypatch.delenv(isa.VARIABLE, raising=False)
    yield has
    isa._usable_from.cache_clear()


class TestChoice:
    @pytest.mark.parametrize(
        ("paths", "expected"),
        [
            (("vector",), {"bfloat16": "vector", "float16": "vector", "float32": "vector"}),
            (("avx512_bf16", "vector"), {"bfloat16": "avx512_bf16", "float16": "vector", "float32": "vector"}),
            (NAMES, {"bfloat16": "amx", "float16": "amx", "float32": "vector"}),
        ],
    )
    def test_best_of_the_machine(self, some_machine: Any, paths: tuple[str, ...], expected: dict[str, str]) -> None:
        some_machine(*paths)
        assert {dtype: isa.candidates(dtype)[0].name for dtype in FLOAT_DTYPES} == expected

    def test_forced(self, some_machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        some_machine(*NAMES)
        monkeypatch.setenv(isa.VARIABLE, "avx512_bf16")
        assert [isa.candidates(dtype)[0].name for dtype in ("bfloat16", "float16")] == ["avx512_bf16", "vector"]
        monkeypatch.setenv(isa.VARIABLE, " vector ")
        assert {isa.candidates(dtype)[0].name for dtype in FLOAT_DTYPES} == {"vector"}

    @pytest.mark.parametrize(
        ("forced", "message"),
        [
            ("avx9", "got 'avx9' (it is none), expected one of avx512_bf16, vector"),
            ("amx", "got 'amx' (no amx here), expected one of avx512_bf16, vector"),
        ],
    )
    def test_what_cannot_be_forced(
        self, some_machine: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, forced: str, message: str
    ) -> None:
        some_machine("avx512_bf16", "vector")
        monkeypatch.setenv(isa.VARIABLE, forced)
        with pytest.raises(ValueError, match=re.escape(f"{isa.VARIABLE}: {message}")):
            reason_of("float16")
        for command in ("info", "run"):
            assert message in fail(capsys, command)

    def test_a_path_that_is_wrong_here_is_given_up(self, some_machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        some_machine(*NAMES)
        right = target.make_ready

        def make_ready(path: Any) -> bool:
            if path is VECTOR:
                return right(path)
            isa.give_up(path, "it computes wrong results on this machine")
            return False

        monkeypatch.setattr(target, "make_ready", make_ready)
        assert target.ready_path("bfloat16") is VECTOR
        assert (
            isa.obstacle(by_name("amx"))
            == isa.obstacle(by_name("avx512_bf16"))
            == "it computes wrong results on this machine"
        )

    def test_a_wrong_result_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The probe's own problem, through path vector: right as it is, wrong with every output a
        bit off."""
        right = target._compute

        def compute(*arguments: Any) -> None:
            right(VECTOR, *arguments)

        def compute_wrong(problem: Any, operands: Any, *lengths: Any) -> None:
            compute(problem, operands, *lengths)
            operands.out.owner[-1] ^= 0x0020

        for dtype in ("bfloat16", "float16"):
            assert self_test.is_right(dtype, compute)
            assert not self_test.is_right(dtype, compute_wrong)

    def test_no_permission_for_what_the_cpu_lacks(self) -> None:
        cpuinfo = Path("/proc/cpuinfo")
        has_tiles = cpuinfo.exists() and "amx_tile" in cpuinfo.read_text()
        assert amx.is_permitted() <= has_tiles

    def test_only_amx_asks_the_system(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[int] = []
        monkeypatch.setattr(features, "has_tiles", lambda: True)
        monkeypatch.setattr(features, "has_pairs", lambda: True)
        monkeypatch.setattr(amx, "is_permitted", lambda: bool(asked.append(1)))
        isa._missing.cache_clear()
        isa._usable_from.cache_clear()
        try:
            assert isa.candidates("float32")[0].name == "vector"
            monkeypatch.setenv(isa.VARIABLE, "avx512_bf16")
            assert isa.candidates("bfloat16")[0].name == "avx512_bf16"
            assert asked == []
            monkeypatch.delenv(isa.VARIABLE)
            assert isa.candidates("bfloat16")[0].name == "avx512_bf16"
            assert asked == [1]
        finally:
            isa._missing.cache_clear()
            isa._usable_from.cache_clear()

    def test_features_are_those_that_code_is_compiled_with(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Else a kernel would name instructions that LLVM was told not to use, at which it ends the
        process."""
        from numba.core import config

        monkeypatch.setattr(config, "ENABLE_AVX", 0)
        monkeypatch.setattr(config, "CPU_FEATURES", None)
        features.features.cache_clear()
        try:
            assert not any(name.startswith("avx") for name in features.features())
            assert not features.has_pairs()
            monkeypatch.setattr(config, "CPU_FEATURES", "+avx512bf16,+avx512bw,-amx-tile,+avx512f")
            features.features.cache_clear()
            assert features.has_pairs() == features.is_x86()
            assert not features.has_tiles()
        finally:
            features.features.cache_clear()

    @pytest.mark.parametrize(
        ("q_len", "kv_len", "num_threads", "expected"),
        [
            ((4096,), (38000,), 1, (512,)),
            ((4096,), (40000,), 1, (256,)),  # Ctrl-C would wait
            ((4096,), (100000,), 1, (128,)),
            ((4096, 4096, 100), (40000, 4096, 1024), 1, (256, 512, 128)),
            ((4096,), (38000,), 16, (256,)),  # too few tiles for so many threads
            ((4096,), (38000,), 100, (128,)),
            ((1900, 4096), (2048, 4096), 1, (128, 512)),  # the first one's keys are split
            ((1900, 4096), (2047, 4096), 1, (512, 512)),
        ],
    )
    def test_heights(
        self, q_len: tuple[int, ...], kv_len: tuple[int, ...], num_threads: int, expected: tuple[int, ...]
    ) -> None:
        problem = Problem("bfloat16", sum(q_len), len(q_len), 8, 8, 128, 9, 128, 999, nbp.MaskType.CAUSAL_MASK, "none",
                          None, 0, False, 1.0)  # fmt: skip
        lengths = np.array(q_len), np.array(kv_len)
        assert tuple(plan.tile_rows(by_name("amx"), problem, *lengths, num_threads)) == expected
        assert plan.tile_rows(VECTOR, problem, *lengths, num_threads).max() <= 256

    def test_scales_that_make_scores_of_tiny_products(self) -> None:
        """Whatever the path: 2**-132 times 2**127."""
        case = make_case((33,), (64,), dtype="bfloat16", query=2.0**-66, qk_scale=2.0**127,
                         key=lambda b, j, h, c: np.where(j % 2, 2.0**-66, -(2.0**-66)) + 0 * (h + c))  # fmt: skip
        check(case, "cpu")

    def test_reported(self, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
        monkeypatch.setenv(isa.VARIABLE, "vector")
        report = succeed(capsys, "info")
        assert set(report["cpu"]["paths"].values()) == {"vector"}
        assert all(report["cpu"]["unusable"].values())
        assert report["environment"][isa.VARIABLE] == "vector"
        assert "path vector on " in reason_of("float16")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
class TestResults:
    """Around the sizes that paths for pairs work in: 16 rows, 32 rows, 2 and 32 keys, 128 keys, 32
    dimensions."""

    LENGTHS = ((9, 17, 33, 64, 130, 5, 40), (9, 48, 160, 129, 257, 127, 289))

    @pytest.mark.parametrize("head_size", [16, 17, 31, 40, 64, 80, 128, 256])
    def test_head_sizes(self, dtype: str, head_size: int) -> None:
        check(make_case(*self.LENGTHS, head_num=2, kv_head_num=1, head_size=head_size, dtype=dtype), "cpu")

    def test_tall_tiles(self, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Tiles of 512 rows where there are enough, keys packed 512 at a time: around the ends of
        both, and of 128 keys. No bit depends on how tall they are."""
        case = make_case((530, 40, 9), (1100, 513, 1024), head_num=8, kv_head_num=8, head_size=16, dtype=dtype)
        check(case, "cpu")
        tall = run(case, "cpu")
        monkeypatch.setattr(plan, "FLOPS_PER_VISIT", 0.0)  # no tile is short enough
        plan._kept_plan.cache_clear()
        same_bits(run(case, "cpu"), tall)
        plan._kept_plan.cache_clear()

    @pytest.mark.parametrize("form", MASK_FORMS)
    def test_masks(self, dtype: str, form: str) -> None:
        check(with_mask(make_case((40, 9), (170, 40), head_num=2, head_size=32, dtype=dtype), form), "cpu")

    def test_takes_the_forced_path(self, dtype: str) -> None:
        forced = os.environ.get(isa.VARIABLE, "")
        if forced in FASTER and dtype in by_name(forced).dtypes:
            assert target.ready_path(dtype).name == forced
        assert f"path {target.ready_path(dtype).name} on " in reason_of(dtype)

    @pytest.mark.parametrize("where", ["key", "value"])
    @pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
    def test_special_future(self, dtype: str, where: str, special: float) -> None:
        """A row before it keeps its bits; the oracle says what the others become."""
        case = make_case((40,), (150,), head_size=32, dtype=dtype)
        tainted = getattr(case, where).copy()
        page, slot = divmod(140, 16)
        tainted[case.block_tables[0, page], slot, 0, 3] = special
        before, after = run(case, "cpu"), run(replace(case, **{where: tainted}), "cpu")
        same_bits(before[:30], after[:30])
        expected = nbp.reference(**(case.arguments() | {where: tainted}))[30:, 0]
        found = to_numpy(after)[30:, 0].astype(np.float64)
        np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(found[~finite], expected[~finite])
        np.testing.assert_allclose(found[finite], expected[finite], atol=0.02)

    def test_special_query(self, dtype: str) -> None:
        case = make_case((40,), (150,), head_size=32, dtype=dtype)
        query = case.query.copy()
        query[7, 0, 5] = np.inf
        before, after = run(case, "cpu"), run(replace(case, query=query), "cpu")
        clean = np.arange(40) != 7
        same_bits(to_numpy(before)[clean], to_numpy(after)[clean])
        assert np.isnan(to_numpy(after)[7].astype(np.float64)).all()

    def test_small_and_large_values(self, dtype: str) -> None:
        """float16's subnormals and largest values are sums of two bfloat16 like any others."""
        scale = (2.0**-24 * np.arange(1, 33)) if dtype == "float16" else 2.0**-100 * np.arange(1, 33)
        value = np.where(np.arange(32) % 2, scale, 60000.0 if dtype == "float16" else 2.0**100)
        case = make_case((33,), (90,), head_size=32, dtype=dtype, value=lambda b, j, h, c: value[c] + 0 * (j + h))
        out = to_numpy(run(case, "cpu")).astype(np.float64)
        np.testing.assert_allclose(out[:, 0], np.broadcast_to(to_numpy(case.values[0])[0, 0], (33, 32)), rtol=2.0**-7)

    def test_nothing_is_read_beside_an_array(self, dtype: str) -> None:
        """Every array and the workspace beside pages without access."""
        if os.environ.get(isa.VARIABLE) not in FASTER:
            pytest.skip("test_guard_pages.py does it, in processes of its own")
        script = runpy.run_path(str(SCRIPTS / "guard_pages.py"))
        for head_size in (1, 17, 40, 64):
            options: dict[str, Any] = {"head_num": 2, "kv_head_num": 1, "head_size": head_size, "dtype": dtype}
            case = make_case((7, 40, 18), (15, 150, 60), block_size=5, spare=0, tail=0, **options)
            script["check"](with_mask(case, "alibi-template"), "cpu")

    def test_products_alone(self, dtype: str) -> None:
        """What bench compares a path with."""
        bench = pytest.importorskip("bench.ceiling")
        bench.products(1e6, target.ready_path(dtype), dtype, 48, 1)()

    def test_batch_and_alone(self, dtype: str) -> None:
        case = make_case(*self.LENGTHS, head_num=2, kv_head_num=1, head_size=32, dtype=dtype)
        together = run(case, "cpu")
        for b in range(len(case.seq_len)):
            same_bits(case.rows(together, b), run(select(case, [b]), "cpu"))


def run_tests(path: str, which: str, *tests: str) -> None:
    """Tests of these that pytest's -k selects, in a process where calls take a path."""
    env = environment(NUMBA_PREFIX_ISA=path, NUMBA_PREFIX_NUM_THREADS="1", HYPOTHESIS_PROFILE="short")
    command = [sys.executable, "-m", "pytest", "-x", "--full", "-p", "emulated", "-k", which]
    command += [str(TESTS / name) for name in tests]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@NOT_A_CHILD
@pytest.mark.parametrize("path", FASTER)
def test_contract(path: str) -> None:
    """The contract's own tests on each path."""
    own = ("TestResults", "TestChoice::test_scales_that_make_scores_of_tiny_products")
    tests = (*SUITES, *(f"cpu/test_paths.py::{name}" for name in own))
    run_tests(path, "not reference and not cuda and not float32 and not concurrent", *tests)


@NOT_A_CHILD
@pytest.mark.parametrize("path", FASTER)
def test_in_brief(path: str) -> None:
    own = [f"cpu/test_paths.py::TestResults::test_{name}" for name in ("masks", "takes_the_forced_path")]
    run_tests(path, "bfloat16", *own)


@X86
@NOT_A_CHILD
def test_machine_code() -> None:
    """What LLVM makes of their own parts for a CPU that has the instructions."""
    names = ",".join(f"+{name}" for name in SAPPHIRE_RAPIDS)
    env = environment(NUMBA_CPU_NAME="sapphirerapids", NUMBA_CPU_FEATURES=names)
    facts = json.loads(run_script("path_code.py", ",".join(FASTER), env=env))
    for path, found in zip(FASTER, facts, strict=True):
        counts = found["counts"]
        assert found["doubles"] == 0
        assert found["calls"] == []
        assert sorted(found["weights"]) == [4, 4]  # eight vectors of weights; of two parts, the low ones
        assert found["spills"] == []
        if path == "amx":
            assert (counts["ldtilecfg"], counts["tilerelease"], counts["vdpbf16ps"]) == (1, 1, 0)
            assert max(found["dots"]) == 4
            assert found["registers"] == ["tmm"]
        else:
            assert counts["tdpbf16ps"] == 0
            assert max(found["dots"]) == 16
            assert found["registers"] == ["zmm"]
