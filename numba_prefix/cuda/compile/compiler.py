"""Compilation of a kernel's Python function to a cubin, without driver, GPU or C++ toolchain.

Numba and NVVM make LTO-IR, of which nvJitLink makes a cubin, and PTX to read and to test. The cubin
is not made of the PTX: nvJitLink compiles PTX for a link with further code, which took 255
registers and spilled 152 bytes where LTO-IR takes 231 and spills none (head size 128, sm_80).
Drivers get cubins because older drivers refuse newer PTX.

"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from numba_prefix.cuda.kernel.params import INTEGERS, Params
from numba_prefix.cuda.kernel.spec import KernelSpec, Source
from numba_prefix.inputs.errors import TargetUnavailableError
from numba_prefix.planning.params import FACTORS
from numba_prefix.runtime.exit_guard import StopAtExit
from numba_prefix.runtime.signal_guard import keep_over_forks, uninterrupted

FAMILIES = {
    "mma": "numba_prefix.cuda.kernel.mma",
    "fma": "numba_prefix.cuda.kernel.fma",
    "merge": "numba_prefix.cuda.kernel.merge",
}
MIN_CC = (7, 5)

# Thread blocks that a multiprocessor has room for at least. Without it ptxas gives up registers for
# more blocks, and spills (20 bytes in fma, float16, head size 32, sm_75).
MIN_BLOCKS = 2
# Its defaults are those of Numba's options in jit.py: no fastmath, so that denormals are kept and
# quotients and square roots are exact, and products and sums contracted to fma. (Spelling them out
# is refused.)
LINK_OPTIONS = {"link_time_optimization": True, "ptxas_options": ["-v"]}

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


def compile_kernel(spec: KernelSpec, cc: tuple[int, int]) -> Compiled:
    """Compile for compute capability `cc`, (8, 0) for sm_80. Takes seconds; asks no cache.

    Raises ValueError for a cc below 7.5, TargetUnavailableError where the compiler is missing or
    does not know cc.
    """
    if cc < MIN_CC:
        raise ValueError(f"cc: got {cc[0]}.{cc[1]}, expected at least {MIN_CC[0]}.{MIN_CC[1]}")
    return uninterrupted(lambda: _compile(spec, cc))


def _compile(spec: KernelSpec, cc: tuple[int, int]) -> Compiled:
    tools = toolchain()
    at_exit = tools.at_exit
    with at_exit.compiling(), tools.event.install_listener("numba-cuda:run_pass", at_exit):
        known = tools.compute_capabilities
        if cc not in known:
            raise TargetUnavailableError(
                f"target: got 'cuda' and compute capability {cc[0]}.{cc[1]}, expected one that the compiler installed here "
                f"knows: {', '.join(f'{major}.{minor}' for major, minor in known)}"
            )
        source, code = _lto_ir(spec)
        at_exit.on_start(None)
        cubin, log = _link(code, cc, "cubin")
        at_exit.on_start(None)
        ptx = _link(code, cc, "ptx")[0].rstrip(b"\0").decode()
    (name,) = re.findall(r"\.entry\s+(\w+)", ptx)
    return Compiled(
        name=name,
        cc=cc,
        cubin=cubin,
        threads=source.threads,
        shared_bytes=source.shared_bytes,
        block_m=source.block_m,
        block_n=source.block_n,
        mma_count=len(re.findall(r"^\s*(?:@!?%\w+\s+)?(?:mma|wgmma\.mma_async)\.", ptx, re.MULTILINE)),
        ptx=ptx,
        **_resources(log),
    )


def source_of(spec: KernelSpec) -> Source:
    """The kernel's function; brings numba.cuda."""
    source: Source = importlib.import_module(FAMILIES[spec.family]).make(spec)
    return source


def params_type(types: Any) -> Any:
    """Numba's type of a Params, made of numba.cuda's `types`."""
    return types.NamedTuple([types.int64] * len(INTEGERS) + [types.float32] * len(FACTORS), Params)


