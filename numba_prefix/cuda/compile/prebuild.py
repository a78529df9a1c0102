"""Builds kernels into the cache ahead of their first call, for GPUs that need not be here, and
reports what they use."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from typing import Any

from numba_prefix.cuda.compile import cubins
from numba_prefix.cuda.kernel.spec import CHUNK, KernelSpec, family_of, head_dim_of, merge_of
from numba_prefix.inputs.arrays import ITEM_BYTES
from numba_prefix.inputs.mask_types import MaskType

# Turing, Ampere and its smaller kind, Hopper, Blackwell and its smaller kind
GENERATIONS = ((7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0))
RESOURCES = ("registers", "spill_bytes", "local_bytes", "shared_bytes", "mma_count")

_BIASES = {
    MaskType.NONE: ("none",),
    MaskType.CAUSAL_MASK: ("none",),
    MaskType.ALIBI_COMPRESS: ("linear", "template_linear", "heads_mask"),
    MaskType.ALIBI_COMPRESS_SQRT: ("sqrt", "template_sqrt", "heads_mask"),
    MaskType.ALIBI_COMPRESS_LEFT_ALIGN: ("left_align", "template_left_align", "heads_mask"),
}
_READ = ("template_linear", "template_sqrt", "template_left_align", "heads_mask")


def default_specs(
    cc: tuple[int, int], dtypes: Iterable[str], head_sizes: Iterable[int], kinds: Iterable[MaskType]
) -> list[KernelSpec]:
    """The kernels of calls with aligned arrays, output and mask of the inputs' dtype: for every
    mask kind those with and without a given mask, and what merges their split tiles."""
    kinds, found = list(kinds), []
    sizes = [(head_size, head_dim_of(head_size)) for head_size in head_sizes]
    for dtype in dtypes:
        for head_size, head_dim in sizes:
            is_aligned = head_size * ITEM_BYTES[dtype] % CHUNK == 0
            for kind in kinds:
                for bias in _BIASES[kind]:
                    mask_dtype = dtype if bias in _READ else ""
                    family = family_of(dtype, cc)
                    found.append(KernelSpec(family, dtype, dtype, head_dim, bias, mask_dtype, is_aligned))
    return list(dict.fromkeys([*found, *map(merge_of, found)]))


def wanted(ccs: Iterable[tuple[int, int]], *which: Any) -> list[tuple[KernelSpec, tuple[int, int]]]:
    """default_specs(cc, *which) for each cc. Those of one spec follow each other: most of the work
    is the same."""
    pairs = dict.fromkeys((spec, cc) for cc in ccs for spec in default_specs(cc, *which))
    order = {spec: place for place, spec in enumerate(dict.fromkeys(spec for spec, _ in pairs))}
    return sorted(pairs, key=lambda pair: order[pair[0]])


def build(kernels: Iterable[tuple[KernelSpec, tuple[int, int]]]) -> Iterator[dict[str, Any]]:
    """Builds kernels, or finds them in the cache. Yields what `inspect` shows of each, how long it
    took and where it came from."""
    for spec, cc in kernels:
        began = time.perf_counter()
        found, source = cubins.obtain(spec, cc)
        yield {
            "name": found.name,
            "cc": f"{cc[0]}.{cc[1]}",
            "dtype": spec.dtype,
            "head_size": spec.head_dim,
            **{name: getattr(found, name) for name in RESOURCES},
            "seconds": time.perf_counter() - began,
            "source": source,
        }


def parsed_ccs(given: Any) -> list[tuple[int, int]]:
    """[(8, 6), (9, 0)] of "8.6,9.0", of one tuple, or of an iterable of texts and tuples. Raises
    TypeError, ValueError."""
    if isinstance(given, str):
        return [_parsed_cc(text) for text in given.split(",")]
    if _is_cc(given):
        return [(int(given[0]), int(given[1]))]
    if not isinstance(given, Iterable):
        raise TypeError(f"cc: got {type(given).__name__}, expected a text like '8.0,9.0' or tuples like (9, 0)")
    found = [cc for part in given for cc in parsed_ccs(part)]
    if not found:
        raise ValueError("cc: got nothing, expected at least one")
    return found


def _is_cc(given: Any) -> bool:
    is_pair = isinstance(given, tuple) and len(given) == 2
    return is_pair and all(isinstance(part, int) and not isinstance(part, bool) for part in given)


def _parsed_cc(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9][0-9]?)\.([0-9])", text.strip(), re.ASCII)
    if match is None:
        raise ValueError(f"cc: got {text!r}, expected a compute capability like '9.0'")
    return int(match[1]), int(match[2])
