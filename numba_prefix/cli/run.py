"""`run`: one problem from a file, computed, timed and judged."""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from numba_prefix.cli import table
from numba_prefix.cli.background import interruptible
from numba_prefix.cli.load import Loaded, check_writable, load, save
from numba_prefix.cli.table import UsageError
from numba_prefix.front.operation import Context, Op
from numba_prefix.inputs.arrays import describe
from numba_prefix.inputs.errors import TargetUnavailableError
from numba_prefix.inputs.mask_types import MaskType, alibi_slopes
from numba_prefix.reference.oracle import Budget
from numba_prefix.verify.compare import Fault, compare
from numba_prefix.verify.testing import Inputs, flops, on_host, with_heads
from numba_prefix.verify.warmup import first_run

MIN_RUNS, MAX_RUNS = 3, 50
ENOUGH_SECONDS, MOST_SECONDS = 0.5, 10.0


def command(arguments: argparse.Namespace) -> int:
    if arguments.out is not None:
        check_writable(arguments.out, arguments.file, arguments.force)
    loaded = load(arguments.file)
    if arguments.compare is not None:
        return _compare(loaded, arguments)
    try:
        inputs, remarks = _overridden(loaded.inputs, arguments.mask_type, arguments.qk_scale)
        began = time.perf_counter()
        with table.slow("loading kernels, or compiling them (about 15 s, once per machine and version)"):
            op, out, kernels = interruptible(lambda: first_run(inputs, Context(arguments.target, arguments.threads)))
        first_seconds = time.perf_counter() - began
    except TargetUnavailableError as error:
        raise UsageError(error) from error
    except (TypeError, ValueError) as error:
        raise UsageError(f"{loaded.name}: {error}") from error
    times = time_runs(op)
    with table.slow("computing the float64 oracle"):
        errors = inputs.judge(out, op.lse)
    if arguments.out is not None:
        save(arguments.out, on_host(out), on_host(op.lse), arguments.force)
    report = _report(loaded, inputs, op, kernels, first_seconds, times, errors)
    report |= {"remarks": remarks, "written": arguments.out}
    if arguments.json:
        table.emit_json(report)
    else:
        table.emit(table.pairs(_rows(report)))
    return 0 if report["ok"] else 1


def _compare(loaded: Loaded, arguments: argparse.Namespace) -> int:
    """Judge the problem on several targets and paths, and say where the first wrong element is."""
    if arguments.out is not None:
        raise UsageError("--compare: got --out too, expected one of them")
    try:
        inputs, remarks = _overridden(loaded.inputs, arguments.mask_type, arguments.qk_scale)
        with table.slow("computing on each of them, and the float64 oracle"):
            judged = interruptible(lambda: compare(with_heads(inputs), arguments.compare, arguments.threads))
    except TargetUnavailableError as error:
        raise UsageError(error) from error
    except (TypeError, ValueError) as error:
        raise UsageError(f"{loaded.name}: {error}") from error
    is_ok = all(one.error.ok and one.fault is None for one in judged)
    report = {"command": "run", "input": loaded.name, "remarks": remarks, "compared": list(map(asdict, judged))}
    if arguments.json:
        table.emit_json(report | {"ok": is_ok})
    else:
        rows = [("input", table.one_line(loaded.name)), *(("", remark) for remark in remarks), ("", "")]
        for one in judged:
            rows += [(one.name, one.reason), ("", f"out: {error_text(asdict(one.error))}")]
            rows += [("", text) for text in fault_texts(one.fault)]
        table.emit(table.pairs(rows))
    return 0 if is_ok else 1


def fault_texts(fault: Fault | None) -> list[str]:
    if fault is None:
        return ["every element is right"]
    place = f"sequence {fault.sequence}, row {fault.row}, head {fault.head}, element {fault.dim}"
    texts = [f"FIRST WRONG: {place}: got {fault.got:.6g}, expected {fault.expected:.6g}"]
    if not fault.is_alone:
        return [*texts, "the sequence alone is right: look at what batch mates share (work list, scratch, tables)"]
    if fault.keys is None:
        return [*texts, "each key tile alone is right: look at what joins them (running softmax, splits)"]
    return [*texts, f"first key tile that is wrong alone: keys {fault.keys[0]} to {fault.keys[1] - 1}"]


def time_runs(op: Op) -> list[float]:
    """Seconds of some further runs."""
    workspace = None if op.target == "cuda" else np.empty(op.workspace_size, np.uint8)
    times: list[float] = []
    while len(times) < MIN_RUNS or (sum(times) < ENOUGH_SECONDS and len(times) < MAX_RUNS):
        began = time.perf_counter()
        op.run(workspace)
        op.check()
        times.append(time.perf_counter() - began)
        if sum(times) > MOST_SECONDS:
            break
    return times


