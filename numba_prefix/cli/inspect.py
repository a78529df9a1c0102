"""`inspect`: the registers, spills and shared memory that kernels take on a GPU, on any machine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from numba_prefix.cli import table
from numba_prefix.cli.background import interruptible
from numba_prefix.cli.table import UsageError
from numba_prefix.cli.warm import tell
from numba_prefix.cuda.compile.prebuild import GENERATIONS
from numba_prefix.cuda.kernel.spec import HEAD_DIMS
from numba_prefix.inputs.errors import TargetUnavailableError
from numba_prefix.inputs.mask_types import MaskType
from numba_prefix.verify.warmup import PLAIN_KINDS, choices, prebuilt

PACKAGES = ("numba", "numba-cuda", "nvidia-nvvm", "nvidia-cuda-nvrtc", "nvidia-nvjitlink")
COLUMNS = {
    **{"name": "kernel", "cc": "cc", "dtype": "dtype", "head_size": "head size", "registers": "registers"},
    **{"spill_bytes": "spills", "local_bytes": "local", "shared_bytes": "shared", "mma_count": "mma"},
}


def command(arguments: argparse.Namespace) -> int:
    if arguments.target == "cpu":
        raise UsageError(
            "--target: got 'cpu', expected 'cuda': on the CPU one kernel serves all calls, and `info` shows what it is "
            "compiled for"
        )
    try:
        names, sizes, kinds = choices(
            arguments.dtypes,
            arguments.head_sizes,
            arguments.mask_types,
            tuple(MaskType) if arguments.all else PLAIN_KINDS,
            HEAD_DIMS,
        )
        ccs: Any = GENERATIONS if arguments.cc is None else arguments.cc
        with table.slow("compiling what is not in the cache (some seconds a kernel)"):
            kernels = interruptible(lambda: prebuilt("cuda", ccs, names, sizes, kinds, tell))
    except (TypeError, ValueError, TargetUnavailableError) as error:
        raise UsageError(error) from error
    if arguments.json:
        report = {"command": "inspect", "target": "cuda", "kernels": kernels, "versions": _versions()}
        table.emit_json(report)
    else:
        table.emit(_text(kernels))
    return 0


def _text(kernels: Sequence[dict[str, Any]]) -> str:
    rows = [[str(kernel[name]) for name in COLUMNS] for kernel in kernels]
    return table.columns(list(COLUMNS.values()), rows) + "\n\nspills, local and shared in bytes; registers of a thread"


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found
