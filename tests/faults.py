"""What became of each fault that a service can meet: one JSON line per case in the file that $NUMBA_PREFIX_FAULT_LOG names.

`python tests/fault_table.py FILE` makes the README's table of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator

import pytest

VARIABLE = "NUMBA_PREFIX_FAULT_LOG"
ANY_LAYER = "any"
RIGHT = "right result"


@contextlib.contextmanager
def fault(name: str, layer: str = ANY_LAYER, outcome: str = RIGHT) -> Iterator[None]:
    """The body is a test of fault `name` under a threading layer of Numba's; `outcome` is what happened if it passes."""
    try:
        yield
    except pytest.skip.Exception:
        _write(name, layer, "not installed")
        raise
    except BaseException as error:
        _write(name, layer, _failure(str(error)))
        raise
    _write(name, layer, outcome)


def _failure(text: str) -> str:
    if "no end after" in text:
        return "hung"
    died = re.search(r"exit status -(\d+)", text)
    return f"aborted (signal {died[1]})" if died else "FAILED"


def _write(name: str, layer: str, outcome: str) -> None:
    path = os.environ.get(VARIABLE)
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"fault": name, "layer": layer, "outcome": outcome}) + "\n")
