"""`bench`: one shape on random data. No figure is shown unless the result is right."""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict
from typing import Any

import numpy as np

from numba_prefix.cli import table
from numba_prefix.cli.background import interruptible
from numba_prefix.cli.info import cpu_report, thread_report, versions
from numba_prefix.cli.run import error_text, kernel_summary
from numba_prefix.cli.table import UsageError
from numba_prefix.front.operation import Context, Op
from numba_prefix.reference.oracle import budget, naive, reference
from numba_prefix.verify.testing import (
    Inputs,
    flops,
    has_nan,
    poison,
    random_inputs,
    sample_rows,
    stored_bits,
    take_rows,
)
from numba_prefix.verify.warmup import first_run

SHAPE = ("q_len", "kv_len", "batch", "heads", "kv_heads", "head_size", "block_size", "dtype")
# Limits of the rows that the oracle checks and of the elements of keys that it reads for them.
GATE_ROWS, GATE_ELEMENTS = 24, 2e8
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
ASSUMPTIONS = (
    "flops are 4 * head_size for each head and visible pair of query and key",
    "bytes are every key and value of each sequence, read once; after the first run they may come from a CPU cache",
)


def command(arguments: argparse.Namespace) -> int:
    try:
        inputs = _inputs(arguments)
        began = time.perf_counter()
        with table.slow("loading kernels, or compiling them (about 15 s, once per machine and version)"):
            op, out, kernels = interruptible(lambda: first_run(inputs, Context("cpu", arguments.threads)))
        first_seconds = time.perf_counter() - began
    except (TypeError, ValueError) as error:
        raise UsageError(error) from error
    with table.slow("checking rows against the float64 oracle"):
        gate = _gate(inputs, op, out)
    report: dict[str, Any] = {
        "command": "bench",
        "shape": {name: getattr(arguments, name) for name in SHAPE} | {"mask_type": op.problem.mask_type.name},
        "cpu": cpu_report(),
        "threads": arguments.threads or thread_report()["default"],
        "versions": versions(),
        "gate": gate,
    }
    if gate["ok"]:
        report |= {"first_call_seconds": first_seconds, "kernels": kernels}
        first = stored_bits(out).copy()
        times = _times(op, out, arguments.rounds)
        gate["ok"] = gate["is_repeatable"] = np.array_equal(stored_bits(out), first)
        report |= _figures(inputs, op, times) if gate["ok"] else {}
    if arguments.json:
        table.emit_json(report)
    else:
        table.emit(table.pairs(_rows(report)))
    return 0 if gate["ok"] else 1


def _inputs(arguments: argparse.Namespace) -> Inputs:
    if arguments.heads % arguments.kv_heads:
        raise ValueError(f"--kv-heads: got {arguments.kv_heads}, expected a divisor of --heads {arguments.heads}")
    if arguments.q_len > arguments.kv_len:
        raise ValueError(f"--kv-len: got {arguments.kv_len}, expected at least --q-len {arguments.q_len}")
    with table.slow("making random data"):
        return random_inputs(
            [arguments.q_len] * arguments.batch,
            [arguments.kv_len] * arguments.batch,
            head_num=arguments.heads,
            kv_head_num=arguments.kv_heads,
            head_size=arguments.head_size,
            block_size=arguments.block_size,
            dtype=arguments.dtype,
            mask_type=arguments.mask_type,
            seed=arguments.seed,
        )


def _gate(inputs: Inputs, op: Op, out: Any) -> dict[str, Any]:
    """A check of some rows of the first run against the oracle, and that every row was written."""
    problem = op.problem
    elements = max(inputs.kv_seq_len) * problem.kv_head_num * problem.head_size
    rows, cut = sample_rows(inputs, problem, max(2, min(GATE_ROWS, int(GATE_ELEMENTS / elements))))
    ref, ref_lse = reference(**cut.arguments(), return_lse=True)
    plain, plain_lse = naive(**cut.arguments(), return_lse=True)
    errors = budget(take_rows(out, rows), ref, plain), budget(op.lse[rows], ref_lse, plain_lse)
    is_complete = not has_nan(out) and not has_nan(op.lse)
    return {
        "rows": len(rows),
        "out_error": asdict(errors[0]),
        "lse_error": asdict(errors[1]),
        "is_complete": is_complete,
        "is_repeatable": True,
        "ok": is_complete and all(error.ok for error in errors),
    }


def _times(op: Op, out: Any, rounds: int) -> list[float]:
    """Seconds of each round. Output and workspace are touched before: no round touches new memory
    pages."""
    workspace = np.zeros(op.workspace_size, np.uint8)
    times = []
    for _ in range(rounds):
        poison(out)
        began = time.perf_counter()
        op.run(workspace)
        times.append(time.perf_counter() - began)
    return times


def _figures(inputs: Inputs, op: Op, times: list[float]) -> dict[str, Any]:
    problem = op.problem
    median = statistics.median(times)
    work = flops(problem, inputs.seq_len, inputs.kv_seq_len)
    read = 2.0 * ITEM_BYTES[problem.dtype] * sum(inputs.kv_seq_len) * problem.kv_head_num * problem.head_size
    return {
        "rounds": len(times),
        "seconds": times,
        "median_seconds": median,
        "best_seconds": min(times),
        "flops": work,
        "kv_bytes": read,
        "gflop_per_second": work / median / 1e9,
        "best_gflop_per_second": work / min(times) / 1e9,
        "kv_gbyte_per_second": read / median / 1e9,
        "workspace_bytes": op.workspace_size,
        "assumptions": ASSUMPTIONS,
    }


def _rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    s, cpu, gate = report["shape"], report["cpu"], report["gate"]
    rows = [
        ("shape", f"{s['batch']} x (q_len {s['q_len']}, kv_len {s['kv_len']}), {s['dtype']}, {s['mask_type']}"),
        ("", f"heads {s['heads']}, kv heads {s['kv_heads']}, head size {s['head_size']}, block size {s['block_size']}"),
        (
            "CPU",
            f"{cpu['model']} ({cpu['llvm_name']}), path {cpu['paths'][s['dtype']]}, at most {report['threads']} threads",
        ),
        ("versions", ", ".join(f"{name} {v}" for name, v in report["versions"].items() if v)),
        ("check", f"{gate['rows']} rows against the float64 oracle"),
        ("error of out", error_text(gate["out_error"])),
        ("error of lse", error_text(gate["lse_error"])),
    ]
    if not gate["ok"]:
        why = " (some elements are NaN or were never written)" if not gate["is_complete"] else ""
        why = why or (" (the last round gave other bits than the first)" if not gate["is_repeatable"] else "")
        return [*rows, ("verdict", f"WRONG RESULT, so no figures{why}")]
    return [
        *rows,
        ("", ""),
        ("first call", f"{table.seconds(report['first_call_seconds'])}{kernel_summary(report['kernels'])}"),
        ("median", f"{table.seconds(report['median_seconds'])} of {report['rounds']} rounds"),
        ("best", table.seconds(report["best_seconds"])),
        ("speed", f"{report['gflop_per_second']:.4g} GFLOP/s, at best {report['best_gflop_per_second']:.4g}"),
        ("read", f"{report['kv_gbyte_per_second']:.4g} GB/s of keys and values"),
        ("workspace", f"{report['workspace_bytes']:,} bytes"),
        ("assumptions", ASSUMPTIONS[0]),
        *(("", text) for text in ASSUMPTIONS[1:]),
    ]
