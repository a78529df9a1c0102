"""`warmup`: compile ahead, verify, report the cost."""

from __future__ import annotations

import argparse
from typing import Any

from numba_prefix.cli import table
from numba_prefix.cli.background import interruptible
from numba_prefix.cli.info import cache_report
from numba_prefix.cli.table import UsageError
from numba_prefix.inputs.errors import TargetUnavailableError
from numba_prefix.verify import warmup

SOURCES = {"compiled": "compiled", "cache": "loaded from the cache", "memory": "was loaded before"}


def command(arguments: argparse.Namespace) -> int:
    try:
        with table.slow(_announcement(arguments)):
            report = interruptible(
                lambda: warmup.measure(
                    arguments.target,
                    dtypes=arguments.dtypes,
                    head_sizes=arguments.head_sizes,
                    mask_types=arguments.mask_types,
                    num_threads=arguments.threads,
                    cc=arguments.cc,
                    watch=tell,
                )
            )
    except (TypeError, ValueError, TargetUnavailableError) as error:
        raise UsageError(error) from error
    report = {"command": "warmup", **report, "cache": cache_report()}
    if arguments.json:
        table.emit_json(report)
    else:
        table.emit(_text(report))
    return 0 if report["ok"] else 1


def tell(kernel: dict[str, Any], number: int, of: int) -> None:
    """Print a line about a kernel that took long; the others may be many."""
    if kernel["seconds"] >= table.SLOW_SECONDS:
        took = f"{SOURCES[kernel['source']]}, {table.seconds(kernel['seconds'])}"
        table.note(f"{number} of {of}: {kernel['name']} for {kernel['cc']} ({took})")


def _announcement(arguments: argparse.Namespace) -> str:
    if arguments.cc is not None:
        return "compiling what is not in the cache (some seconds each)"
    return "loading kernels, or compiling them (about 15 s, once per machine and version)"


def _text(report: dict[str, Any]) -> str:
    wrong = sum(not check["ok"] for check in report["checks"])
    cache = report["cache"]
    rows = [
        ("target", f"{report['target']} ({report['reason']})"),
        ("cache", f"{cache['directory']} ({cache['state']})"),
        ("time", f"{table.seconds(report['seconds'])}, {len(report['checks'])} checks included"),
        ("verdict", _verdict(wrong, len(report["checks"]))),
    ]
    kernels = [
        (f"{k['name']} for {k['cc']}" if "cc" in k else k["name"], table.seconds(k["seconds"]), SOURCES[k["source"]])
        for k in report["kernels"]
    ]
    checks = [
        (c["dtype"], str(c["head_size"]), c["mask_type"], f"{c['max_error']:.3g}", f"{c['max_allowed']:.3g}", _ok(c))
        for c in report["checks"]
    ]
    parts = [table.pairs(rows)]
    if kernels:
        parts.append(table.columns(("kernel", "time", "source"), kernels))
    if checks:
        parts.append(table.columns(("dtype", "head size", "mask type", "max error", "allowed", "verdict"), checks))
    return "\n\n".join(parts)


def _verdict(wrong: int, checks: int) -> str:
    if not checks:
        return "compiled; nothing was run"
    return f"{wrong} checks OVER THE ERROR BUDGET" if wrong else "every check within the error budget"


def _ok(check: dict[str, Any]) -> str:
    return "ok" if check["ok"] else "WRONG"
