"""`python -m bench`: this package against other CPU implementations on the same data.

All run in one process: gate (each contender against the float64 oracle on a cut-down case; no
figures if our result fails) -> cold start -> cases. Contenders take turns round by round, with a
pause before each so that spinning threads of one don't slow the next. The quoted figure is the
median over rounds of the ratio of times. JSON is the record; the table of bench/README.md is made
from it (--readme).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import numba_prefix as nbp
from bench import ceiling, contenders
from bench.cases import CASES, EXTRA_CASES, Case, make_data
from numba_prefix.cpu import isa
from numba_prefix.cpu.paths import PATHS
from numba_prefix.cpu.target import ready_path
from numba_prefix.reference.oracle import budget, naive

PAGE = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- speed -->", "<!-- /speed -->"  # lines of the page around the table
COLD = """
import time; start = time.perf_counter()
import numpy as np, numba_prefix as nbp
imported = time.perf_counter()
x = np.ones((5, 2, 16), np.float16); cache = np.ones((3, 16, 2, 16), np.float16)
nbp.prefix_encoder(x, cache, cache, np.array([[1, 2]], np.int32), [5], [20])
print(imported - start, time.perf_counter() - start)
"""


def header(num_threads: int) -> dict[str, Any]:
    import torch

    from numba_prefix.cli.info import cpu_report, versions

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    info = {**cpu_report(), **versions(), "commit": commit.strip(), "threads": num_threads, "torch": torch.__version__}
    return info


def cold_start() -> dict[str, float]:
    """Seconds of a first process on an empty cache (compiles) and of a second one (loads)."""
    times = {}
    with tempfile.TemporaryDirectory() as cache:
        for name in ("first process", "second process"):
            env = {**os.environ, "NUMBA_CACHE_DIR": cache}
            done = subprocess.run([sys.executable, "-c", COLD], env=env, capture_output=True, text=True, check=True)
            times["import"], times[name] = map(float, done.stdout.split())
    return times


def line_up(case: Case, dtype: str, num_threads: int, has_vllm: bool) -> tuple[Any, dict[str, contenders.Run]]:
    """The contenders of a case. Those named "alone" compute no attention: they show the limits of
    the micro-kernel and of the memory."""
    import torch

    data = make_data(case, getattr(torch, dtype))
    runs = {"ours": contenders.ours(data, num_threads=num_threads)}
    runs["ours, 1 thread"] = contenders.ours(data, num_threads=1)
    taken = ready_path(dtype)
    for path in PATHS:
        if path is not taken and dtype in path.dtypes and not isa.obstacle(path):
            runs[f"ours, {path.name}"] = contenders.ours(data, path=path.name, num_threads=num_threads)
    runs["sdpa"] = contenders.sdpa(data)
    if has_vllm:
        theirs = "amx" if dtype == "bfloat16" and torch.cpu._is_amx_tile_supported() else "vec"
        runs[f"vllm {theirs}"] = contenders.vllm(data, theirs)
        if dtype != "float32" and contenders.has_sglang():
            runs["sglang"] = contenders.sglang(data)
    if case.name == "tiny":
        runs["ours, one-shot"] = contenders.one_shot(data, num_threads)
    if dtype == "bfloat16":
        slopes = nbp.alibi_slopes(case.head_num)
        runs["ours, alibi"] = contenders.ours(data, "alibi", slopes=slopes, num_threads=num_threads)
        given = {"mask": torch.from_numpy(nbp.alibi_mask("alibi", "float32")).to(torch.bfloat16), "slopes": -slopes}
        runs["ours, template"] = contenders.ours(data, "alibi", **given, num_threads=num_threads)
    if case.is_decode:
        runs["reading alone"] = ceiling.read(case.kv_bytes(data.key.element_size()), num_threads)
    else:
        runs["products alone"] = ceiling.products(case.flops, taken, dtype, case.head_size, num_threads)
    return data, runs


def gate(dtype: str, num_threads: int, has_vllm: bool) -> dict[str, str]:
    """Each contender's error on a small ragged case, and whether it is within the budget."""
    case = Case("gate", (5, 70, 1), (205, 70, 333), 8, 4, 128, 32)
    data, runs = line_up(case, dtype, num_threads, has_vllm)
    arguments = (data.query, data.key, data.value, data.block_tables, case.q_len, case.kv_len)
    scale = case.head_size**-0.5
    exact, plain = (f(*arguments, qk_scale=scale) for f in (nbp.reference, naive))
    verdicts = {}
    for name, run in runs.items():
        if not name.endswith(("alibi", "template", "alone")):
            out = contenders.joined(run())
            verdict = budget(out, exact, plain)
            verdicts[name] = f"{'ok' if verdict.ok else 'OVER BUDGET'} {verdict.max_error:.1e}"
    if not verdicts["ours"].startswith("ok"):
        raise SystemExit(f"gate: our {dtype} result is over budget ({verdicts['ours']}): no figures")
    return verdicts


