"""The package's thread cap, and what affinity, cgroup quotas and environment variables leave of the
CPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import make_case, run, same_bits
from commands import fail, succeed
from control_groups import limited_to_one_cpu, tree
from faults import fault
from processes import environment, finish, start
from test_service import LAYERS, POSIX, under

import numba_prefix as nbp
from numba_prefix.runtime import num_threads as threads
from numba_prefix.runtime.cgroups import cpu_quota

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
# Of a process: the cgroup file and the mount table of a host with version 2, with version 1, and
# with both.
UNIFIED = {
    "proc/cgroup": "0::/a/b\n",
    "proc/mountinfo": "30 23 0:26 / TOP/cg rw,nosuid shared:9 - cgroup2 cgroup2 rw\n",
}
V1 = {
    "proc/cgroup": "9:memory:/m\n4:cpu,cpuacct:/a/b\n",
    "proc/mountinfo": "33 31 0:30 / TOP/cg/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "34 31 0:31 / TOP/cg/memory rw - cgroup cgroup rw,memory\n",
}
HYBRID = {
    "proc/cgroup": "1:cpu:/v1\n0::/v2\n",
    "proc/mountinfo": "1 0 0:1 / TOP/cg rw - tmpfs tmpfs rw\n2 1 0:2 / TOP/cg/cpu rw - cgroup cgroup rw,cpu\n"
    "3 1 0:3 / TOP/cg/unified rw - cgroup2 cgroup2 rw\n",
}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Four CPUs and no cap, whatever the machine and the caller's environment have."""
    monkeypatch.delenv("NUMBA_NUM_THREADS", raising=False)
    monkeypatch.delenv(threads.VARIABLE, raising=False)
    monkeypatch.setattr(threads, "allowed_cpus", lambda: 4)
    monkeypatch.setattr(threads, "quota", lambda: None)
    yield
    nbp.set_num_threads(None)


def v1(group: str, quota: int, period: int = 100_000) -> dict[str, str]:
    return {f"{group}/cpu.cfs_quota_us": f"{quota}\n", f"{group}/cpu.cfs_period_us": f"{period}\n"}


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        (UNIFIED, None),
        (UNIFIED | {"cg/a/b/cpu.max": "150000 100000\n"}, 1.5),
        (UNIFIED | {"cg/a/b/cpu.max": "max 100000\n", "cg/a/cpu.max": "50000 100000\n"}, 0.5),
        (UNIFIED | {"cg/a/b/cpu.max": "300000 100000\n", "cg/a/cpu.max": "200000 100000\n"}, 2.0),
        (UNIFIED | {"cg/a/b/cpu.max": "100000 100000\n", "cg/a/cpu.max": "200000 100000\n"}, 1.0),
        (UNIFIED | {"cg/cpu.max": "700000 100000\n"}, 7.0),
        (UNIFIED | {"cg/a/c/cpu.max": "100000 100000\n", "cg/a/b/c/cpu.max": "100000 100000\n"}, None),
        (UNIFIED | {"cg/a/b/cpu.max": "abc\n", "cg/a/cpu.max": "1\n", "cg/cpu.max": "9 0\n"}, None),
        (UNIFIED | {"cg/a/b/cpu.max/is/a/directory": "", "cg/a/cpu.max": "2 1\n"}, 2.0),
        (UNIFIED | {"cg/a/b/cpu.max": f"{10**400} 1\n"}, None),
        (V1 | v1("cg/cpu,cpuacct/a/b", -1), None),
        (V1 | v1("cg/cpu,cpuacct/a/b", 250_000), 2.5),
        (V1 | v1("cg/cpu,cpuacct/a/b", -1) | v1("cg/cpu,cpuacct/a", 50_000, 10_000), 5.0),
        (V1 | v1("cg/cpu,cpuacct", 100_000) | v1("cg/cpu,cpuacct/a", 300_000), 1.0),
        (V1 | v1("cg/memory/a/b", 100_000), None),
        (HYBRID | v1("cg/cpu/v1", 300_000) | {"cg/unified/v2/cpu.max": "400000 100000"}, 3.0),
        (HYBRID | v1("cg/cpu/v2", 100_000) | {"cg/unified/v2/cpu.max": "400000 100000"}, 4.0),
    ],
)
def test_quotas(files: dict[str, str], quota: float | None, tmp_path: Path) -> None:
    """The smallest of a group and all above it, in each hierarchy at its own path; junk is no
    limit."""
    tree(tmp_path, files)
    assert cpu_quota(tmp_path / "proc", tmp_path / "nowhere") == quota


