"""The same tests with LLVM kept to the instructions of older x86 CPUs, each in a process of its
own."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
from processes import ROOT, TESTS, environment

SSE = "+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+cx16"
CPUS = {
    # AVX2, FMA and half conversion: 16 registers of 8 lanes
    "haswell": f"{SSE},+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe",
    # nothing beyond SSE4.2: no FMA, float16 converted by integer arithmetic
    "nehalem": SSE,
}
SUITES = {
    "haswell": [
        *(
            "semantics/test_semantics.py",
            "semantics/test_semantics_alibi.py",
            "semantics/test_contract.py",
            "semantics/test_contract_edges.py",
        ),
        *("planning/test_workspace.py", "cpu/test_machine_code.py", "semantics/test_properties.py"),
    ],
    "nehalem": [
        "semantics/test_semantics.py",
        "semantics/test_contract_edges.py",
        "semantics/test_bugs_masks.py",
        "semantics/test_bugs_inputs.py",
    ],
}


def is_this_one(cpu: str) -> bool:
    """Whether all of the tests here run on such a CPU anyway, as what LLVM sees has no more than
    its registers."""
    from llvmlite import binding

    features = binding.get_host_cpu_features()
    return cpu == "haswell" and features.get("avx2", False) and not features.get("avx512f", False)


@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="x86 CPUs")
@pytest.mark.skipif("NUMBA_CPU_NAME" in os.environ, reason="this is such a process")
@pytest.mark.parametrize("cpu", CPUS)
def test_older_cpu(cpu: str) -> None:
    if is_this_one(cpu):
        pytest.skip("this machine has those instructions and no more")
    env = environment(NUMBA_CPU_NAME=cpu, NUMBA_CPU_FEATURES=CPUS[cpu], HYPOTHESIS_PROFILE="short")
    files = [str(TESTS / name) for name in SUITES[cpu]]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-k",
        "not reference and not cuda",
        "-p",
        "no:cacheprovider",
        *files,
    ]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
