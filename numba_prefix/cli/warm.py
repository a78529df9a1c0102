"""`warmup`: compile ahead, verify, say what it took."""

from __future__ import annotations

import argparse
from typing import Any

from numba_prefix import warm
from numba_prefix.cli import table
from numba_prefix.cli.background import interruptible
from numba_prefix.cli.info import cache_report
from numba_prefix.cli.table import UsageError
from numba_prefix.errors import TargetUnavailableError

SOURCES = {"compiled": "compiled", "cache": "loaded from the cache", "memory": "was loaded before"}


def command(arguments: argparse.Namespace) -> int:
    try:
        with table.slow("loading kernels, or compiling them (about 20 s, once per machine and version)"):
            report = interruptible(
                lambda: warm.measure(
                    arguments.target,
                    dtypes=arguments.dtypes,
                    head_sizes=arguments.head_sizes,
                    mask_types=arguments.mask_types,
                    num_threads=arguments.threads,
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


def _text(report: dict[str, Any]) -> str:
    wrong = sum(not check["ok"] for check in report["checks"])
    cache = report["cache"]
    rows = [
        ("target", f"{report['target']} ({report['reason']})"),
        ("cache", f"{cache['directory']} ({cache['state']})"),
        ("time", f"{table.seconds(report['seconds'])}, {len(report['checks'])} checks included"),
        ("verdict", f"{wrong} checks OVER THE ERROR BUDGET" if wrong else "every check within the error budget"),
    ]
    kernels = [(k["name"], table.seconds(k["seconds"]), SOURCES[k["source"]]) for k in report["kernels"]]
    checks = [
        (c["dtype"], str(c["head_size"]), c["mask_type"], f"{c['max_error']:.3g}", f"{c['max_allowed']:.3g}", _ok(c))
        for c in report["checks"]
    ]
    parts = [table.pairs(rows)]
    if kernels:
        parts.append(table.columns(("kernel", "time", "source"), kernels))
    parts.append(table.columns(("dtype", "head size", "mask type", "max error", "allowed", "verdict"), checks))
    return "\n\n".join(parts)


def _ok(check: dict[str, Any]) -> str:
    return "ok" if check["ok"] else "WRONG"
