"""The README's table of faults, made of what a run of the tests has logged: `python tests/fault_table.py FILE`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

LAYERS = {"omp": "omp", "workqueue": "workqueue", "tbb": "tbb", "any": "no layer chosen"}
NOT_RUN = "–"


def table(lines: Iterable[str]) -> str:
    """Markdown: a row per fault, in the order of their first line; a column per threading layer.

    A cell says what was run and nothing else: a fault tried without choosing a layer fills the last column only. Several
    cases of one fault are joined: their outcomes in order, without repetition.
    """
    cells: dict[str, dict[str, list[str]]] = {}
    for line in lines:
        entry = json.loads(line)
        outcomes = cells.setdefault(entry["fault"], {}).setdefault(entry["layer"], [])
        if entry["outcome"] not in outcomes:
            outcomes.append(entry["outcome"])
    rows = [("fault", *LAYERS.values()), ("---",) * (1 + len(LAYERS))]
    rows += [(name, *(", ".join(found.get(layer, [NOT_RUN])) for layer in LAYERS)) for name, found in cells.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    print(table(Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()))
