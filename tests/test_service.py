"""What happens to a process that serves: pools, forks, signals, errors and exits around calls, under each threading layer."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cases import make_case, run, same_bits
from faults import fault
from processes import environment, finish, start

LAYERS = ("omp", "workqueue", "tbb")
METHODS = ("fork", "spawn", "forkserver")
POSIX = pytest.mark.skipif(sys.platform == "win32", reason="no fork, no signals to catch")


@functools.cache
def library_path() -> str:
    """Where pip puts libtbb, which the loader does not look into by itself."""
    return os.pathsep.join(filter(None, [str(Path(sys.prefix) / "lib"), os.environ.get("LD_LIBRARY_PATH")]))


@functools.cache
def has_layer(layer: str) -> bool:
    code = "import numba, numpy\nf = numba.njit(parallel=True)(lambda x: x + 1.0)\nf(numpy.ones(9))"
    env = environment(NUMBA_THREADING_LAYER=layer, LD_LIBRARY_PATH=library_path())
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=False).returncode == 0


def under(layer: str) -> dict[str, str]:
    if not has_layer(layer):
        pytest.skip(f"Numba has no threading layer {layer} here")
    return environment(NUMBA_THREADING_LAYER=layer, LD_LIBRARY_PATH=library_path(), NUMBA_NUM_THREADS="2")


def right(script: str, *arguments: str, env: dict[str, str] | None = None) -> None:
    """It ends with exit status 0 and has written nothing, on stderr either, but "right"."""
    output = finish(start(script, *arguments, env=env, stderr=subprocess.STDOUT))
    assert output.strip() == "right", output


@POSIX
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layer", LAYERS)
def test_children_after_a_call(layer: str, method: str) -> None:
    """numba#9288, gunicorn and multiprocessing: calls in the parent, and its own parallel function, before the start."""
    with fault(f"{method} after calls and a parallel region of the host", layer):
        right("children.py", method, "host", env=under(layer))


@POSIX
def test_torch_data_loader() -> None:
    """Forked workers of a DataLoader, after torch's OpenMP threads are up in the parent."""
    with fault("calls in forked DataLoader workers, torch's OpenMP up in the parent"):
        pytest.importorskip("torch")
        right("children.py", "fork", "torch")


@pytest.mark.parametrize("layer", LAYERS)
def test_in_a_pool_beside_the_hosts_parallel_function(layer: str) -> None:
    """Calls that have helpers, from four threads of a ThreadPoolExecutor; workqueue itself allows one user at a time."""
    with fault("calls from the host's thread pool beside its own parallel function", layer):
        right("host_pool.py", *([] if layer == "workqueue" else ["everywhere"]), env=under(layer))


@POSIX
@pytest.mark.parametrize(
    ("mode", "name", "outcome"),
    [
        ("ctrl_c", "Ctrl-C during a long call", "KeyboardInterrupt within 2 s, next call right"),
        (
            "alarm",
            "exception of a signal handler (time limit) during a long call",
            "raised within 2 s, next call right",
        ),
        ("async", "exception set in a thread during its long call", "raised within 6 s, other threads right"),
        ("bad_ids", "bad arguments in one thread", "ValueError there, other threads right"),
    ],
)
def test_call_that_is_ended(mode: str, name: str, outcome: str) -> None:
    """With one thread and with helpers, prefill and decode; then a right result."""
    with fault(name, outcome=outcome):
        right("interrupted.py", mode)


@POSIX
@pytest.mark.parametrize("attempt", range(2))
def test_exit_while_daemon_threads_compute(attempt: int) -> None:
    """The interpreter ends in the middle of two calls: exit status 0, nothing said."""
    with fault("exit while daemon threads are inside calls", outcome="clean exit"):
        output = finish(start("interrupted.py", "exit", stderr=subprocess.STDOUT))
        assert output == "right\n", output


@pytest.mark.parametrize("layer", LAYERS)
def test_leaves_no_trace(layer: str) -> None:
    """Thread counts, environment, handlers, filters, error states, denormals and more are after calls what they were."""
    with fault("process state after calls and errors", layer, "unchanged"):
        right("no_trace.py", *(["all"] if layer == "omp" else []), env=under(layer))


def test_denormal_modes_of_the_host() -> None:
    """Bits depend on the mode of the calling thread at most, never on who helps."""
    with fault("threads of the host that flush subnormals"):
        pytest.importorskip("torch")
        right("float_modes.py")


def test_exception_leaves_the_next_call_right() -> None:
    """In one thread, without and with a workspace of one's own."""
    case = make_case([3, 2], [20, 9], dtype="float16")
    expected = run(case, "cpu")
    for bad in ({"workspace": bytearray(1)}, {"kv_seq_len": (20, 10_000)}, {"num_threads": 0}, {"stream": 1}):
        with pytest.raises(ValueError):
            run(case, "cpu", **bad)
        same_bits(run(case, "cpu"), expected)
