"""Calls of the command line inside the test's process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from numba_prefix.__main__ import main


def succeed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The JSON report of a command that must succeed."""
    code = main([*arguments, "--json"])
    printed = capsys.readouterr()
    assert code == 0, printed
    report = json.loads(printed.out)
    assert isinstance(report, dict)
    assert report["command"] == arguments[0]
    return report


def fail(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The only line that a command with exit code 2 leaves on stderr."""
    code = main([*arguments])
    printed = capsys.readouterr()
    assert code == 2
    assert printed.out == ""
    lines = [line for line in printed.err.splitlines() if not line.endswith(" ...")]
    assert len(lines) == 1, printed.err
    assert "error: " in lines[0]
    return lines[0]


def shift_oracle(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    """Make the oracle's numbers wrong for the results judged."""
    honest = module.budget
    monkeypatch.setattr(module, "budget", lambda out, ref, naive: honest(out, ref + 1.0, naive + 1.0))
