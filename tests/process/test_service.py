"""What happens to a process that serves: each fault under each threading layer, beside a parallel
region of the host.

scripts/service.py meets the faults; two of its processes, each with one layer, run at a time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from cases import make_case, run, same_bits
from faults import FAULTS, fault
from layers import ANY_LAYER, LAYERS, has_layer, under
from processes import SCRIPTS, finish, run_script, start

sys.path.insert(0, str(SCRIPTS))
try:
    from service import FAULTS as MET
finally:
    sys.path.remove(str(SCRIPTS))

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="no fork, no signals to catch")
Reports = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def meet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Reports]]:
    """The reports of a layer on the faults that are selected here."""
    run_script("one_call.py")  # what all of them load is compiled
    wanted: dict[str, list[str]] = {layer: [] for layer in LAYERS}
    for item in request.session.items:
        if getattr(item, "originalname", "") == test_fault.__name__:
            wanted[item.callspec.params["layer"]].append(item.callspec.params["key"])  # type: ignore[attr-defined]

    def met(layer: str) -> Reports:
        process = start("service.py", tmp_path_factory.mktemp(layer), *wanted[layer], env=under(layer))
        lines = finish(process, timeout=500).splitlines()
        return {report["fault"]: report for report in map(json.loads, lines)}

    with ThreadPoolExecutor(2) as pool:
        futures: dict[str, Future[Reports]] = {
            layer: pool.submit(met, layer) for layer in LAYERS if wanted[layer] and is_of_its_own(layer)
        }
        yield lambda layer: futures[layer].result()


def is_of_its_own(layer: str) -> bool:
    """Without tbb, what Numba takes where none is chosen is omp, if there is that."""
    return has_layer(layer) and (layer != ANY_LAYER or has_layer("tbb") or not has_layer("omp"))


@POSIX
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("key", MET)
def test_fault(key: str, layer: str, meet: Callable[[str], Reports]) -> None:
    """What is right is in the fault's own function; here, that its process came to a clean end."""
    with fault(key, layer):
        under(layer)
        if not is_of_its_own(layer):
            pytest.skip("no layer chosen is omp here, which is met too")
        report = meet(layer)[key]
        assert report["status"] != "hung", f"no end after a minute\n{report['output']}"
        assert report["status"] == 0, f"exit status {report['status']}\n{report['output']}"
        if FAULTS[key][1] == "clean exit":
            assert report["output"] == ""


@POSIX
@pytest.mark.parametrize("layer", LAYERS)
def test_fork_in_a_first_call(layer: str) -> None:
    """Module locks, numba's and LLVM's that another thread held were held for ever in the child."""
    with fault("fork_first", layer):
        process = start("fork_in_first_call.py", env=under(layer), stderr=subprocess.STDOUT)
        assert finish(process, timeout=60).strip() == "right"


def test_exception_leaves_the_next_call_right() -> None:
    """In one thread, without and with a workspace of one's own."""
    case = make_case([3, 2], [20, 9], dtype="float16")
    expected = run(case, "cpu")
    for bad in ({"workspace": bytearray(1)}, {"kv_seq_len": (20, 10_000)}, {"num_threads": 0}, {"stream": 1}):
        with pytest.raises(ValueError):
            run(case, "cpu", **bad)
        same_bits(run(case, "cpu"), expected)
