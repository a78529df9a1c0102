"""What the compiler made of the kernel: single precision throughout, vector loops, nothing spilled
in a micro-kernel."""

from __future__ import annotations

import platform
import re

import numpy as np
import pytest
from machine_code import VECTOR, inner_loops

import numba_prefix as nbp
from numba_prefix.cpu.compile import jit
from numba_prefix.cpu.kernel import work_loop
from numba_prefix.cpu.simd.features import features

IS_X86 = platform.machine().lower() in ("x86_64", "amd64")


@pytest.fixture(scope="module")
def compiled() -> tuple[str, str]:
    """(LLVM IR, assembly) of the tile loop, compiled afresh: code from the cache can't be read
    back."""
    fresh = jit.kernel(work_loop.drain.py_func)
    fresh._cache.load_overload = lambda *_: None
    query, cache = np.ones((1, 1, 16), np.float32), np.ones((1, 4, 1, 16), np.float32)
    nbp.prefix_encoder(query, cache, cache, np.zeros((1, 1), np.int32), [1], [2])
    (signature,) = work_loop.drain.signatures
    fresh.compile(signature)
    return fresh.inspect_llvm(signature), fresh.inspect_asm(signature)


def test_no_double_precision(compiled: tuple[str, str]) -> None:
    """No float64 creeps in: not a value, not a constant, not a conversion."""
    llvm_ir, _ = compiled
    assert "<16 x float>" in llvm_ir
    lines = [line for line in llvm_ir.splitlines() if re.search(r"\bdouble\b", line)]
    assert lines == []


def test_no_fast_math(compiled: tuple[str, str]) -> None:
    """Infinities and NaN are real values here: no flag that lets the compiler assume them away."""
    llvm_ir, _ = compiled
    assert re.search(r"\bf(add|mul|sub|div|cmp)\b", llvm_ir)
    assert re.findall(r"\b(?:fast|nnan|ninf)\b(?= |$)", re.sub(r"!.*|;.*|\".*?\"|@\S+", "", llvm_ir)) == []


@pytest.mark.skipif(not IS_X86, reason="reads x86 assembly")
@pytest.mark.skipif("fma" not in features(), reason="the micro-kernel's loops are found by their fused multiply-adds")
def test_micro_kernel_loops(compiled: tuple[str, str]) -> None:
    """Loops of fused multiply-adds: on whole vectors, in the widest registers, and nothing goes
    through the stack."""
    _, assembly = compiled
    loops = [block for block in inner_loops(assembly) if sum("vfmadd" in line for line in block) >= 8]
    assert len(loops) >= 12  # score and output products, and those for few rows in three dtypes
    widest = "zmm" if "avx512f" in features() else "ymm"
    for block in loops:
        products = [line for line in block if "vfmadd" in line]
        assert all("ps" in line.split()[0] and widest in line for line in products)
        if any("vpslld $23" in line.replace("\t", " ") for line in block):
            continue  # an exponential: its coefficients may live on the stack where there are 16 registers
        spilled = [line for line in block if "(%rsp" in line and VECTOR.search(line)]
        assert spilled == []


@pytest.mark.skipif(not IS_X86, reason="reads x86 assembly")
def test_exponential_is_vectorised(compiled: tuple[str, str]) -> None:
    """No call leaves the kernel for a library's exp2, log2, fma or half conversion."""
    llvm_ir, assembly = compiled
    names = r"exp2f?|log2f?|fmaf?|expf?|logf?|__extendhfsf2|__truncsfhf2|__gnu_\w+"
    assert re.findall(rf"\$(?:{names})\b|call\w*\s+(?:{names})\b", assembly) == []
    assert not re.search(r"declare float @llvm\.(exp|log)", llvm_ir)
