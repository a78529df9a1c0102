"""Functions written as LLVM IR, for code that neither Numba nor ctypes can express."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

UNSIGNED_LONG = f"i{8 * ctypes.sizeof(ctypes.c_ulong)}"


def assembled(text: str, names: Sequence[str]) -> tuple[int, ...]:
    """Addresses of the functions `names` of a module.

    The code is never freed: C callers hold its address for an unknown time.
    """
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(opt=1)
    module = llvm.parse_assembly(f'target datalayout = "{machine.target_data}"\n{text}')
    module.verify()
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    addresses = tuple([int(engine.get_function_address(name)) for name in names])
    engine.detach()  # never disposed of
    return addresses


def constant(address: int | None) -> str:
    return f"inttoptr (i64 {address} to ptr)"


def address_of(function: Any) -> int | None:
    """Address of a function that ctypes found."""
    return ctypes.cast(function, ctypes.c_void_p).value
