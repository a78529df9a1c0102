"""A plain run of the tests: what tests/README.md and support/full.py say of it is so."""

from __future__ import annotations

import ast
import re
from fnmatch import fnmatchcase

import full
import pytest
from processes import ROOT, TESTS
from tables import parts

PAGE = (TESTS / "README.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "numba_prefix"
EDITS = [line.split("|")[1:4] for line in parts(PAGE, "edits")[1].splitlines()[2:]]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_module_has_tests_to_run() -> None:
    """Each module fits a row, each row fits a module, and the tests that it names are there."""
    unused = {pattern for edited, *_ in EDITS for pattern in quoted(edited)}
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        fits = (pattern for edited, *_ in EDITS for pattern in quoted(edited) if name.startswith(pattern))
        first = next(fits, None)
        assert first is not None, name
        unused.discard(first)
    assert unused == set()
    for _, run, _ in EDITS:
        assert quoted(run)
        assert [name for name in quoted(run) if not (TESTS / name).exists()] == []


def first_cells(section: str) -> list[str]:
    """Names in the first column of the table under a heading."""
    lines = PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0].splitlines()
    return [name for line in lines if line.startswith("| `") for name in quoted(line.split("|")[1])]


def test_folders_and_helpers_are_those_of_the_page() -> None:
    hidden = "__pycache__"
    folders = {f"{path.name}/" for path in TESTS.iterdir() if path.is_dir()} - {f"{hidden}/"}
    assert sorted(first_cells("Where things are")) == sorted(folders)
    helpers = {path.name for path in (TESTS / "support").iterdir()} - {hidden}
    assert sorted(first_cells("Helpers")) == sorted(helpers)


def test_the_table_of_what_is_left_out() -> None:
    assert parts(PAGE, full.NAME)[1] == full.table()


@pytest.mark.parametrize("name", full.KEPT)
def test_what_is_left_out_exists(name: str) -> None:
    """Also where the libraries that a file needs are missing, and its tests are not collected."""
    file, _, test = name.partition("::")
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    assert test.rpartition("::")[2] in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_parameters_are_those_of_the_tests(request: pytest.FixtureRequest) -> None:
    """Of the files that were collected: each entry leaves out something, and each pattern keeps
    something."""
    from conftest import ALL_TESTS

    pytest.importorskip("numba_cuda", reason="without it, tests on all targets lack those on cuda")
    if any("::" in argument for argument in request.config.args):
        pytest.skip("only some tests of a file were collected")
    parameters: dict[str, list[str]] = {}
    for item in request.config.stash[ALL_TESTS]:
        name, found = full.name_and_parameters(item)
        parameters.setdefault(name, []).append(found)
    for name, kept in full.KEPT.items():
        found = parameters.get(name, [])
        assert not found or not all(any(fnmatchcase(x, pattern) for pattern in kept) for x in found), name
        assert not found or all(any(fnmatchcase(x, pattern) for x in found) for pattern in kept), (name, found)