def test_quota_of_a_container(tmp_path: Path) -> None:
    """Without a namespace the path is the host's and the mount is a part of the tree; other
    containers' mounts and groups outside of the namespace do not count; a mount point may have a
    space in it."""
    mounts = "1 0 0:1 /docker/me TOP/my\\040cg rw - cgroup2 cgroup2 rw\n2 0 0:1 /docker/you TOP/yours rw - cgroup2 cgroup2 rw\n"
    files = {"proc/cgroup": "0::/docker/me/inner\n", "proc/mountinfo": mounts, "yours/cpu.max": "1 1"}
    tree(tmp_path, files | {"my cg/cpu.max": "3 1", "my cg/inner/cpu.max": "2 1"})
    assert cpu_quota(tmp_path / "proc", tmp_path) == 2.0
    (tmp_path / "proc/cgroup").write_text("0::/../docker/me\n")
    assert cpu_quota(tmp_path / "proc", tmp_path) is None
    (tmp_path / "proc/cgroup").unlink()
    assert cpu_quota(tmp_path / "proc", tmp_path) == 1.0  # no telling which is ours


@pytest.mark.parametrize("where", ["cg", "cg/cpu", "cg/cpu,cpuacct"])
def test_quota_without_a_mount_table(where: str, tmp_path: Path) -> None:
    files = {f"{where}/cpu.max": "2 1"} if where == "cg" else v1(where, 200_000)
    tree(tmp_path, files)
    assert cpu_quota(tmp_path / "proc", tmp_path / "cg") == 2.0
    assert cpu_quota(tmp_path / "proc", tmp_path / "nowhere") is None


@LINUX
def test_quota_that_the_kernel_enforces() -> None:
    """In a group without a quota of its own, inside one of one CPU."""
    with limited_to_one_cpu() as group:
        if group is None:
            pytest.skip("this process may make no control group")
        code = "import numba_prefix as n; from numba_prefix.runtime.cgroups import cpu_quota; print(cpu_quota(), n.get_num_threads())"
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment(), preexec_fn=joining(group), capture_output=True, check=True, text=True
        )  # fmt: skip
        assert done.stdout.split() == ["1.0", "1"]


def joining(group: Path) -> Any:
    return lambda: (group / "cgroup.procs").write_text(str(os.getpid()))


@pytest.mark.parametrize(("quota", "cpus"), [(None, 4), (0.01, 1), (1.0, 1), (2.1, 3), (99.0, 4)])
def test_part_of_a_cpu_counts_as_one(quota: float | None, cpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "quota", lambda: quota)
    assert nbp.get_num_threads() == threads.available_cpus() == cpus