def _overridden(inputs: Inputs, mask_type: Any, qk_scale: float | None) -> tuple[Inputs, list[str]]:
    """The file's problem with what the command line says instead, and remarks about what follows
    from that."""
    remarks: list[str] = []
    if qk_scale is not None:
        inputs = replace(inputs, qk_scale=qk_scale)
    if mask_type is None:
        return inputs, remarks
    kind = MaskType.parse(mask_type)
    if not kind.is_alibi:
        unused = [name for name in ("mask", "slopes") if getattr(inputs, name) is not None]
        remarks += [f"the file's {name} does not enter: mask type {kind.name}" for name in unused]
        return replace(inputs, mask_type=kind, mask=None, slopes=None), remarks
    shape = describe(inputs.query, "query").shape
    heads = inputs.head_num if len(shape) == 2 else shape[1] if len(shape) == 3 else None
    if inputs.mask is None and inputs.slopes is None and heads is not None and 0 < heads <= shape[1]:
        remarks.append("slopes: the paper's, as the file has none")
        inputs = replace(inputs, slopes=alibi_slopes(heads))
    return replace(inputs, mask_type=kind), remarks


def _report(
    loaded: Loaded,
    inputs: Inputs,
    op: Op,
    kernels: list[dict[str, Any]],
    first_seconds: float,
    times: list[float],
    errors: tuple[Budget, Budget],
) -> dict[str, Any]:
    median = statistics.median(times)
    work = flops(op.problem, inputs.seq_len, inputs.kv_seq_len)
    arrays = {name: getattr(inputs, name) for name in ("query", "key", "value", "block_tables", "mask", "slopes")}
    described = {name: describe(array, name) for name, array in arrays.items() if array is not None}
    problem = asdict(op.problem) | {"mask_type": op.problem.mask_type.name}
    return {
        "command": "run",
        "input": loaded.name,
        "texts": loaded.texts,
        "arrays": {name: {"dtype": t.dtype, "shape": t.shape} for name, t in described.items()},
        "problem": problem,
        "seq_len": [int(n) for n in inputs.seq_len],
        "kv_seq_len": [int(n) for n in inputs.kv_seq_len],
        "target": op.target,
        "reason": op.reason,
        "workspace_bytes": op.workspace_size,
        "first_call_seconds": first_seconds,
        "kernels": kernels,
        "runs": len(times),
        "median_seconds": median,
        "flops": work,
        "gflop_per_second": work / median / 1e9,
        "out_error": asdict(errors[0]),
        "lse_error": asdict(errors[1]),
        "ok": errors[0].ok and errors[1].ok,
    }


def _rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    problem = report["problem"]
    rows = [("input", table.one_line(report["input"]))]
    rows += [(table.one_line(name), table.one_line(text)) for name, text in report["texts"].items()]
    rows += [(name, table.shape(a["dtype"], a["shape"])) for name, a in report["arrays"].items()]
    rows += [
        ("seq_len", table.lengths(report["seq_len"])),
        ("kv_seq_len", table.lengths(report["kv_seq_len"])),
        ("heads", f"{problem['head_num']} of query, {problem['kv_head_num']} of key and value"),
        ("mask type", problem["mask_type"]),
        ("qk_scale", f"{problem['qk_scale']:.6g}"),
        *(("", remark) for remark in report["remarks"]),
        ("", ""),
        ("target", f"{report['target']} ({report['reason']})"),
        ("workspace", f"{report['workspace_bytes']:,} bytes"),
        ("first call", f"{table.seconds(report['first_call_seconds'])}{kernel_summary(report['kernels'])}"),
        ("later calls", f"{table.seconds(report['median_seconds'])} (median of {report['runs']})"),
        ("speed", f"{report['gflop_per_second']:.4g} GFLOP/s (4 * head_size * heads * visible pairs of query and key)"),
        ("", ""),
        ("error of out", error_text(report["out_error"])),
        ("error of lse", error_text(report["lse_error"])),
        ("verdict", "within the error budget" if report["ok"] else "OVER THE ERROR BUDGET"),
    ]
    if report["written"] is not None:
        rows.append(("written", table.one_line(report["written"])))
    return rows


def error_text(error: dict[str, Any]) -> str:
    """Against the float64 oracle."""
    return (
        f"max {error['max_error']:.3g} of {error['max_allowed']:.3g} allowed, "
        f"mean {error['mean_error']:.3g} of {error['mean_allowed']:.3g}"
    )


def kernel_summary(kernels: list[dict[str, Any]]) -> str:
    """Where a first call's time went."""
    parts = []
    for source, text in (("compiled", "compiling"), ("cache", "loading compiled kernels")):
        spent = [kernel["seconds"] for kernel in kernels if kernel["source"] == source]
        if spent:
            parts.append(f"{table.seconds(sum(spent))} of it {text}")
    return f" ({', '.join(parts)})" if parts else ""
