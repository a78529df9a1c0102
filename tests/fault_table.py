"""The README's table of faults, made of what a run of the tests has logged: `python tests/fault_table.py FILE`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

LAYERS = ("omp", "workqueue", "tbb")
ANY_LAYER = "any"


def table(lines: Iterable[str]) -> str:
    """Markdown: a row per fault, in the order of their first line; a column per threading layer.

    Several cases of one fault are joined: their outcomes in order, without repetition.
    """
    cells: dict[str, dict[str, list[str]]] = {}
    for line in lines:
        entry = json.loads(line)
        outcomes = cells.setdefault(entry["fault"], {}).setdefault(entry["layer"], [])
        if entry["outcome"] not in outcomes:
            outcomes.append(entry["outcome"])
    rows = [("fault", *LAYERS), ("---",) * (1 + len(LAYERS))]
    for name, of_layer in cells.items():
        everywhere = of_layer.get(ANY_LAYER, [])
        rows.append((name, *(", ".join(of_layer.get(layer, everywhere)) or "not run" for layer in LAYERS)))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    print(table(Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()))
