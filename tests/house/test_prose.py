"""Plain English: the rules of docstrings and comments that a test can check.

ruff keeps docstrings and comments on lines of their own within 100 columns (W505); this test keeps
comments behind code within them. `pytest tests/house/test_prose.py --runxfail -k cpu` shows the
offences in one folder, also where they are still allowed.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import ROOT

FOLDERS = ("numba_prefix", "bench", "tests/support")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))

COLUMNS = 100

# A docstring begins with a verb or a noun phrase: not with a question word, a preposition, a
# conjunction or a relative clause. "Whether" is the beginning of a predicate's docstring.
NOT_FIRST = re.compile(
    r"""
    what | which | who | whom | whose | whoever | how | when | where | why | that | those |
    these | nobody | nothing | somebody | also | as | at | after | against | although | apart |
    because | before | behind | beside | besides | below | beyond | but | by | despite | during
    | except | for | from | if | in | inside | instead | into | like | never | not | of | off |
    on | once | only | or | out | outside | over | since | so | than | then | through | till |
    to | toward | under | unless | until | up | upon | via | while | with | within | without |
    yet
    """,
    re.IGNORECASE | re.VERBOSE,
)

# Words and phrases that make a riddle of a sentence, and what to say instead.
WORDS = {
    r"who(so)?ever|whomever": "the caller, the thread, …",
    r"nobody|somebody|anybody": "no thread, another process, …",
    r"anew": "again",
    r"be had": "available",
    r"thereof|whereof|wherein|whereby|hitherto": "a plain word",
    r"we": "the subject's name",
}
# Words of the package that have one meaning each.
PACKAGE_WORDS = {
    # A cache consists of blocks; "paged" is only an adjective, and a page is the system's memory.
    r"(?<!guard )(?<!memory )(?<!operator's )(?<!operator's own )pages?": "block",
}


def docstrings(text: str) -> Iterator[tuple[int, str, list[str]]]:
    """Line number, text and source lines of every docstring."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            given = ast.get_docstring(node)
            if given:
                place = node.body[0]
                yield place.lineno, given, lines[place.lineno - 1 : place.end_lineno]


def comments(text: str) -> Iterator[tuple[int, str, str]]:
    """Line number, text and source line of every comment that is not for a tool."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not re.match(r"# *(noqa|fmt:|type:|ruff:)", token.string):
            yield token.start[0], token.string, token.line.rstrip("\n")


def offences(text: str, forbidden: dict[str, str]) -> list[tuple[int, str]]:
    """Line number and description of everything in a file's prose that the rules forbid."""
    found: list[tuple[int, str]] = []
    prose: list[tuple[int, str]] = []
    for number, given, lines in docstrings(text):
        first = given.split()[0]
        if NOT_FIRST.fullmatch(first.rstrip(".,:;")):
            found.append((number, f"the docstring begins with {first!r}: expected a verb or a noun phrase"))
        prose.append((number, "\n".join(line.strip() for line in lines)))
    for number, given, line in comments(text):
        if len(line) > COLUMNS:
            found.append((number, f"the comment ends in column {len(line)}: expected at most {COLUMNS}"))
        prose.append((number, given))
    for number, given in prose:
        for words, instead in forbidden.items():
            pattern = words.replace(" ", "[ \n]")  # a phrase may be wrapped
            for match in re.finditer(rf"(?<![\w.`'-])({pattern})(?![\w'`-])", given, re.IGNORECASE):
                line = number + given[: match.start()].count("\n")
                found.append((line, f"{match[0]!r}: say {instead}"))
    return sorted(found)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_plain_english(path: Path) -> None:
    is_package = path.is_relative_to(ROOT / "numba_prefix")
    found = offences(path.read_text(encoding="utf-8"), WORDS | PACKAGE_WORDS if is_package else WORDS)
    assert not found, "\n" + "\n".join(f"{path.relative_to(ROOT)}:{number}: {what}" for number, what in found)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ('"""What is done."""', 1),
        ('def f():\n    """Of many, one."""', 2),
        ('class C:\n    """As before."""', 2),
        ('"""A text.\n\nIt is made anew.\n"""', 3),
        ("x = 1\n# whoever reads this\n", 2),
        ("x = 1  # no memory to be had\n", 1),
        ('"""A helper, if one can be\nhad."""', 1),
        ("# The page is read.\n", 1),
        (f"x = 1  # {'a' * 100}\n", 1),
    ],
)
def test_offences_are_found(text: str, number: int) -> None:
    assert [line for line, _ in offences(text, WORDS | PACKAGE_WORDS)] == [number]


@pytest.mark.parametrize(
    "text",
    [
        '"""Whether a row sees a key."""',
        '"""A paged cache.\n\nIts guard pages are those of the operating system.\n"""',
        "# as before\nx = 'whoever'  # noqa: E501\n",
    ],
)
def test_plain_text_passes(text: str) -> None:
    assert offences(text, WORDS | PACKAGE_WORDS) == []
