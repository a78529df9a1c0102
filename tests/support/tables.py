"""Tables of a page that are made by a program, between two comments that name them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def markdown(rows: Iterable[Iterable[str]]) -> str:
    """A table; the first row is its head."""
    head, *body = ([*row] for row in rows)
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *body))


def parts(text: str, name: str) -> tuple[str, str, str]:
    """A page before a table, the table, and what comes after."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
    before, has_begin, rest = text.partition(begin)
    inside, has_end, after = rest.partition(end)
    if not has_begin or not has_end:
        raise ValueError(f"page: got no lines {begin.strip()} and {end.strip()}, expected them around the table")
    return before + begin, inside, end + after


def write(path: Path, name: str, table: str) -> None:
    before, _, after = parts(path.read_text(encoding="utf-8"), name)
    path.write_text(before + table + after, encoding="utf-8")
