"""A CUDA kernel's compile-time choices, the choice of a kernel for a problem, and a kernel's
source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TENSOR_CORES = (8, 0)  # the oldest compute capability that family mma runs on
_FAMILIES = {"float16": "mma", "bfloat16": "mma", "float32": "fma"}  # on tensor cores
HEAD_DIMS = (32, 64, 96, 128, 192, 256)  # what head sizes are padded to
CHUNK = 16  # bytes that are copied at once where all rows are aligned to it


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """A kernel's compile-time choices.

    family      "mma" (tensor cores, sm_80 and newer, 16-bit inputs), "fma" (any inputs and GPU) or
                "merge" (of split tiles)
    dtype       of query, key and value: "float16", "bfloat16", "float32"
    out_dtype   dtype, or "float32"
    head_dim    one of HEAD_DIMS: the head size, padded
    bias        one of planning.params.BIASES
    mask_dtype  of the given mask, "" if there is none to read
    is_aligned  all rows of query, key and value begin and end at multiples of CHUNK bytes
    """

    family: str
    dtype: str
    out_dtype: str
    head_dim: int
    bias: str = "none"
    mask_dtype: str = ""
    is_aligned: bool = True

    @property
    def name(self) -> str:
        out = "" if self.out_dtype == self.dtype else f"_to_{self.out_dtype}"
        mask = f"_{self.mask_dtype}_mask" if self.mask_dtype else ""
        aligned = "" if self.is_aligned else "_unaligned"
        return f"{self.family}_{self.dtype}{out}_d{self.head_dim}_{self.bias}{mask}{aligned}"


@dataclass(frozen=True, slots=True)
class Source:
    """A kernel, ready to be compiled: Numba's function and how it is launched."""

    name: str
    function: Callable[..., Any]  # of a Params
    threads: int
    shared_bytes: int
    block_m: int  # rows and keys of a tile; 0 for the merge
    block_n: int


def family_of(dtype: str, cc: tuple[int, int]) -> str:
    """Tensor cores for 16-bit numbers where the GPU has those that family mma uses, else plain
    arithmetic. KeyError for an unknown dtype."""
    family = _FAMILIES[dtype]
    return family if cc >= TENSOR_CORES else "fma"


def head_dim_of(head_size: int) -> int:
    """The least of HEAD_DIMS that a head fits into. ValueError above 256."""
    return min(size for size in HEAD_DIMS if size >= head_size)


def merge_of(spec: KernelSpec) -> KernelSpec:
    """The kernel that merges the split tiles of another one, whatever its inputs are."""
    return KernelSpec("merge", dtype=spec.out_dtype, out_dtype=spec.out_dtype, head_dim=spec.head_dim)
