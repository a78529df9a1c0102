"""The README's table of faults, made from the log of a run of the tests.

NUMBA_PREFIX_FAULT_LOG=log python -m pytest
python tests/support/fault_table.py log --write README.md
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from faults import ANY_LAYER, FAULTS

LAYERS = {"omp": "omp", "workqueue": "workqueue", "tbb": "tbb", ANY_LAYER: "none chosen"}
NOT_RUN = "–"
BEGIN, END = "<!-- faults -->\n", "<!-- /faults -->\n"


def table(lines: Iterable[str]) -> str:
    """Markdown: a row per fault, a column per threading layer, and the outcome in each.

    Several cases of one cell are joined: their outcomes in order, without repetition.
    """
    cells: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        entry = json.loads(line)
        outcomes = cells.setdefault((entry["fault"], entry["layer"]), [])
        if entry["outcome"] not in outcomes:
            outcomes.append(entry["outcome"])
    rows = [("fault", *LAYERS.values()), ("---",) * (1 + len(LAYERS))]
    rows += [
        (name, *(", ".join(cells.get((name, layer), [NOT_RUN])) for layer in LAYERS)) for name, _ in FAULTS.values()
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def parts(text: str) -> tuple[str, str, str]:
    """The README's text before the table, the table, and the text after it."""
    before, begin, rest = text.partition(BEGIN)
    inside, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README: got no lines {BEGIN.strip()} and {END.strip()}, expected them around the table")
    return before + begin, inside, end + after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument(
        "--write", type=Path, metavar="README.md", help="replace the table between the markers of a file"
    )
    given = parser.parse_args()
    made = table(given.log.read_text(encoding="utf-8").splitlines())
    if given.write is None:
        print(made, end="")
        return
    before, _, after = parts(given.write.read_text(encoding="utf-8"))
    given.write.write_text(before + made + after, encoding="utf-8")


if __name__ == "__main__":
    main()
