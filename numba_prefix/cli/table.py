"""Output of the commands: aligned tables, one JSON object, lines about progress."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

SLOW_SECONDS = 1.0  # faster work is not announced


class UsageError(Exception):
    """An error of the user's input; the message is one line."""


def pairs(rows: Sequence[tuple[str, str]]) -> str:
    """Names and texts in two columns; a name of "" continues the row above, ("", "") is a blank
    line."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}".rstrip() for name, text in rows)


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join("  ".join(f"{cell:<{w}}" for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def emit(text: str) -> None:
    """Print on stdout; characters that its encoding lacks are replaced."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding))


def emit_json(report: dict[str, Any]) -> None:
    """Print one JSON object; NaN and infinities, which JSON does not have, become null."""
    emit(json.dumps(_plain(report), indent=2, allow_nan=False))


def note(text: str) -> None:
    """Print a line on stderr, for a person at the terminal."""
    print(one_line(text), file=sys.stderr, flush=True)


def one_line(text: Any) -> str:
    """Printable ASCII on one line: names and texts may come from an untrusted file."""
    line = " ".join(str(text).split())
    return "".join(c if c.isprintable() else "?" for c in line).encode("ascii", "backslashreplace").decode()


@contextlib.contextmanager
def slow(text: str) -> Iterator[None]:
    """Announce the work on stderr if it takes long."""
    timer = threading.Timer(SLOW_SECONDS, note, [f"{text} ..."])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def seconds(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"


def shape(dtype: str, sizes: Sequence[int]) -> str:
    return f"{dtype} [{', '.join(map(str, sizes))}]"


def lengths(values: Sequence[int]) -> str:
    """The lengths as text: each of a few, the range of many."""
    listed = ", ".join(map(str, values))
    if len(listed) <= 60:
        return listed
    return f"{len(values)} sequences, {min(values)} to {max(values)}, {sum(values)} tokens in all"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
