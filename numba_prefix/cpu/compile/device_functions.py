"""Compiles device functions to LLVM IR only; the kernel that links them does the rest.

Numba optimises each such function with all that it calls, and makes machine code of it that nothing
calls, before it does so with the kernel: of 25 s for the first kernel that took 5.
"""

from __future__ import annotations

from typing import Any

from numba.core import codegen
from numba.core.compiler import Compiler
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering


class DeviceFunctionLibrary(codegen.JITCodeLibrary):
    """A module to link with others; it never meets the execution engine."""

    def _optimize_final_module(self) -> None:
        """Left to the kernel's."""

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        return 0  # no such symbol is defined


@register_pass(mutates_CFG=True, analysis_only=False)
class DeviceFunctionLowering(NativeLowering):
    _name = "numba_prefix_part_lowering"

    def run_pass(self, state: Any) -> bool:
        context = state.targetctx
        library = state.library = DeviceFunctionLibrary(context.codegen(), state.func_id.func_qualname)
        executable = context.get_executable

        def get_executable(of: Any, fndesc: Any, env: Any) -> Any:
            # Numba wants a built-in function, of each part another one.
            return [fndesc.unique_name].append if of is library else executable(of, fndesc, env)

        context.get_executable = get_executable  # while Numba's compiler lock is held
        try:
            return bool(super().run_pass(state))
        finally:
            del context.get_executable


class DeviceFunctionCompiler(Compiler):
    def define_pipelines(self) -> Any:
        pipelines = super().define_pipelines()
        for pipeline in pipelines:
            pipeline.passes = [
                (DeviceFunctionLowering if p is NativeLowering else p, text) for p, text in pipeline.passes
            ]
            pipeline._finalized = False
            pipeline.finalize()
        return pipelines
