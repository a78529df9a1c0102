"""Pages: they name only what exists, fit a screen, and the tables in them are where the programs
that write them look."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from processes import ROOT

PAGES = sorted(
    path
    for pattern in ("README.md", ".github/*.md", "numba_prefix/**/*.md", "bench/README.md", "tests/**/*.md")
    for path in ROOT.glob(pattern)
)
FENCE = "```"
PATH = re.compile(r"\.?\w[\w.-]*(?:/[\w.-]+)*/?")
SUFFIXES = (".py", ".md", ".toml", ".txt", ".npz", ".h", ".yml", ".yaml")
MAX_COLUMNS, MAX_README_LINES = 100, 150


def prose(text: str) -> list[str]:
    """Lines that are neither code nor a table's."""
    lines, is_code = [], False
    for line in text.splitlines():
        if line.startswith(FENCE):
            is_code = not is_code
        elif not is_code and not line.startswith(("|", "    ")):
            lines.append(line)
    return lines


def named_paths(text: str) -> set[str]:
    """What looks like a path in the page's code spans; NAME stands for a file to be made."""
    outside_blocks = re.sub(rf"^{FENCE}.*?^{FENCE}$", "", text, flags=re.MULTILINE | re.DOTALL)
    words = {word for span in re.findall(r"`([^`]+)`", outside_blocks) for word in span.split()}
    paths = {word for word in words if PATH.fullmatch(word) and ("/" in word or word.endswith(SUFFIXES))}
    return {path for path in paths if Path(path).stem not in ("NAME", "FILE")}


def exists(name: str, page: Path) -> bool:
    """From the root, the page's folder or the package; a test's file name alone, in any folder of
    tests."""
    if any((base / name).exists() for base in (ROOT, page.parent, ROOT / "numba_prefix")):
        return True
    return "/" not in name and any((ROOT / "tests").rglob(name))


def test_there_are_pages() -> None:
    names = {path.relative_to(ROOT).as_posix() for path in PAGES}
    assert names >= {"README.md", ".github/CONTRIBUTING.md", "numba_prefix/README.md", "tests/contract.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_paths_exist(page: Path) -> None:
    assert {name for name in named_paths(page.read_text(encoding="utf-8")) if not exists(name, page)} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_prose_is_narrow(page: Path) -> None:
    assert [line for line in prose(page.read_text(encoding="utf-8")) if len(line) > MAX_COLUMNS] == []


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= MAX_README_LINES


def test_a_missing_path_is_found() -> None:
    text = f"`rules/tiling.py` and `cpu/kernel/`, `python no/such.py X`, `a // b`\n{FENCE}\n`in/code.py`\n{FENCE}\n`NAME.py`"
    assert named_paths(text) == {"rules/tiling.py", "cpu/kernel/", "no/such.py"}
    page = ROOT / "numba_prefix" / "README.md"
    assert exists("rules/tiling.py", page) and exists("test_pages.py", page) and not exists("no/such.py", page)


def test_speed_table_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m bench --readme` finds its place in the page, and touches nothing else."""
    monkeypatch.syspath_prepend(ROOT)
    from bench.__main__ import BEGIN, END, PAGE, with_table

    page = PAGE.read_text(encoding="utf-8")
    table = page.partition(f"{BEGIN}\n")[2].partition(f"\n{END}")[0]
    assert table.startswith("| case |") and with_table(page, table) == page
    assert with_table(page, "new").replace(f"\nnew\n{END}", f"\n{table}\n{END}") == page
    with pytest.raises(ValueError, match="README"):
        with_table("no table here", table)
