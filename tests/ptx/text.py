"""Hand-written PTX for tests of the interpreter itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .forms import DTYPES
from .memory import Memory
from .module import Module
from .statistics import Statistics

_REGISTERS = """
    .reg .pred %p<10>; .reg .b16 %h<20>; .reg .b32 %r<60>; .reg .f32 %f<40>; .reg .b64 %rd<40>; .reg .f64 %fd<10>;
"""


def entry(body: str, parameters: str = "", declarations: str = "", target: str = "sm_80", directives: str = "") -> str:
    """A module of one kernel named k. %r0 is the thread's number, %rd0, %rd1 ... the parameters,
    all .u64."""
    names = parameters.split()
    loads = "".join(f"ld.param.u64 %rd{i}, [{name}];\n" for i, name in enumerate(names))
    listed = ", ".join(f".param .u64 {name}" for name in names)
    return (
        f".version 9.0\n.target {target}\n.address_size 64\n{declarations}\n"
        f".visible .entry k({listed}) {directives}\n{{{_REGISTERS}{loads}mov.u32 %r0, %tid.x;\n{body}\nret;\n}}\n"
    )


def run(text: str, arrays: Sequence[np.ndarray] = (), **launch: Any) -> Statistics:
    """Runs k on arrays, one parameter each; read-only arrays may not be stored to."""
    memory = launch.pop("memory", None) or Memory()
    for i, array in enumerate(arrays):
        memory.add(f"array {i}", array)
    options = {"grid": 1, "block": 32, **launch}
    return Module(text).run("k", arguments=[array.ctypes.data for array in arrays], memory=memory, **options)


def apply(code: str, result: str, *inputs: tuple[str, Any]) -> np.ndarray:
    """One value per thread: code computes %o of type `result` from %a, %b, %c, %d, given as (type,
    values)."""
    size = max(np.size(values) for _, values in inputs)
    out_type = "u32" if result == "pred" else result
    arrays, lines = [], []
    for i, (kind, values) in enumerate(inputs):
        stored = "u32" if kind == "pred" else kind
        arrays.append(np.ascontiguousarray(np.broadcast_to(np.asarray(values), size).astype(DTYPES[stored])))
        lines += _declare("abcd"[i], kind)
        lines += _address(i, arrays[-1].itemsize)
        if kind == "pred":
            lines += [f"ld.global.u32 %r50, [%rd30]; setp.ne.u32 %{'abcd'[i]}, %r50, 0;"]
        else:
            lines += [f"ld.global.{_plain(kind)} %{'abcd'[i]}, [%rd30];"]
    arrays.append(np.zeros(size, DTYPES[out_type]))
    lines += [*_declare("o", result), code, *_address(len(inputs), arrays[-1].itemsize)]
    if result == "pred":
        lines += ["selp.u32 %r50, 1, 0, %o; st.global.u32 [%rd30], %r50;"]
    else:
        lines += [f"st.global.{_plain(result)} [%rd30], %o;"]
    names = " ".join(f"p{i}" for i in range(len(arrays)))
    body = "mov.u32 %r50, %ctaid.x; mad.lo.s32 %r51, %r50, 32, %r0;\n"
    body += f"setp.ge.u32 %p9, %r51, {size};\n@%p9 ret;\n" + "\n".join(lines)
    run(entry(body, names), arrays, grid=-(-size // 32))
    return arrays[-1].astype(bool) if result == "pred" else arrays[-1]


def _plain(kind: str) -> str:
    return {"f16": "b16", "bf16": "b16", "f16x2": "b32", "bf16x2": "b32", "f32x2": "b64"}.get(kind, kind)


def _declare(name: str, kind: str) -> list[str]:
    wide = {"u8": "b16", "s8": "b16", "b8": "b16"}.get(kind, kind if kind == "pred" else _plain(kind))
    return [f".reg .{wide} %{name};"]


def _address(place: int, size: int) -> list[str]:
    return [f"mul.wide.u32 %rd31, %r51, {size}; add.s64 %rd30, %rd{place}, %rd31;"]
