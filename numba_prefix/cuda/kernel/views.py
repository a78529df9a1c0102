"""Tables in global memory, seen as Numba arrays, so that tiling's rules can read them as they do on the host."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.cuda.extending import intrinsic
from numba.cuda.np.arrayobj import populate_array


@intrinsic
def int64_table(_: Any, address: Any, columns: Any) -> Any:
    """int64 [any number of rows, columns] at a byte address."""
    kind = types.Array(types.int64, 2, "C", readonly=True)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(kind)(context, builder)
        size = context.get_value_type(types.intp)
        item, unknown = ir.Constant(size, 8), ir.Constant(size, 1 << 40)
        populate_array(
            array,
            data=builder.inttoptr(arguments[0], array.data.type),
            shape=[unknown, arguments[1]],
            strides=[builder.mul(arguments[1], item), item],
            itemsize=item,
            meminfo=None,
        )
        return array._getvalue()

    return kind(types.int64, types.int64), codegen
