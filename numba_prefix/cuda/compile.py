"""From a kernel's Python function to a cubin, without driver, GPU or C++ toolchain; and all jit options of this target.

Numba makes NVVM's code, NVVM makes PTX, nvJitLink makes a cubin. Drivers get cubins, not PTX: those of the toolkit's own
release and newer ones load them, whatever PTX version they know.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import importlib.util
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from numba_prefix.cuda.spec import CALL_LENGTH, FACTORS_LENGTH, KernelSpec, Source
from numba_prefix.errors import TargetUnavailableError
from numba_prefix.uninterrupted import keep_over_forks, uninterrupted

FAMILIES = {
    "mma": "numba_prefix.cuda.mma",
    "fma": "numba_prefix.cuda.fma",
    "merge": "numba_prefix.cuda.merge",
}
MIN_CC = (7, 5)

# Whatever the environment says (NUMBA_OPT, NUMBA_CUDA_DEBUGINFO): optimized and without debug information. No fastmath:
# it would flush denormals everywhere and replace division and square root by approximations; products and sums are
# contracted to fma without it. Kernels write what may be approximate (ex2) as such.
OPTIONS = {"debug": False, "opt": True, "lineinfo": False, "fastmath": False}
# Inlined as Numba's IR: other device functions are compiled for "the current device", which asks for a driver.
DEVICE_OPTIONS = {**OPTIONS, "device": True, "inline": "always", "lto": False}

# Libraries that numba-cuda loads when it compiles, and where pip gets them
_LIBRARIES = {"nvvm": "nvidia-nvvm", "nvrtc": "nvidia-cuda-nvrtc", "nvJitLink": "nvidia-nvjitlink"}


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel as the driver takes it, what launching it needs, and what it uses."""

    name: str  # the kernel's symbol
    cc: tuple[int, int]
    cubin: bytes
    threads: int
    shared_bytes: int
    block_m: int
    block_n: int
    registers: int  # of a thread
    spill_bytes: int  # stored and loaded, of a thread
    local_bytes: int  # stack of a thread: local arrays that are not in registers, and spills
    mma_count: int  # matrix instructions in the code
    ptx: str = ""  # empty if the cubin comes from the cache


def inline(function: Callable[..., Any]) -> Any:
    """A device function: part of every kernel that calls it."""
    return toolchain().cuda.jit(function, **DEVICE_OPTIONS)


def compile_kernel(spec: KernelSpec, cc: tuple[int, int]) -> Compiled:
    """Compile for compute capability `cc`, (8, 0) for sm_80. Takes seconds; asks no cache.

    Raises ValueError for a cc below 7.5, TargetUnavailableError where the compiler is missing or does not know cc.
    """
    if cc < MIN_CC:
        raise ValueError(f"cc: got {cc[0]}.{cc[1]}, expected at least {MIN_CC[0]}.{MIN_CC[1]}")
    return uninterrupted(lambda: _compile(spec, cc))


def source_of(spec: KernelSpec) -> Source:
    """The kernel's function; brings numba.cuda."""
    source: Source = importlib.import_module(FAMILIES[spec.family]).make(spec)
    return source


def _compile(spec: KernelSpec, cc: tuple[int, int]) -> Compiled:
    with _work:
        toolchain()
        source = source_of(spec)
        ptx = _ptx(source, cc)
        _work.check()
        cubin, log = _link(ptx, cc)
    found = _resources(log)
    return Compiled(
        name=source.name,
        cc=cc,
        cubin=cubin,
        threads=source.threads,
        shared_bytes=source.shared_bytes,
        block_m=source.block_m,
        block_n=source.block_n,
        mma_count=len(re.findall(r"^\s*(?:@!?%\w+\s+)?(?:mma|wgmma)\.", ptx, re.MULTILINE)),
        ptx=ptx,
        **found,
    )


