"""Operands as kernels read and write them: with a dense last axis, for which some have to be copied
at every run."""

from __future__ import annotations

from numba_prefix.inputs.problem import Operands, has_unit_stride, unit_stride


def are_dense(o: Operands) -> bool:
    """Whether dense_operands would copy nothing."""
    for t in (o.q, o.k_cache, o.v_cache, o.slopes, o.out):  # noqa: SIM110 - a generator takes 1 us more
        if t is not None and not has_unit_stride(t):
            return False
    return True


def dense_operands(o: Operands) -> Operands:
    """The same operands, those whose last axis is strided as dense copies. A copy of out is the
    caller's to copy back."""
    slopes = unit_stride(o.slopes) if o.slopes is not None else None
    q, k_cache, v_cache = unit_stride(o.q), unit_stride(o.k_cache), unit_stride(o.v_cache)
    out = unit_stride(o.out) if o.out is not None else None
    return Operands(q, k_cache, v_cache, o.block_tables, o.mask, slopes, out)
