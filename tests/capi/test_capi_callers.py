"""Loading the C interface, its header, and callers that are C programs."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import c_side
import pytest
from processes import run_script

import numba_prefix as nbp
from numba_prefix import capi
from numba_prefix.capi.descriptors import DTYPES as DTYPE_CODES
from numba_prefix.capi.descriptors import MAX_DIMS
from numba_prefix.capi.status import Status
from numba_prefix.front.operation import TARGETS


def test_load_is_the_same_everywhere() -> None:
    """In every thread; and a thread that holds the GIL may call what it gave."""
    with ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(lambda _: capi.load(), range(8)))
    assert all(functions is c_side.api for functions in loaded)
    with_the_gil = ctypes.PYFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(c_side.api.NumbaPrefixDestroyOperation)
    assert with_the_gil(None) == Status.ERROR_INVALID_OPERATION_ADDR
    with pytest.raises(TypeError, match="warmup: got int, expected a bool"):
        capi.load(warmup=1)  # type: ignore[arg-type]


def test_header_has_the_same_numbers() -> None:
    text = (Path(capi.include_directory()) / "numba_prefix.h").read_text()
    numbers = {name: int(n) for name, n in re.findall(r"NUMBA_PREFIX_(\w+) = (-?\d+)", text)}
    numbers |= {name: int(n) for name, n in re.findall(r"#define NUMBA_PREFIX_(\w+) (\d+)", text)}
    assert numbers.pop("API_VERSION") == capi.API_VERSION and numbers.pop("MAX_DIMS") == MAX_DIMS
    assert numbers.pop("DEVICE_CPU") == 0
    masks = {name: numbers.pop(name) for name in list(numbers) if name.startswith("MASK_")}
    assert masks == {f"MASK_{kind.name}": kind.value for kind in nbp.MaskType}
    targets = {name: numbers.pop(name) for name in list(numbers) if name.startswith("TARGET_")}
    assert targets == {f"TARGET_{name.upper()}": code for code, name in enumerate(TARGETS)}
    statuses = {name: numbers.pop(name) for name in list(numbers) if name in Status.__members__}
    assert statuses == {status.name: status.value for status in Status}
    acl = {"float32": "FLOAT", "float64": "DOUBLE", "bfloat16": "BF16"}
    assert numbers == {acl.get(name, name.upper()): code for code, name in DTYPE_CODES.items()}


@pytest.mark.parametrize(
    ("language", "standard", "compilers"),
    [
        ("c", "c89", ("cc", "gcc", "clang")),
        ("c", "c11", ("cc", "gcc", "clang")),
        ("c++", "c++98", ("c++", "g++", "clang++")),
    ],
)
def test_header_compiles(language: str, standard: str, compilers: tuple[str, ...], tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_text('#include "numba_prefix.h"\n#include "numba_prefix.h"\nextern NumbaPrefixApi api;\n')
    options = [f"-std={standard}", *c_side.WARNINGS, "-fsyntax-only", f"-I{capi.include_directory()}"]
    subprocess.run([c_side.compiler(*compilers), "-x", language, *options, str(source)], check=True, timeout=60)


@pytest.fixture(scope="session")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return c_side.compiled_caller(tmp_path_factory.mktemp("caller"))


@pytest.mark.parametrize("mode", ["threads", "signal", "after"])
def test_caller_in_c(caller: Path, mode: str) -> None:
    """Threads of its own; a signal while it runs, which Python must not lose; calls after the
    interpreter's end."""
    assert run_script("c_callers.py", mode, caller, stderr=subprocess.STDOUT) == "right\n"


@pytest.mark.skipif(sys.platform == "win32", reason="no fork, no signals to catch")
@pytest.mark.parametrize("mode", ["ctrl_c", "fork"])
def test_calls_through_ctypes(mode: str) -> None:
    """Ctrl-C during the computation ends the call soon, and is raised where C returns to; and calls
    in a forked child."""
    assert run_script("c_callers.py", mode, stderr=subprocess.STDOUT) == "right\n"
