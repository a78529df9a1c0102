"""`python -m bench.gpu`: the CUDA target against PyTorch's flash SDPA, FlashInfer and flash-attn.

Everything runs on one GPU in one process: builds our kernels, gates every contender against the
float64 oracle on a cut-down case (no figures if our result fails), then times the cases. Contenders
take turns round by round, each call between two events, after the L2 cache is overwritten. The
quoted figure is the median over rounds of the ratio of times; the ceiling is a bfloat16 matrix
product measured in the same rounds. Peers that are not installed are skipped with a line. --device
cpu is a dry run of all this without a GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import numba_prefix as nbp
from bench.cases import CASES, EXTRA_CASES, Case, Data, make_data
from numba_prefix.reference.oracle import budget, naive

Run = Callable[[], Any]
GATE = Case("gate", (5, 70, 1), (205, 70, 333), 8, 4, 128, 32)
GPU_CASES = [
    Case("prefill-8k", (8192,) * 2, (8192,) * 2, 32, 8, 128, 16),
    Case("chunk-32k", (2048,) * 2, (32768,) * 2, 32, 8, 128, 16),
    Case("decode-64", (1,) * 64, (8192,) * 64, 32, 8, 128, 16),
]
MATMUL_SIZE = 8192
L2_BYTES = 256 << 20  # more than any GPU's cache


def to_device(data: Data, device: str) -> Data:
    moved = (tensor.to(device) for tensor in (data.query, data.key, data.value, data.block_tables))
    return Data(data.case, *moved)


def ours(data: Data, mask_type: str = "causal", slopes: Any = None) -> Run:
    """A plan that is reused, as a network does for its layers."""
    import torch

    case, out = data.case, torch.full_like(data.query, float("nan"))
    size, op = nbp.self_attention_prefix_encoder_get_workspace_size(
        data.query, data.key, data.value, data.block_tables, None, case.q_len, case.kv_len, slopes, mask_type,
        case.head_num, case.kv_head_num, 1 / math.sqrt(case.head_size), out,
    )  # fmt: skip
    workspace = torch.empty(size, dtype=torch.uint8, device=data.query.device)

    def run() -> Any:
        op.run(workspace)
        return out

    return run


def _dense(data: Data) -> list[tuple[Any, Any, Any]]:
    """Each sequence's query, key and value, [1, heads, tokens, head_size], gathered from the paged
    cache."""
    case, start, parts = data.case, 0, []
    for b, (q_len, kv_len) in enumerate(zip(case.q_len, case.kv_len, strict=True)):
        pages = data.block_tables[b, : -(-kv_len // case.block_size)].long()
        k, v = (x[pages].flatten(0, 1)[:kv_len].transpose(0, 1)[None].contiguous() for x in (data.key, data.value))
        parts.append((data.query[start : start + q_len].transpose(0, 1)[None], k, v))
        start += q_len
    return parts


def sdpa(data: Data) -> Run:
    """PyTorch's SDPA on keys gathered beforehand: one call per sequence, or one for all where they
    are equally long."""
    import torch
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention

    case, parts = data.case, _dense(data)
    if len({*zip(case.q_len, case.kv_len, strict=True)}) == 1:
        parts = [tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))]  # type: ignore[list-item]
    masks = [causal_lower_right(q.shape[2], k.shape[2]) if q.shape[2] > 1 else None for q, k, _ in parts]

    def run() -> Any:
        outs = [
            scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
            for (q, k, v), mask in zip(parts, masks, strict=True)
        ]
        return outs

    return run


def flashinfer(data: Data) -> Run:
    import torch
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    case, device = data.case, data.query.device
    counts = torch.tensor([-(-n // case.block_size) for n in case.kv_len])
    ends = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)]).int()
    ids = torch.cat([data.block_tables[b, :n] for b, n in enumerate(counts.tolist())]).int()
    last = torch.tensor([(n - 1) % case.block_size + 1 for n in case.kv_len]).int()
    starts = torch.tensor([0, *case.q_len]).cumsum(0).int()
    wrapper = BatchPrefillWithPagedKVCacheWrapper(torch.empty(256 << 20, dtype=torch.uint8, device=device), "NHD")
    wrapper.plan(
        starts.to(device), ends.to(device), ids.to(device), last.to(device), case.head_num, case.kv_head_num,
        case.head_size, case.block_size, causal=True, q_data_type=data.query.dtype,
    )  # fmt: skip
    return lambda: wrapper.run(data.query, (data.key, data.value))


def flash_attn(data: Data) -> Run:
    import torch
    from flash_attn import flash_attn_varlen_func

    case, device = data.case, data.query.device
    if case.block_size % 256:
        raise ImportError("its pages have a multiple of 256 tokens")
    starts, kv_starts = (
        torch.tensor([0, *lengths], device=device).cumsum(0).int() for lengths in (case.q_len, case.kv_len)
    )
    options = {"causal": True, "block_table": data.block_tables}
    sizes = max(case.q_len), max(case.kv_len)
    return lambda: flash_attn_varlen_func(data.query, data.key, data.value, starts, kv_starts, *sizes, **options)


PEERS = {"sdpa": sdpa, "flashinfer": flashinfer, "flash-attn": flash_attn}


def line_up(case: Case, dtype: str, device: str) -> tuple[Data, dict[str, Run]]:
    """Contenders that can run this case. Peers that can't are printed with the reason, once per
    case."""
    import torch

    data = to_device(make_data(case, getattr(torch, dtype)), device)
    slopes = nbp.alibi_slopes(case.head_num)
    runs = {"ours": ours(data), "ours, alibi": ours(data, "alibi", slopes)}
    for name, peer in PEERS.items():
        try:
            runs[name] = peer(data)
        except ImportError as error:
            print(f"{name} is skipped in {case.name}: {error}")
    return data, runs


def joined(out: Any) -> Any:
    """The result as [tokens, heads, head_size], on the host, float32."""
    import torch

    parts = [out] if isinstance(out, torch.Tensor) else list(out)
    rows = [part if part.ndim == 3 else part.transpose(1, 2).flatten(0, 1) for part in parts]
    return torch.cat(rows).float().cpu().numpy()


def gate(dtype: str, device: str) -> dict[str, str]:
    data, runs = line_up(GATE, dtype, device)
    host = to_device(data, "cpu")
    arguments = (host.query, host.key, host.value, host.block_tables, GATE.q_len, GATE.kv_len)
    exact, plain = (f(*arguments, qk_scale=GATE.head_size**-0.5) for f in (nbp.reference, naive))
    verdicts = {}
    for name, run in runs.items():
        if "alibi" not in name:
            verdict = budget(joined(run()), exact, plain)
            verdicts[name] = f"{'ok' if verdict.ok else 'OVER BUDGET'} {verdict.max_error:.1e}"
    if not verdicts["ours"].startswith("ok"):
        raise SystemExit(f"gate: our {dtype} result is over budget ({verdicts['ours']}): no figures")
    return verdicts


def matmul(device: str) -> Run:
    import torch

    size = MATMUL_SIZE if device != "cpu" else 256
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return lambda: a @ b


def timed(run: Run, device: str, trash: Any) -> float:
    """Seconds of one call on an idle GPU with a cold cache."""
    import torch

    if device == "cpu":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    trash.zero_()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def measure(runs: dict[str, Run], device: str, rounds: int) -> dict[str, list[float]]:
    import torch

    trash = torch.empty(L2_BYTES if device != "cpu" else 1, dtype=torch.uint8, device=device)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in (*runs.values(), *runs.values()):
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(timed(run, device, trash))
    return times


def row_of(case: Case, dtype: str, times: dict[str, list[float]], matmul_size: int) -> dict[str, Any]:
    """TFLOP/s of every contender, GB/s of keys and values read, and our speed relative to each."""
    median = {name: statistics.median(seconds) for name, seconds in times.items()}
    ceiling = 2.0 * matmul_size**3 / median.pop("matmul") / 1e12
    speeds = {name: case.flops / seconds / 1e12 for name, seconds in median.items()}
    ratios = {n: float(np.median(np.array(times[n]) / np.array(times["ours"]))) for n in median if n != "ours"}
    row = {"case": case.name, "dtype": dtype, "tflops": speeds, "ratio": ratios, "matmul_tflops": ceiling}
    return row | {"kv_read_gb_s": case.kv_bytes(2) / median["ours"] / 1e9}


def markdown(rows: list[dict[str, Any]]) -> str:
    """A table of our speed relative to each peer, below 1 where the peer is faster."""
    peers = [name for name in PEERS if any(name in row["ratio"] for row in rows)]
    lines = ["| case | dtype | TFLOP/s | of the matmul | K/V GB/s | " + " | ".join(f"x {p}" for p in peers) + " |"]
    lines.append("|---" * (5 + len(peers)) + "|")
    for row in rows:
        speed = row["tflops"]["ours"]
        cells = [row["case"], row["dtype"], f"{speed:.1f}", f"{100 * speed / row['matmul_tflops']:.0f} %"]
        cells += [f"{row['kv_read_gb_s']:.0f}", *(f"{row['ratio'][p]:.2f}" if p in row["ratio"] else "" for p in peers)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    everything = {case.name: case for case in (*CASES, *EXTRA_CASES, *GPU_CASES)}
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, …; cpu for a dry run")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16"])
    parser.add_argument("--cases", nargs="+", default=list(everything), choices=list(everything))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="where to write the record")
    options = parser.parse_args()

    import torch

    if options.device != "cpu" and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU (--device cpu: a dry run)")
    name = "CPU, dry run" if options.device == "cpu" else torch.cuda.get_device_name(options.device)
    record: dict[str, Any] = {"header": {"device": name, "torch": torch.__version__, "numba_prefix": nbp.__version__}}
    record |= {"build, s": {}, "gate": {}, "rows": []}
    size = MATMUL_SIZE if options.device != "cpu" else 256
    for dtype in options.dtypes:
        start = time.perf_counter()
        record["gate"][dtype] = gate(dtype, options.device)
        record["build, s"][dtype] = time.perf_counter() - start
        print(dtype, "built and gated in", f"{record['build, s'][dtype]:.1f} s:", record["gate"][dtype], flush=True)
        for case in (everything[name] for name in options.cases):
            _, runs = line_up(case, dtype, options.device)
            times = measure(runs | {"matmul": matmul(options.device)}, options.device, options.rounds)
            record["rows"].append(row_of(case, dtype, times, size))
            print(json.dumps(record["rows"][-1]), flush=True)
    print(markdown(record["rows"]))
    if options.json:
        options.json.write_text(json.dumps(record, indent=1, default=str))


if __name__ == "__main__":
    main()
