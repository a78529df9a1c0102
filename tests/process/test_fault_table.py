"""The table of faults in tests/README.md: all faults that tests put the package through, and none
failed."""

from __future__ import annotations

import ast
import json

import pytest
from fault_table import LAYERS, NAME, NOT_RUN, table
from faults import ANY_LAYER, FAULTS, RIGHT, fault
from processes import SCRIPTS, TESTS
from tables import parts


def test_the_table_of_the_page() -> None:
    _, written, _ = parts((TESTS / "README.md").read_text(encoding="utf-8"), NAME)
    rows = [line.strip("| ").split(" | ") for line in written.splitlines()]
    assert rows[0] == ["fault", *LAYERS.values()]
    assert rows[2:] == [[name, *[outcome] * len(LAYERS)] for name, outcome in FAULTS.values()]


def test_every_fault_has_a_test() -> None:
    """By name in a test, in the table of scripts/service.py, or as a variable of Numba's."""
    used = {"boundscheck", "disable_jit"}
    for path in (*(path for path in TESTS.rglob("test_*.py") if "ptx" not in path.parts), SCRIPTS / "service.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "fault":
                used |= {a.value for a in node.args[:1] if isinstance(a, ast.Constant)}
            if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "FAULTS":
                assert isinstance(node.value, ast.Dict)
                used |= {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
    assert used == set(FAULTS)


def test_a_table_shows_what_failed(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("NUMBA_PREFIX_FAULT_LOG", str(log))
    with fault("pool", "omp"):
        pass
    for error in ("no end after 3 s", "exit status -6\nAborted", "wrong"):
        with pytest.raises(AssertionError), fault("pool", "tbb"):
            raise AssertionError(error)
    with pytest.raises(pytest.skip.Exception), fault("pool"):
        pytest.skip("none here")
    lines = log.read_text().splitlines()
    assert [json.loads(line)["layer"] for line in lines] == ["omp", "tbb", "tbb", "tbb", ANY_LAYER]
    rows = [line.strip("| \n").split(" | ") for line in table(lines).splitlines()]
    assert rows[2] == [FAULTS["pool"][0], RIGHT, NOT_RUN, "hung, aborted (signal 6), FAILED", "not installed"]
    assert rows[3][1:] == [NOT_RUN] * 4


def test_a_file_without_markers() -> None:
    with pytest.raises(ValueError, match="page: got no lines <!-- faults -->"):
        parts("no table here", NAME)