@functools.lru_cache(maxsize=4)
def _lto_ir(spec: KernelSpec) -> tuple[Source, bytes]:
    """A kernel's source and its LTO-IR for all compute capabilities: LTO-IR made for the least
    links to the same code as one made for another, except for which of two conversions extends a
    number that is not negative."""
    tools = toolchain()
    from numba_prefix.cuda.kernel.jit import OPTIONS, compiling_for

    source, config = source_of(spec), tools.config
    forced, config.FORCE_CUDA_CC = config.FORCE_CUDA_CC, None
    try:
        with compiling_for(MIN_CC):
            code, _ = tools.cuda.compile(
                source.function,
                tools.types.void(params_type(tools.types)),
                device=False,
                opt=True,
                abi="numba",
                # Numba's own name counts what the process compiled before.
                abi_info={"abi_name": source.name},
                cc=MIN_CC,
                output="ltoir",
                launch_bounds=(source.threads, MIN_BLOCKS),
                **OPTIONS,
            )
    finally:
        config.FORCE_CUDA_CC = forced
    return source, code


def _link(code: bytes, cc: tuple[int, int], output: str) -> tuple[bytes, str]:
    """A cubin or PTX, and the log of ptxas."""
    tools = toolchain()
    options = tools.LinkerOptions(arch=f"sm_{cc[0]}{cc[1]}", ptx=output == "ptx", **LINK_OPTIONS)
    linker = tools.Linker(tools.ObjectCode.from_ltoir(code), options=options)
    try:
        return bytes(linker.link(output).code), linker.get_info_log()
    except Exception as error:
        if "OUTDATED_LIBRARY" in str(error):
            raise _unavailable("nvidia-nvjitlink is older than nvidia-nvvm") from error
        raise
    finally:
        linker.close()


def _resources(log: str) -> dict[str, int]:
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = re.findall(r"Used (\d+) registers", log)
    if not frames or not registers:
        raise RuntimeError(f"nvJitLink: got {log!r}, expected a kernel's registers and spills")
    return {
        "registers": max(map(int, registers)),
        "local_bytes": max(int(stack) for stack, _, _ in frames),
        "spill_bytes": sum(int(stores) + int(loads) for _, stores, loads in frames),
    }


@functools.cache
def toolchain() -> Any:
    """numba.cuda and the linker, imported at first use: `cuda`, `types`, `config`, `Linker`,
    `LinkerOptions`, `ObjectCode`, and the `compute_capabilities` that they know.

    Raises TargetUnavailableError that says what to install.
    """
    return uninterrupted(_toolchain)


def _toolchain() -> SimpleNamespace:
    if importlib.util.find_spec("numba_cuda") is None:  # Numba has an older numba.cuda of its own
        raise _unavailable("numba-cuda is missing")
    try:
        from cuda.bindings import nvrtc
        from cuda.core import Linker, LinkerOptions, ObjectCode
        from numba import cuda
        from numba.cuda import types
        from numba.cuda.core import config, event
        from numba.cuda.core.compiler_lock import global_compiler_lock
    except Exception as error:  # releases that do not go together fail in many ways
        raise _unavailable(f"{type(error).__name__}: {error}") from error
    if not callable(cuda.compile):
        raise _unavailable("NUMBA_ENABLE_CUDASIM puts a simulator in place of the compiler", "without it")
    missing = [package for library, package in _LIBRARIES.items() if not _is_loadable(library)]
    if missing:
        raise _unavailable(f"missing: {', '.join(missing)}")
    keep_over_forks(global_compiler_lock)
    return SimpleNamespace(
        cuda=cuda,
        types=types,
        config=config,
        event=event,
        at_exit=type("_StopAtExit", (StopAtExit, event.Listener), {})(),
        Linker=Linker,
        LinkerOptions=LinkerOptions,
        ObjectCode=ObjectCode,
        compute_capabilities=tuple(divmod(arch, 10) for arch in nvrtc.nvrtcGetSupportedArchs()[1]),
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