def _ptx(source: Source, cc: tuple[int, int]) -> str:
    """The same text for the same source, in every process."""
    tools = toolchain()
    types, config = tools.types, tools.config
    call, factors = types.UniTuple(types.int64, CALL_LENGTH), types.UniTuple(types.float32, FACTORS_LENGTH)
    forced, config.FORCE_CUDA_CC = config.FORCE_CUDA_CC, None
    try:
        ptx, _ = tools.cuda.compile(
            source.function,
            types.void(call, factors),
            device=False,
            abi="numba",
            cc=cc,
            output="ptx",
            launch_bounds=source.threads,
            **OPTIONS,
        )
    finally:
        config.FORCE_CUDA_CC = forced
    if f".target sm_{cc[0]}{cc[1]}\n" not in ptx:
        raise TargetUnavailableError(
            f"target: got 'cuda' and a GPU of compute capability {cc[0]}.{cc[1]}, which the CUDA compiler installed here "
            "does not know"
        )
    # Numba's name for it counts what this process compiled before. Its "environment" is for code that calls Python.
    (mangled,) = re.findall(r"\.entry\s+(\w+)", ptx)
    ptx = re.sub(r"^\.common .*NumbaEnv\w*;\n", "", ptx, flags=re.MULTILINE)
    return ptx.replace(mangled, source.name)


def _link(ptx: str, cc: tuple[int, int]) -> tuple[bytes, str]:
    """A cubin, and what ptxas says of it."""
    tools = toolchain()
    options = tools.LinkerOptions(arch=f"sm_{cc[0]}{cc[1]}", ptxas_options=["-v"])
    linker = tools.Linker(tools.ObjectCode.from_ptx(ptx.encode()), options=options)
    try:
        cubin = linker.link("cubin").code
        return bytes(cubin), linker.get_info_log()
    finally:
        linker.close()


def _resources(log: str) -> dict[str, int]:
    frame = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = re.findall(r"Used (\d+) registers", log)
    if not frame or not registers:
        raise RuntimeError(f"nvJitLink: expected the registers and spills of a kernel, got {log!r}")
    return {
        "registers": max(map(int, registers)),
        "local_bytes": max(int(stack) for stack, _, _ in frame),
        "spill_bytes": sum(int(stores) + int(loads) for _, stores, loads in frame),
    }


def toolchain() -> Any:
    """numba.cuda and the linker, imported at first use: `cuda`, `types`, `config`, `Linker`, `LinkerOptions`, `ObjectCode`.

    Raises TargetUnavailableError that says what to install.
    """
    return uninterrupted(_toolchain)


@functools.cache
def _toolchain() -> SimpleNamespace:
    if importlib.util.find_spec("numba_cuda") is None:  # Numba has an older numba.cuda of its own
        raise _unavailable("numba-cuda is missing")
    try:
        from cuda.core import Linker, LinkerOptions, ObjectCode
        from numba import cuda
        from numba.cuda import types
        from numba.cuda.core import config
        from numba.cuda.core.compiler_lock import global_compiler_lock
    except ImportError as error:
        raise _unavailable(f"{type(error).__name__}: {error}") from error
    if not callable(cuda.compile):
        raise _unavailable("NUMBA_ENABLE_CUDASIM puts a simulator in place of the compiler", "without it")
    missing = [package for library, package in _LIBRARIES.items() if not _is_loadable(library)]
    if missing:
        raise _unavailable(f"missing: {', '.join(missing)}")
    keep_over_forks(global_compiler_lock)
    return SimpleNamespace(
        cuda=cuda, types=types, config=config, Linker=Linker, LinkerOptions=LinkerOptions, ObjectCode=ObjectCode
    )


def _is_loadable(library: str) -> bool:
    from cuda.pathfinder import load_nvidia_dynamic_lib

    try:
        load_nvidia_dynamic_lib(library)
    except Exception:
        return False
    return True


def _unavailable(why: str, expected: str = "install numba_prefix[cuda]") -> TargetUnavailableError:
    return TargetUnavailableError(
        f"target: got 'cuda', expected an environment that can compile it: {expected} ({why})"
    )


class _Work:
    """A compilation in progress. The interpreter's end waits for the step it is at: what it would tear down is in use."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_exiting = False

    def __enter__(self) -> None:
        _register_exit()
        self.check()
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    def check(self) -> None:
        if self.is_exiting:
            raise SystemExit  # ends a thread without a word

    def exit(self) -> None:
        self.is_exiting = True
        self.lock.acquire()


_work = _Work()


@functools.cache
def _register_exit() -> None:
    atexit.register(_work.exit)
