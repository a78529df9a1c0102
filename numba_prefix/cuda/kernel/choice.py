"""Which kernel serves a problem on a GPU."""

from __future__ import annotations

from numba_prefix.cuda.kernel.spec import HEAD_DIMS, KernelSpec

TENSOR_CORES = (8, 0)  # the oldest compute capability that family mma runs on
CHUNK = 16  # bytes that are copied at once where all rows are aligned to it


def family_of(dtype: str, cc: tuple[int, int]) -> str:
    """Tensor cores for 16-bit numbers where the GPU has those that we use, else plain arithmetic."""
    return "mma" if dtype != "float32" and cc >= TENSOR_CORES else "fma"


def head_dim_of(head_size: int) -> int:
    """What a head size of up to 256 is padded to."""
    return min(size for size in HEAD_DIMS if size >= head_size)


def merge_of(spec: KernelSpec) -> KernelSpec:
    """The kernel that joins the split tiles of another one, whatever its inputs are."""
    return KernelSpec("merge", dtype=spec.out_dtype, out_dtype=spec.out_dtype, head_dim=spec.head_dim)
