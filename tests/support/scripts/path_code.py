"""Compiles a path's own part of its kernel for a CPU that has the path, on any machine.

Nothing is executed; prints facts about the code.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from machine_code import VECTOR, pieces
from numba import types

from numba_prefix.cpu.compile.jit import kernel
from numba_prefix.cpu.kernel import prefill_bf16
from numba_prefix.cpu.kernel.sizes import BLOCK_N, STEP_N
from numba_prefix.cpu.paths import by_name
from numba_prefix.cpu.simd.params_view import params_view

INTEGERS = types.Array(types.int64, 1, "C")


def own_part(path: str) -> tuple[Any, tuple[Any, ...]]:
    kernels = by_name(path).micro_kernels()
    (pack_values, scale_acc, step), enter, leave = kernels.steps, kernels.enter, kernels.leave
    pack_rows = prefill_bf16.pack_rows

    def steps(block: Any, rows: Any, width: Any, scratch: Any) -> None:
        params = params_view(block)
        enter()
        s, p, acc = scratch + params.s_offset, scratch + params.p_offset, scratch + params.acc_offset
        keys, alpha = scratch + params.k_rows_offset, scratch + params.alpha_offset
        pack_rows(params, False, rows, BLOCK_N, keys, scratch + params.staging_offset)
        pack_values(params, False, rows, BLOCK_N, scratch)
        scale_acc(params, acc, alpha)
        softmax_ptr = scratch + params.softmax_offset
        for key in range(0, BLOCK_N, STEP_N):
            scoring = (keys, scratch + params.q_t_offset, width, s)
            adding = (key, p, BLOCK_N, 0, params.head_size, width, acc, alpha)
            step(params, scoring, softmax_ptr, adding, scratch)
        leave()

    return kernel(steps), (INTEGERS, types.int64, types.int64, types.int64)


def facts(path: str) -> dict[str, Any]:
    fresh, signature = own_part(path)
    fresh._cache.load_overload = fresh._cache.save_overload = lambda *_: None
    fresh.compile(signature)
    (signature,) = fresh.signatures
    llvm_ir, assembly = fresh.inspect_llvm(signature), fresh.inspect_asm(signature)
    words = "ldtilecfg tilerelease tileloadd tilestored tdpbf16ps vdpbf16ps vcvtne2ps2bf16"
    products, weights = (
        [piece for piece in pieces(assembly) if any(word in line for line in piece)]
        for word in ("dpbf16ps", "vcvtne2ps2bf16")
    )
    return {
        "counts": {word: len(re.findall(rf"^\s+{word}\b", assembly, re.M)) for word in words.split()},
        "dots": [sum("dpbf16ps" in line for line in piece) for piece in products],
        "registers": sorted(
            {x for piece in products for line in piece if "dpbf16ps" in line for x in re.findall(r"%([xyzt]mm)", line)}
        ),
        "weights": [sum("vcvtne2ps2bf16" in line for line in piece) for piece in weights],
        "spills": [line for x in products + weights for line in x if "(%rsp" in line and VECTOR.search(line)],
        "doubles": len(re.findall(r"\bdouble\b", llvm_ir)),
        "calls": sorted(set(re.findall(r"\b(__truncsfbf2|__extendhfsf2|__truncsfhf2)\b", assembly))),
    }


print(json.dumps([facts(path) for path in sys.argv[1].split(",")]))
