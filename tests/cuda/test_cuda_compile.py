"""From a kernel's function to a cubin: what the code is like, what is said about it, what it takes
and what it leaves alone."""

from __future__ import annotations

import importlib.util
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kernel_stubs import LOCAL_NUMBERS, SPILLED_THREADS, THREADS, spec_of, stubs
from processes import environment, run_script

from numba_prefix import TargetUnavailableError
from numba_prefix.cuda.compile import compiler
from numba_prefix.cuda.compile.compiler import Compiled, compile_kernel
from numba_prefix.cuda.kernel.params import INTEGERS, Params
from numba_prefix.planning.params import FACTORS

HAS_COMPILER = importlib.util.find_spec("numba_cuda") is not None
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="numba-cuda is not installed")
GENERATIONS = ((7, 5), (8, 0), (9, 0), (10, 0), (12, 0))
REGISTERS, FRAME = 0x2F, 0x11  # attributes of a kernel in a cubin's .nv.info


@pytest.fixture(autouse=True)
def only_stubs() -> Iterator[None]:
    with stubs():
        yield


def compiled(kind: str, cc: tuple[int, int] = (8, 0)) -> Compiled:
    return compile_kernel(spec_of(kind), cc)


def doubles(ptx: str) -> list[str]:
    """The lines of a kernel that compute in float64."""
    return [line.strip() for line in ptx.splitlines() if re.search(r"\.(f64|b64 %fd)", line)]


def sections(cubin: bytes) -> dict[str, bytes]:
    """Contents of an ELF64 file's sections, by name."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    _, count, names_index = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + 64 * i) for i in range(count)]
    _, _, _, _, names, names_size, *_ = headers[names_index]
    names_bytes = cubin[names : names + names_size]
    found = {}
    for name, kind, _, _, offset, size, *_ in headers:
        text = names_bytes[name : names_bytes.index(b"\0", name)].decode()
        found[text] = cubin[offset : offset + size] if kind != 8 else b""
    return found


def attribute(cubin: bytes, wanted: int) -> list[int]:
    """Values of an attribute of the functions in a cubin; each has the function's number before
    it."""
    info, place, found = sections(cubin)[".nv.info"], 0, []
    while place < len(info):
        form, name, size = struct.unpack_from("<BBH", info, place)
        if form == 4 and name == wanted:
            found.append(struct.unpack_from("<II", info, place + 4)[1])
        place += 4 + (size if form == 4 else 0)
    return found


@needs_compiler
@pytest.mark.parametrize("cc", GENERATIONS)
def test_the_kernel_as_launched(cc: tuple[int, int]) -> None:
    """Its name, its GPU, its threads, and the parameters that a launch packs: in order, none left
    out or widened."""
    found = compiled("scaled", cc)
    assert found.name == spec_of("scaled").name
    assert found.cc == cc
    assert re.findall(r"^\.target (\w+)$", found.ptx, re.MULTILINE) == [f"sm_{cc[0]}{cc[1]}"]
    assert re.findall(r"\.entry (\w+)", found.ptx) == [found.name]
    assert re.findall(r"\.param \.(\w+)", found.ptx) == [*["u64"] * len(INTEGERS), *["f32"] * len(FACTORS)]
    assert re.findall(r"\.maxntid (\d+)", found.ptx) == [str(THREADS)]
    assert (found.threads, found.shared_bytes, found.block_m, found.block_n) == (THREADS, 1 << 16, 64, 32)
    assert found.cubin.startswith(b"\x7fELF")
    assert f".text.{found.name}" in sections(found.cubin)
    assert "NumbaEnv" not in found.ptx


@needs_compiler
def test_the_code_computes() -> None:
    from ptx import Memory, Module

    x, out = np.arange(THREADS, dtype=np.float32), np.full(THREADS, np.nan, np.float32)
    memory = Memory()
    memory.add("q", x, writable=False)
    memory.add("out", out)
    nothing = Params._make([0] * len(INTEGERS) + [0.0] * len(FACTORS))
    arguments = list(nothing._replace(q_ptr=x.ctypes.data, out_ptr=out.ctypes.data, qk_scale=2.5))
    module = Module(compiled("scaled").ptx)
    module.run(None, grid=1, block=THREADS, shared_bytes=0, arguments=arguments, memory=memory)
    np.testing.assert_array_equal(out, x * np.float32(2.5))


@needs_compiler
@pytest.mark.parametrize("cc", [(7, 5), (12, 0)])
def test_arithmetic_is_that_of_the_rules(cc: tuple[int, int]) -> None:
    """Rounded as IEEE says and with denormals; NaN and infinities are asked for; products and sums
    are one operation."""
    ptx = compiled("arithmetic", cc).ptx
    for instruction in ("fma.rn.f32", "div.rn.f32", "sqrt.rn.f32", "sub.f32", "setp.nan.f32", "0fFF800000"):
        assert instruction in ptx
    assert ".ftz" not in ptx
    assert ".approx" not in ptx
    assert doubles(ptx) == []


@needs_compiler
def test_doubles_are_seen() -> None:
    assert doubles(compiled("double").ptx)


@needs_compiler
def test_matrix_products_are_counted() -> None:
    assert compiled("products").mma_count == 2
    assert compiled("scaled").mma_count == 0


@needs_compiler
@pytest.mark.parametrize("cc", [(7, 5), (8, 0), (12, 0)])
def test_resources(cc: tuple[int, int]) -> None:
    """As the linker's log has them and as the cubin says, by which the GPU goes."""
    plain, spilled, local = (compiled(kind, cc) for kind in ("scaled", "spilled", "local"))
    for found in (plain, spilled, local):
        assert attribute(found.cubin, REGISTERS) == [found.registers]
        assert attribute(found.cubin, FRAME) == [found.local_bytes]
    assert 0 < plain.registers < 32
    assert plain.spill_bytes == plain.local_bytes == 0
    assert spilled.threads == SPILLED_THREADS
    assert spilled.registers <= (1 << 16) // SPILLED_THREADS
    assert spilled.spill_bytes > 0
    assert spilled.local_bytes > 0
    assert local.spill_bytes == 0
    assert local.local_bytes == 4 * LOCAL_NUMBERS


