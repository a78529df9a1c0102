"""Compiling ahead of the first call, and checking on small problems that what was compiled computes
the right thing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from numba_prefix.front.operation import Context, Op
from numba_prefix.front.targets import cpu_target
from numba_prefix.inputs.mask_types import MaskType
from numba_prefix.inputs.problem import FLOAT_DTYPES, MAX_HEAD_SIZE
from numba_prefix.verify.testing import Inputs, random_inputs

HEAD_SIZES = (64, 128)
Watch = Callable[[dict[str, Any], int, int], None]
PLAIN_KINDS = (MaskType.CAUSAL_MASK, MaskType.NONE)
# Two rows of tiles, an empty sequence, and one long enough for its keys to be split.
Q_LEN = (5, 0, 33, 1)
KV_LEN = (21, 7, 150, 2100)


def warmup(
    target: str = "cpu",
    *,
    dtypes: Iterable[str] | str | None = None,
    head_sizes: Iterable[int] | int | None = None,
    mask_types: Iterable[Any] | Any = None,
    num_threads: int | None = None,
    cc: Any = None,
) -> dict[str, Any]:
    """Compile the kernels of `target`, or load them from the cache, and verify them on small
    problems.

    The CPU kernels serve every dtype, head size and mask kind; dtypes ("float16", "bfloat16",
    "float32"), head_sizes (1 to 256) and mask_types restrict only what is verified. None: all
    dtypes, 64 and 128, all kinds.

    cc, for target "cuda": compute capabilities, as "8.0,9.0" or (9, 0) or a list of those. Kernels
    for such GPUs are compiled into the cache, no GPU is needed and nothing is verified; mask_types
    None: causal and none.

    Returns {"target", "reason", "seconds" (all of it), "kernels": [{"name", "seconds", "source"}],
    "checks": [{"dtype", "head_size", "mask_type", "max_error", "max_allowed", "ok"}], "ok"}; a
    kernel's source is "compiled", "cache" (read from disk) or "memory" (this process had it); those
    for a cc also have that, "dtype", "head_size" and what they use of a GPU. Raises RuntimeError if
    a problem's error is over budget, TypeError and ValueError for an argument,
    TargetUnavailableError for a target that cannot run.
    """
    prebuild = measure(
        target, dtypes=dtypes, head_sizes=head_sizes, mask_types=mask_types, num_threads=num_threads, cc=cc
    )
    wrong = [check for check in prebuild["checks"] if not check["ok"]]
    if wrong:
        raise RuntimeError(f"target {prebuild['target']!r} ({prebuild['reason']}) computes a wrong result: {wrong[0]}")
    return prebuild


def measure(
    target: str,
    *,
    dtypes: Iterable[str] | str | None = None,
    head_sizes: Iterable[int] | int | None = None,
    mask_types: Iterable[Any] | Any = None,
    num_threads: int | None = None,
    cc: Any = None,
    watch: Watch = lambda *_: None,
) -> dict[str, Any]:
    """Does as warmup, but a wrong result is only reported ("ok" is false). watch: called with each
    kernel that is ready for a cc, its number and theirs."""
    names, sizes, kinds = choices(dtypes, head_sizes, mask_types, tuple(MaskType) if cc is None else PLAIN_KINDS)
    began = time.perf_counter()
    if cc is not None:
        kernels = prebuilt(target, cc, names, sizes, kinds, watch)
        reason = f"asked for; compute capability {', '.join(dict.fromkeys(kernel['cc'] for kernel in kernels))}"
        checks: list[dict[str, Any]] = []
    else:
        cases = [(name, size, kind) for name in names for size in sizes for kind in kinds]
        context = Context(target, num_threads)
        op, _, kernels = first_run(_inputs(*cases[0]), context)
        for name in names[1:]:  # which may take another path, and its kernel
            known = {kernel["name"] for kernel in kernels}
            _, _, more = first_run(_inputs(name, *cases[0][1:]), context)
            kernels += [kernel for kernel in more if kernel["name"] not in known]
        checks = list(_checks(cases, context))
        target, reason = op.target, op.reason
    return {
        "target": target,
        "reason": reason,
        "seconds": time.perf_counter() - began,
        "kernels": kernels,
        "checks": checks,
        "ok": all(check["ok"] for check in checks),
    }


def choices(
    dtypes: Iterable[str] | str | None,
    head_sizes: Iterable[int] | int | None,
    mask_types: Iterable[Any] | Any,
    default_kinds: tuple[MaskType, ...],
    default_sizes: tuple[int, ...] = HEAD_SIZES,
) -> tuple[list[str], list[int], list[MaskType]]:
    """Checked choices of what is to be warmed up."""
    names = _listed("dtypes", dtypes, FLOAT_DTYPES)
    sizes = _listed("head_sizes", head_sizes, default_sizes)
    kinds = [MaskType.parse(kind) for kind in _listed("mask_types", mask_types, default_kinds)]
    for name in names:
        if name not in FLOAT_DTYPES:
            raise ValueError(f"dtypes: got {name!r}, expected {', '.join(FLOAT_DTYPES)}")
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_HEAD_SIZE:
            raise ValueError(f"head_sizes: got {size!r}, expected 1 to {MAX_HEAD_SIZE}")
    return names, sizes, kinds


def prebuilt(
    target: str, cc: Any, dtypes: list[str], head_sizes: list[int], kinds: list[MaskType], watch: Watch
) -> list[dict[str, Any]]:
    """The CUDA kernels of these choices for GPUs of these compute capabilities: facts of each, now
    that it is in the cache."""
    if target != "cuda":
        raise ValueError(f"cc: got {cc!r}, expected None for target {target!r}")
    from numba_prefix.cuda.compile import prebuild

    wanted = prebuild.wanted(prebuild.parsed_ccs(cc), dtypes, head_sizes, kinds)
    kernels: list[dict[str, Any]] = []
    for kernel in prebuild.build(wanted):
        kernels.append(kernel)
        watch(kernel, len(kernels), len(wanted))
    return kernels


def first_run(inputs: Inputs, context: Context) -> tuple[Op, Any, list[dict[str, Any]]]:
    """Plan and run once. Returns the operation, its output, and how long each kernel took to
    compile or load."""
    if context.target not in ("auto", "cpu"):
        op, out = inputs.plan(context)
        op.run()
        op.check()
        return op, out, []
    cpu_target()
    from numba_prefix.cpu.compile_times import kernel_times

    with kernel_times() as times:
        op, out = inputs.plan(context)
        op.run()
    return op, out, [{"name": t.name, "seconds": t.seconds, "source": t.source} for t in times]


def _checks(cases: list[tuple[str, Any, MaskType]], context: Context) -> Iterator[dict[str, Any]]:
    for dtype, head_size, kind in cases:
        inputs = _inputs(dtype, head_size, kind)
        op, out = inputs.plan(context)
        op.run()
        errors = inputs.judge(out, op.lse)
        yield {
            "dtype": dtype,
            "head_size": head_size,
            "mask_type": kind.name,
            "max_error": errors[0].max_error,
            "max_allowed": errors[0].max_allowed,
            "ok": all(error.ok for error in errors),
        }


def _inputs(dtype: str, head_size: Any, kind: MaskType) -> Inputs:
    return random_inputs(
        Q_LEN, KV_LEN, head_num=4, kv_head_num=2, head_size=head_size, block_size=16, dtype=dtype, mask_type=kind
    )


def _listed(name: str, given: Any, default: tuple[Any, ...]) -> list[Any]:
    if given is None:
        return list(default)
    chosen = [given] if isinstance(given, (str, int)) else list(given)
    if not chosen:
        raise ValueError(f"{name}: got nothing, expected at least one")
    return chosen
