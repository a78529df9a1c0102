"""Chooses the kernels that a call needs; each is compiled and loaded once per process."""

from __future__ import annotations

from dataclasses import dataclass, replace

from numba_prefix.cuda.compile import cubins
from numba_prefix.cuda.compile.compiler import Compiled
from numba_prefix.cuda.device.gpu import Device
from numba_prefix.cuda.kernel.spec import CHUNK, KernelSpec, family_of, head_dim_of, merge_of
from numba_prefix.inputs.arrays import ITEM_BYTES, Tensor
from numba_prefix.inputs.errors import TargetUnavailableError
from numba_prefix.inputs.problem import Operands, Problem
from numba_prefix.planning.params import bias_of

DEFAULT_SHARED_BYTES = 48 << 10  # what a kernel may have without asking


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel as it is launched; block_m and block_n are 0 for the merge."""

    spec: KernelSpec
    function: int
    threads: int
    shared_bytes: int
    block_m: int
    block_n: int


def attention_kernel(device: Device, problem: Problem, operands: Operands, out_dtype: str) -> Kernel:
    """The first family that this GPU can run: tensor cores for 16-bit numbers, else plain
    arithmetic.

    Raises TargetUnavailableError if blocks may not have enough shared memory for any."""
    spec = KernelSpec(
        family="fma",
        dtype=problem.dtype,
        out_dtype=out_dtype,
        head_dim=head_dim_of(problem.head_size),
        bias=bias_of(problem),
        mask_dtype=problem.mask_dtype or "",
        is_aligned=is_aligned(problem, operands),
    )
    families = dict.fromkeys((family_of(problem.dtype, device.cc), "fma"))
    kernels = (_load(device, replace(spec, family=family)) for family in families)
    tried = []
    for kernel in kernels:
        if kernel.shared_bytes <= device.max_shared_bytes:
            return kernel
        tried.append(kernel.shared_bytes)
    raise TargetUnavailableError(
        f"target: got 'cuda' on cuda:{device.ordinal} ({device.name}), whose thread blocks have at most "
        f"{device.max_shared_bytes} bytes of shared memory, expected at least {min(tried)} for {problem.dtype} and head size "
        f"{problem.head_size}"
    )


def merge_kernel(device: Device, attention: KernelSpec) -> Kernel:
    """The kernel that merges the split tiles of another one."""
    return _load(device, merge_of(attention))


def is_aligned(problem: Problem, operands: Operands) -> bool:
    """Whether all rows of query, key and value begin and end at multiples of CHUNK bytes."""
    item = ITEM_BYTES[problem.dtype]
    if problem.head_size * item % CHUNK:
        return False
    return all(_rows_are_aligned(t, item) for t in (operands.q, operands.k_cache, operands.v_cache))


def _rows_are_aligned(t: Tensor, item: int) -> bool:
    steps = (stride * item for stride, size in zip(t.strides[:-1], t.shape[:-1], strict=True) if size > 1)
    return not t.address % CHUNK and not any(step % CHUNK for step in steps)


def _load(device: Device, spec: KernelSpec) -> Kernel:
    """The device's context is current."""
    kept = device.driver.kept
    kernel: Kernel | None = kept.get((device.ordinal, spec))
    if kernel is None:
        compiled, handle = _load_for_cc(device, spec)
        if DEFAULT_SHARED_BYTES < compiled.shared_bytes <= device.max_shared_bytes:
            device.driver.allow_shared(handle, device.ordinal, compiled.shared_bytes)
        function = device.driver.get_function(handle)
        sizes = compiled.threads, compiled.shared_bytes, compiled.block_m, compiled.block_n
        kernel = kept[device.ordinal, spec] = Kernel(spec, function, *sizes)
    return kernel


def _load_for_cc(device: Device, spec: KernelSpec) -> tuple[Compiled, int]:
    """All devices of one compute capability share what is loaded."""
    driver = device.driver
    loaded: tuple[Compiled, int] | None = driver.kept.get((device.cc, spec))
    if loaded is None:
        compiled = cubins.kernel(spec, device.cc)
        handle = driver.get_kernel(driver.load_library(compiled.cubin), compiled.name)
        loaded = driver.kept[device.cc, spec] = compiled, handle
    return loaded
