"""`python -m bench.roofline`: the speed that each CUDA kernel could reach; needs no GPU.

Takes the registers and shared memory that `python -m numba_prefix inspect --target cuda --json`
prints (a file, or run here) and prints the table of roofline.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

THREADS = 128
REGISTERS = 65536  # per multiprocessor
REGISTER_STEP = 8  # a thread's registers are allocated in steps of this
RESERVED_SHARED = 1024  # bytes that each thread block takes besides its own, cc 8.0 and newer
FAMILY_BYTES = {"mma": 2, "fma": 4}  # per number in shared memory


@dataclass(frozen=True)
class Gpu:
    """One multiprocessor: bytes of shared memory, warps, and throughputs per clock.

    They are 16-bit tensor flops with float32 sums, float32 flops, bytes from shared memory and
    exponentials. Figures are of the CUDA programming guide and NVIDIA's architecture papers.
    """

    shared: int
    warps: int
    tensor: int
    fma: int
    shared_per_clock: int = 128
    exp: int = 16


GPUS = {
    "7.5": Gpu(64 << 10, 32, 1024, 128),
    "8.0": Gpu(164 << 10, 64, 2048, 128),
    "8.6": Gpu(100 << 10, 48, 512, 256),
    "9.0": Gpu(228 << 10, 64, 4096, 256),
    "10.0": Gpu(228 << 10, 64, 8192, 256),
    "12.0": Gpu(100 << 10, 48, 1024, 256),
}


def blocks_at_once(gpu: Gpu, cc: str, registers: int, shared_bytes: int) -> tuple[int, str]:
    """Thread blocks on one multiprocessor, and the resource that prevents more."""
    per_block = THREADS * -(-registers // REGISTER_STEP) * REGISTER_STEP
    reserved = RESERVED_SHARED if cc != "7.5" else 0
    limits = {
        "registers": REGISTERS // per_block,
        "shared memory": gpu.shared // (shared_bytes + reserved),
        "warps": gpu.warps // (THREADS // 32),
    }
    which = min(limits, key=lambda name: limits[name])
    return limits[which], which


def clocks(gpu: Gpu, family: str, head_dim: int) -> dict[str, float]:
    """Clocks of a multiprocessor for one score of a whole key tile: products, reads of shared
    memory, exponentials."""
    flops = 4.0 * head_dim
    # mma: each of 4 warps reads the whole key and value tile for its 16 rows. fma: a thread reads 4
    # numbers of each of its 4 rows and keys for 64 products (2 and 2 for 16 with large heads);
    # neighbours read the same ones.
    rows = 16 if family == "mma" else 8 if head_dim <= 128 else 4
    read = 2.0 * FAMILY_BYTES[family] * head_dim / rows
    rate = gpu.tensor if family == "mma" else gpu.fma
    return {"products": flops / rate, "shared memory": read / gpu.shared_per_clock, "exponentials": 1.0 / gpu.exp}


def row_of(kernel: dict[str, Any]) -> list[str]:
    gpu, family = GPUS[kernel["cc"]], kernel["name"].split("_")[0]
    blocks, why = blocks_at_once(gpu, kernel["cc"], kernel["registers"], kernel["shared_bytes"])
    times = clocks(gpu, family, kernel["head_size"])
    limiter = max(times, key=lambda name: times[name])
    share = times["products"] / times[limiter]
    occupancy = f"{blocks} ({100 * blocks * THREADS // 32 // gpu.warps} %, {why})"
    spills = f"{kernel['spill_bytes']} / {kernel['local_bytes']}"
    return [
        *(kernel["cc"], family, kernel["dtype"], str(kernel["head_size"]), str(kernel["registers"]), spills),
        *(f"{kernel['shared_bytes'] / 1024:.0f}", occupancy, limiter, f"{100 * share:.0f} %"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.roofline", description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path, nargs="?", help="what inspect printed; run now if left out")
    options = parser.parse_args()
    command = [sys.executable, "-m", "numba_prefix", "inspect", "--target", "cuda", "--mask-types", "causal", "--json"]
    text = options.json.read_text() if options.json else subprocess.check_output(command, text=True)
    names = [
        "cc",
        "family",
        "dtype",
        "head",
        "registers",
        "spills / local",
        "shared KB",
        "blocks at once",
        "limiter",
        "of peak",
    ]
    print(f"| {' | '.join(names)} |\n{'|---' * len(names)}|")
    for kernel in json.loads(text)["kernels"]:
        if not kernel["name"].startswith("merge"):
            print(f"| {' | '.join(row_of(kernel))} |")


if __name__ == "__main__":
    main()
