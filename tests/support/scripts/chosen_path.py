"""Prints the path that each dtype takes and the speeds that say so; a second process prints the
same."""

from __future__ import annotations

from numba_prefix.cpu import isa, target

for dtype in ("bfloat16", "float16", "float32"):
    path = target.ready_path(dtype)
    assert path in isa.candidates(dtype)
    assert target.ready_path(dtype) is path
    print(dtype, path.name, dict(target.measured(dtype)))