def test_smallest_cap_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the CPUs, NUMBA_NUM_THREADS, NUMBA_PREFIX_NUM_THREADS and set_num_threads; the variables
    are read at each call."""
    assert (nbp.get_num_threads(), threads.thread_cap()) == (4, (None, None))
    nbp.set_num_threads(np.int64(3))
    assert (nbp.get_num_threads(), threads.thread_cap()) == (3, (3, "set_num_threads"))
    monkeypatch.setenv(threads.VARIABLE, " 2 ")
    assert (nbp.get_num_threads(), threads.thread_cap()) == (2, (2, threads.VARIABLE))
    nbp.set_num_threads(1)
    assert (nbp.get_num_threads(), threads.thread_cap()) == (1, (1, "set_num_threads"))
    nbp.set_num_threads(None)
    monkeypatch.setenv("NUMBA_NUM_THREADS", "1")
    assert (nbp.get_num_threads(), threads.thread_cap()) == (1, (2, threads.VARIABLE))
    monkeypatch.setenv(threads.VARIABLE, "")
    monkeypatch.setenv("NUMBA_NUM_THREADS", "\u00b2")  # a digit that is no number
    assert (nbp.get_num_threads(), threads.thread_cap()) == (4, (None, None))


def test_per_call_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """More threads than CPUs may be asked for, more than the cap are not had."""
    assert [threads.resolved(n) for n in (None, 1, 9)] == [4, 1, 9]
    nbp.set_num_threads(6)
    assert [threads.resolved(n) for n in (None, 1, 9)] == [4, 1, 6]
    nbp.set_num_threads(2)
    assert [threads.resolved(n) for n in (None, 1, 9)] == [2, 1, 2]


def test_cap_reaches_plans_that_were_made_before(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call, a plan made before and a second phase, each asking for four threads."""
    from numba_prefix.cpu import target as launch

    case = make_case([300], [2000], head_num=8, head_size=64)
    out = np.full_like(case.query, np.nan)
    context = nbp.Context(kernel, 4)
    arguments = case.arguments() | {"head_num": None, "kv_head_num": None, "attn_out": out, "context": context}
    size, op = nbp.self_attention_prefix_encoder_get_workspace_size(**arguments)
    expected = run(case, kernel)
    asked: list[int] = []
    together = launch.run_together
    monkeypatch.setattr(launch, "run_together", lambda task, n: (asked.append(n), together(task, n)))
    for cap in (None, 2, 1):
        ThreadPoolExecutor(1).submit(nbp.set_num_threads, cap).result()
        same_bits(run(case, kernel, num_threads=4), expected)
        op.run()
        nbp.self_attention_prefix_encoder(bytearray(size), size, op, context)
        same_bits(out, expected)
    assert asked == [4, 4, 4, 2, 2, 2, 1, 1, 1]


@pytest.mark.parametrize(
    ("given", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), (2.0, TypeError), ("2", TypeError)]
)
def test_senseless_caps(given: Any, error: type[Exception]) -> None:
    nbp.set_num_threads(3)
    with pytest.raises(error, match="num_threads: got .*, expected"):
        nbp.set_num_threads(given)
    assert nbp.get_num_threads() == 3


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "+2", "1_0", "\u0662", "9" * 5000])
def test_senseless_variable(text: str, target: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Said by every call before anything is computed, and by every command; a service that was told
    to keep to few threads must not start many."""
    case = make_case([3], [9])
    expected, out = run(case, target), np.full_like(case.query, np.nan)
    monkeypatch.setenv(threads.VARIABLE, text)
    message = f"{threads.VARIABLE}: got .*, expected an integer of at least 1"
    for num_threads in (None, 1):
        with pytest.raises(ValueError, match=message):
            run(case, target, out=out, num_threads=num_threads)
    assert np.isnan(out).all()
    with pytest.raises(ValueError, match=message):
        nbp.get_num_threads()
    for command in ("info", "run", "bench", "warmup"):
        assert threads.VARIABLE in fail(capsys, command)
    monkeypatch.delenv(threads.VARIABLE)
    same_bits(run(case, target, out=out), expected)


def test_info_tells_the_cap(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    found = succeed(capsys, "info")["threads"]
    assert (found["default"], found["cap"], found["cap_source"]) == (4, None, None)
    monkeypatch.setenv(threads.VARIABLE, "3")
    monkeypatch.setattr(threads, "quota", lambda: 1.5)
    report = succeed(capsys, "info")
    found = report["threads"]
    assert (found["default"], found["cap"], found["cap_source"]) == (2, 3, threads.VARIABLE)
    assert (
        "a cgroup quota of 1.5" in found["reason"] and f"at most 3 in any call: {threads.VARIABLE}" in found["reason"]
    )
    assert report["environment"][threads.VARIABLE] == "3"


@POSIX
@pytest.mark.parametrize("layer", LAYERS)
def test_cap_in_a_service(layer: str) -> None:
    """In all threads, in plans made before and in forked children, with a quota where this process
    may set one."""
    with fault("capped", layer), limited_to_one_cpu() as group:
        options = {} if group is None else {"preexec_fn": joining(group)}
        env = under(layer) | {threads.VARIABLE: ""}
        output = finish(
            start("capped.py", *([] if group is None else ["quota"]), env=env, stderr=subprocess.STDOUT, **options)
        )
        assert output.strip() == "right", output
