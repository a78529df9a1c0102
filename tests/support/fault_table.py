"""The table of faults in tests/README.md, made from the log of a run of the tests.

NUMBA_PREFIX_FAULT_LOG=log python -m pytest --full
python tests/support/fault_table.py log --write tests/README.md
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

import tables
from faults import ANY_LAYER, FAULTS

NAME = "faults"
LAYERS = {"omp": "omp", "workqueue": "workqueue", "tbb": "tbb", ANY_LAYER: "none chosen"}
NOT_RUN = "–"


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
    rows = [
        (name, *(", ".join(cells.get((name, layer), [NOT_RUN])) for layer in LAYERS)) for name, _ in FAULTS.values()
    ]
    return tables.markdown([("fault", *LAYERS.values()), *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="replace the table between the markers of a file")
    given = parser.parse_args()
    made = table(given.log.read_text(encoding="utf-8").splitlines())
    if given.write is None:
        print(made, end="")
    else:
        tables.write(given.write, NAME, made)


if __name__ == "__main__":
    main()