def measure(runs: dict[str, contenders.Run], rounds: int, pause: float) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            time.sleep(pause)
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return times


def row_of(case: Case, dtype: str, times: dict[str, list[float]]) -> dict[str, Any]:
    """GFLOP/s of every contender, and our speed relative to each: the median over rounds of the
    ratio."""
    speeds = {name: case.flops / statistics.median(seconds) / 1e9 for name, seconds in times.items()}
    ratios = {
        name: float(np.median(np.array(seconds) / np.array(times["ours"])))
        for name, seconds in times.items()
        if name != "ours"
    }
    item = 4 if dtype == "float32" else 2
    read = case.kv_bytes(item) / statistics.median(times["ours"]) / 1e9
    return {"dtype": dtype, "case": case.name, "gflops": speeds, "ratio": ratios, "kv_read_gb_s": read}


def show(row: dict[str, Any]) -> str:
    speeds = "  ".join(f"{name} {speed:.1f}" for name, speed in row["gflops"].items())
    ratios = "  ".join(f"{ratio:.2f}x {name}" for name, ratio in row["ratio"].items())
    return f"{row['dtype']:9s} {row['case']:11s} GFLOP/s: {speeds} | ours is {ratios}"


def markdown(record: dict[str, Any]) -> str:
    """The table of bench/README.md: speed relative to each peer; below 1 the peer is faster."""
    peers = [name for name in ("sdpa", "vllm") if any(p.startswith(name) for r in record["rows"] for p in r["ratio"])]
    names = {"sdpa": "PyTorch SDPA", "vllm": "vLLM"}
    lines = ["| case | dtype | GFLOP/s | " + " | ".join(f"x {names[p]}" for p in peers) + " | 1 → 2 threads |"]
    lines.append("|---" * (4 + len(peers)) + "|")
    for row in record["rows"]:
        ratios = [next((f"{v:.2f}" for n, v in row["ratio"].items() if n.startswith(p)), "") for p in peers]
        cells = [row["case"], row["dtype"], f"{row['gflops']['ours']:.0f}", *ratios]
        lines.append(f"| {' | '.join(cells)} | {row['ratio']['ours, 1 thread']:.2f} |")
    return "\n".join(lines)


def with_table(page: str, table: str) -> str:
    """A page with its table replaced. Raises ValueError where the lines around it are missing."""
    before, begin, rest = page.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(f"{END}\n")
    if not begin or not end:
        raise ValueError(f"{PAGE.name}: got no lines {BEGIN} and {END}, expected them around the table")
    return f"{before}{begin}{table}\n{end}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16", "float32"])
    parser.add_argument("--cases", nargs="+", default=[case.name for case in (*CASES, *EXTRA_CASES)])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--pause", type=float, default=0.03, help="seconds before each timed call")
    parser.add_argument("--json", type=Path, help="where to write the record")
    parser.add_argument("--readme", action="store_true", help=f"write the table into {PAGE.name} beside this")
    options = parser.parse_args()

    import torch

    torch.set_num_threads(options.threads)
    has_vllm = contenders.load_vllm()
    if not has_vllm:
        print("vLLM is skipped: set NUMBA_PREFIX_BENCH_VLLM to its wheel's _C library")
    elif not contenders.has_sglang():
        print("SGLang is skipped: vLLM's library for this CPU does not have its kernel")
    record: dict[str, Any] = {"header": header(options.threads), "cold start, s": cold_start(), "gate": {}, "rows": []}
    print(json.dumps({k: record[k] for k in ("header", "cold start, s")}, indent=1, default=str))
    for dtype in options.dtypes:
        record["gate"][dtype] = gate(dtype, options.threads, has_vllm)
        print(dtype, record["gate"][dtype])
        for case in (*CASES, *EXTRA_CASES):
            if case.name in options.cases:
                _, runs = line_up(case, dtype, options.threads, has_vllm)
                record["rows"].append(row_of(case, dtype, measure(runs, options.rounds, options.pause)))
                print(show(record["rows"][-1]), flush=True)
        peers = {name for row in record["rows"] if row["dtype"] == dtype for name in row["ratio"]}
        for peer in sorted(peers):
            ratios = [r["ratio"][peer] for r in record["rows"] if r["dtype"] == dtype and peer in r["ratio"]]
            print(f"{dtype} geometric mean over {len(ratios)} cases: {statistics.geometric_mean(ratios):.2f}x {peer}")
    if options.json:
        options.json.write_text(json.dumps(record, indent=1, default=str))
    if options.readme:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), markdown(record)), encoding="utf-8")


if __name__ == "__main__":
    main()
