"""The type by which kernels read their parameters: `params_view(block)` is the address of a Params'
block, with a field as each attribute."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.imputils import lower_getattr_generic
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import intrinsic, models, register_model

from numba_prefix.cpu.kernel.params import SLOT_BYTES, SLOTS
from numba_prefix.planning.params import FACTORS


class ParamsType(types.Type):
    """The address of a block of parameters."""

    def __init__(self) -> None:
        super().__init__(name="Params")


params_type = ParamsType()
register_model(ParamsType)(models.OpaqueModel)  # an address


@infer_getattr
class _Attributes(AttributeTemplate):
    key = ParamsType

    def generic_resolve(self, view: Any, name: str) -> Any:
        if name not in SLOTS:
            return None
        return types.float32 if name in FACTORS else types.int64


@lower_getattr_generic(ParamsType)
def _load_field(context: Any, builder: ir.IRBuilder, view: Any, value: ir.Value, name: str) -> ir.Value:
    kind = ir.FloatType() if name in FACTORS else ir.IntType(64)
    place = builder.gep(value, [ir.Constant(ir.IntType(64), SLOT_BYTES * SLOTS[name])])
    return builder.load(builder.bitcast(place, kind.as_pointer()), align=SLOT_BYTES)


@intrinsic
def params_view(typingctx: Any, block: Any) -> Any:
    """A view of int64 [fields], which has to outlive it."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        array = context.make_array(sig.args[0])(context, builder, args[0])
        return builder.bitcast(array.data, ir.IntType(8).as_pointer())

    return params_type(block), codegen