def assembler() -> str | None:
    """ptxas, if it comes with a package that is installed or is in the path."""
    found = importlib.util.find_spec("nvidia")
    places = [Path(root) / "cu13" / "bin" / "ptxas" for root in found.submodule_search_locations or ()] if found else []
    return next((str(path) for path in places if path.exists()), shutil.which("ptxas"))


@needs_compiler
@pytest.mark.skipif(assembler() is None, reason="ptxas is not installed")
@pytest.mark.parametrize("cc", GENERATIONS)
@pytest.mark.parametrize("kind", ["arithmetic", "spilled", "local"])
def test_the_cubin_is_the_ptx(kind: str, cc: tuple[int, int], tmp_path: Path) -> None:
    """What tests read and run as PTX is what GPUs get: ptxas makes the same machine code and the
    same resources of it."""
    found, ptxas = compiled(kind, cc), str(assembler())
    (release,) = re.findall(r"V\d+\.\d+\.\d+", found.ptx)
    if release not in subprocess.run([ptxas, "--version"], capture_output=True, text=True, check=True).stdout:
        pytest.skip(f"ptxas is not {release}")
    (tmp_path / "kernel.ptx").write_text(found.ptx)
    command = [ptxas, "-v", "-arch", f"sm_{cc[0]}{cc[1]}", "kernel.ptx", "-o", "kernel.cubin"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    ours, theirs = sections(found.cubin), sections((tmp_path / "kernel.cubin").read_bytes())
    code = f".text.{found.name}"
    assert len(ours[code]) > 256
    assert ours[code] == theirs[code]
    expected = {name: getattr(found, name) for name in ("registers", "spill_bytes", "local_bytes")}
    assert compiler._resources(done.stderr) == expected


@needs_compiler
def test_the_same_in_every_process() -> None:
    """To the byte, whatever was compiled before and whatever the environment asks of Numba."""
    kinds = ("scaled", "products")
    odd = {"NUMBA_OPT": "0", "NUMBA_CUDA_DEBUGINFO": "1", "NUMBA_FORCE_CUDA_CC": "9.0", "NUMBA_DISABLE_JIT": "1"}
    one = run_script("cuda_digests.py", *kinds)
    other = run_script("cuda_digests.py", *reversed(kinds), env=environment(**odd))
    assert len(one.splitlines()) == 4
    assert sorted(one.splitlines()) == sorted(other.splitlines())


def test_compute_capabilities() -> None:
    with pytest.raises(ValueError, match=r"cc: got 7\.0, expected at least 7\.5"):
        compiled("scaled", (7, 0))
    if HAS_COMPILER:
        with pytest.raises(TargetUnavailableError, match=r"compute capability 99\.0, expected one .* 8\.0, .* 9\.0"):
            compiled("scaled", (99, 0))


@needs_compiler
def test_a_kernel_that_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one does."""
    monkeypatch.setattr(compiler, "source_of", lambda spec: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        compiled("scaled")
    monkeypatch.undo()
    assert compiled("scaled").cubin


WITHOUT = """
import sys
sys.modules.update(dict.fromkeys({blocked!r}))
import numba_prefix
from numba_prefix.cuda.compile.compiler import compile_kernel
from kernel_stubs import spec_of, stubs
with stubs():
    for attempt in range(2):
        try:
            compile_kernel(spec_of("scaled"), (8, 0))
        except numba_prefix.TargetUnavailableError as error:
            print(error)
"""


def said_without(*blocked: str, **changes: str) -> list[str]:
    command = [sys.executable, "-c", WITHOUT.format(blocked=blocked)]
    env = environment(**changes)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.splitlines()


def test_without_the_extra() -> None:
    """One line that says what to do, each time."""
    lines = said_without("numba_cuda")
    assert len(lines) == 2
    assert lines[0] == lines[1]
    assert lines[0].startswith("target: got 'cuda', expected")
    assert "install numba_prefix[cuda] (numba-cuda is missing)" in lines[0]


@needs_compiler
def test_with_half_of_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for line in said_without("cuda.core"):
        assert "install numba_prefix[cuda] (" in line
        assert "cuda" in line.partition("(")[2]
    for line in said_without(NUMBA_ENABLE_CUDASIM="1"):
        assert "NUMBA_ENABLE_CUDASIM" in line
    compiler.toolchain.cache_clear()
    monkeypatch.setattr(compiler, "_is_loadable", lambda library: library != "nvJitLink")
    with pytest.raises(TargetUnavailableError, match=r"install numba_prefix\[cuda\] \(missing: nvidia-nvjitlink\)"):
        compiled("scaled")
    monkeypatch.undo()
    assert compiled("scaled").cubin


@needs_compiler
def test_with_a_linker_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old(compiler.toolchain().Linker):
        def link(self, output: str) -> None:
            raise RuntimeError("ERROR_OUTDATED_LIBRARY (14)\nnvJitLink error log: ERROR 4")

    monkeypatch.setattr(compiler.toolchain(), "Linker", Old)
    with pytest.raises(TargetUnavailableError, match=r"\(nvidia-nvjitlink is older than nvidia-nvvm\)$"):
        compiled("scaled")
    monkeypatch.undo()
    assert compiled("scaled").cubin


def test_imports_bring_no_compiler() -> None:
    code = (
        "import sys, numba_prefix\n"
        "from numba_prefix.cuda.compile import compiler, cubins, prebuild\nfrom numba_prefix.cuda.kernel import spec\n"
        "print([name for name in ('numba', 'numba.cuda', 'cuda.core', 'cuda.bindings') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@needs_compiler
def test_leaves_no_trace() -> None:
    run_script("cuda_no_trace.py")


@needs_compiler
@pytest.mark.skipif(sys.platform == "win32", reason="signals and forks are POSIX's")
@pytest.mark.parametrize("end", ["ctrl_c", "fork", "exit passes", "exit linking"])
def test_cut_short(end: str) -> None:
    assert run_script("cuda_interrupted.py", *end.split()).strip() == "right"
