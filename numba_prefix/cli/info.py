"""`info`: the machine's features and what a call would use. Compiles nothing."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

import numba_prefix
from numba_prefix.cli import table
from numba_prefix.cpu import isa
from numba_prefix.cpu.paths import PATHS
from numba_prefix.front.encoder import self_attention_prefix_encoder_get_workspace_size
from numba_prefix.front.operation import Context
from numba_prefix.inputs.errors import TargetUnavailableError
from numba_prefix.inputs.problem import FLOAT_DTYPES
from numba_prefix.runtime import num_threads, numba_options

# LLVM's names of features: for building kernels, for converting 16-bit floats, for multiplying
# them.
FEATURES = {
    "x86": (
        *("sse4.1", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512bf16", "avx512fp16"),
        *("amx-tile", "amx-bf16"),
    ),
    "arm64": ("neon", "fullfp16", "bf16", "dotprod", "i8mm", "sve", "sve2"),
}
PACKAGES = ("numba", "llvmlite", "numpy", "ml_dtypes", "torch")
VARIABLES = (
    *("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_NUM_THREADS", "NUMBA_CACHE_DIR", "NUMBA_THREADING_LAYER"),
    *(isa.VARIABLE, num_threads.VARIABLE),
)


def command(arguments: argparse.Namespace) -> int:
    report = {
        "command": "info",
        "cpu": cpu_report(),
        "threads": thread_report(),
        "cache": cache_report(),
        "cuda": _cuda(),
        "versions": versions(),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ}
        | numba_options.in_environment(),
    }
    if arguments.json:
        table.emit_json(report)
    else:
        table.emit(table.pairs(_rows(report)))
    return 0


def cpu_report() -> dict[str, Any]:
    from numba_prefix.cpu.simd import features

    names = FEATURES["x86"] if features.is_x86() else FEATURES["arm64"] if features.is_arm64() else ()
    has = features.features()
    return {
        "model": _model_name(),
        "llvm_name": features.cpu_name(),
        "architecture": platform.machine(),
        "features": [name for name in names if name in has],
        "missing": [name for name in names if name not in has],
        **_path_report(),
        "unusable": {path.name: isa.obstacle(path) for path in PATHS if isa.obstacle(path)},
    }


def _path_report() -> dict[str, Any]:
    """The path of each dtype, and the speeds that it was chosen by; until they are measured, at the
    first call of a dtype, the first path that it may take."""
    from numba_prefix.cpu import speed_test
    from numba_prefix.cpu.target import measured

    paths, speeds = {}, {}
    for dtype in FLOAT_DTYPES:
        candidates, seconds = isa.candidates(dtype), measured(dtype)
        paths[dtype] = (speed_test.fastest(seconds, candidates) if seconds else candidates[0]).name
        if len(candidates) > 1:
            speeds[dtype] = {name: speed_test.FLOPS / value / 1e9 for name, value in seconds.items()}
    return {"paths": paths, "gflop_per_second": speeds}


def _speed_text(dtype: str, speeds: dict[str, float]) -> str:
    if not speeds:
        return f"{dtype}: the fastest of its paths is measured at the first call"
    return f"{dtype}: measured, GFLOP/s on one thread: " + ", ".join(f"{name} {s:.0f}" for name, s in speeds.items())


def _model_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            name, _, text = line.partition(":")
            if name.strip() == "model name":
                return text.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def thread_report() -> dict[str, Any]:
    from numba.core import config

    online, allowed, available = os.cpu_count() or 1, num_threads.allowed_cpus(), num_threads.available_cpus()
    cap, source = num_threads.thread_cap()
    chosen = num_threads.get_num_threads()
    reasons = [f"{online} CPUs"]
    if allowed < online:
        reasons.append(f"{allowed} in this process's affinity")
    if available < allowed:
        reasons.append(f"a cgroup quota of {num_threads.quota():g}")
    if chosen < available and chosen != cap:
        reasons.append(f"NUMBA_NUM_THREADS={os.environ.get('NUMBA_NUM_THREADS')}")
    if cap is not None:
        reasons.append(f"at most {cap} in any call: {source}")
    return {
        "default": chosen,
        "cap": cap,
        "cap_source": source,
        "reason": ", ".join(reasons),
        "numba_threading_layer": str(config.THREADING_LAYER),
        "is_numba_threading_layer_used": False,
    }


def cache_report() -> dict[str, Any]:
    """The directory of compiled kernels, whether it can be written, and what keeps processes from
    using it."""
    from numba_prefix.runtime.disk_cache import cache_directory, is_trusted

    directory, obstacle = cache_directory(), _obstacle()
    report: dict[str, Any] = {"directory": None if directory is None else str(directory), "is_writable": False}
    report |= {"files": 0, "bytes": 0, "refused": 0, "obstacle": obstacle}
    if directory is None:
        return report | {"state": "no home directory"}
    nearest = directory
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    is_writable = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    try:
        found = [entry.stat() for entry in directory.glob("*.bin")]
    except OSError:
        found = []
    sizes = [status.st_size for status in found if is_trusted(status)]
    refused = len(found) - len(sizes)
    state = f"{'writable' if is_writable else 'NOT WRITABLE: every process compiles anew'}, {len(sizes)} kernels"
    state += f", {sum(sizes) / 1e6:.1f} MB" if sizes else ""
    state += f"; {refused} REFUSED: neither yours nor root's alone to write" if refused else ""
    state = f"NOT USED, every process compiles: {obstacle}" if obstacle else state
    return report | {
        "is_writable": is_writable,
        "files": len(sizes),
        "bytes": sum(sizes),
        "refused": refused,
        "state": state,
    }


def _obstacle() -> str:
    """The reason why compiled code cannot be told from that of another version; "" for none."""
    from numba_prefix.cpu.compile.cache import source_digest

    try:
        source_digest()
    except Exception as error:  # loaders of frozen programs fail in many ways
        return f"{type(error).__name__}: {error}"
    return ""


def _cuda() -> dict[str, Any]:
    """Whether the CUDA target can run; planning stops before any kernel is needed."""
    q, cache, table_row = (
        np.zeros((1, 1, 16), np.float32),
        np.zeros((1, 1, 1, 16), np.float32),
        np.zeros((1, 1), np.int32),
    )
    try:
        self_attention_prefix_encoder_get_workspace_size(
            q, cache, cache, table_row, None, [1], [1], None, 0, 1, 1, 1.0, np.empty_like(q), Context("cuda")
        )
    except TargetUnavailableError as error:
        return {"is_available": False, "reason": str(error).rpartition(": ")[2]}
    except ValueError:  # CUDA runs, but not on arrays in CPU memory
        pass
    return {"is_available": True, "reason": "used for CUDA arrays"}


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"numba_prefix": numba_prefix.__version__, "python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    cpu, team, cache, cuda = report["cpu"], report["threads"], report["cache"], report["cuda"]
    rows = [
        ("CPU", f"{cpu['model']} ({cpu['architecture']}; LLVM calls it {cpu['llvm_name']})"),
        ("features", " ".join(cpu["features"]) or "none that matter"),
        ("missing", " ".join(cpu["missing"]) or "none"),
        ("paths", ", ".join(f"{dtype} {path}" for dtype, path in cpu["paths"].items())),
        *(("", _speed_text(dtype, speeds)) for dtype, speeds in cpu["gflop_per_second"].items()),
        *((f"not {path}", why) for path, why in cpu["unusable"].items()),
        ("threads", f"{team['default']} ({team['reason']})"),
        ("Numba's layer", f"{team['numba_threading_layer']} (not used: kernels run on this package's own threads)"),
        ("cache", f"{cache['directory']} ({cache['state']})"),
        ("CUDA", f"{'yes' if cuda['is_available'] else 'no'} ({cuda['reason']})"),
        ("versions", ", ".join(f"{name} {version or '(none)'}" for name, version in report["versions"].items())),
    ]
    return rows + [(name, text) for name, text in report["environment"].items()]
