"""Native entry points: the few instructions between a C caller and a Python function.

A ctypes callback is not enough because of exceptions: one that is raised as a callback begins (most
likely a Ctrl-C that arrived while C code ran) is printed and lost there, and the C caller gets a
status that was never set. So LLVM, which Numba brings, compiles entry points of our own: they have
a status before they enter Python, and hand an exception that leaves a body to the thread's next
steps in Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from numba_prefix.runtime.llvm_text import UNSIGNED_LONG, address_of, assembled, constant

_TYPES = {
    ctypes.c_void_p: "ptr",
    ctypes.c_int: "i32",  # c_int32 too
    ctypes.c_int64: "i64",
    ctypes.c_uint64: "i64",
    ctypes.c_float: "float",
}
_PYTHON_API = (
    "Py_IsInitialized", "PyGILState_Ensure", "PyGILState_Release", "PyLong_FromVoidPtr", "PyObject_CallOneArg", "Py_IncRef",
    "Py_DecRef", "PyErr_Occurred", "PyErr_Clear", "PyThread_get_thread_ident", "PyThreadState_SetAsyncExc",
)  # fmt: skip
# uwtable: CPython ends a thread that asks for the GIL after the interpreter's end by unwinding its
# stack, through here. The exception is set again only after the last step in Python: it is raised
# at the thread's next bytecode.
_CALL_PYTHON = """
define internal void @call_python(ptr %call, ptr %body, ptr %interrupted) uwtable {{
  %is_up = call i32 {Py_IsInitialized}()
  %is_down = icmp eq i32 %is_up, 0
  br i1 %is_down, label %end, label %enter
enter:
  %gil = call i32 {PyGILState_Ensure}()
  %address = call ptr {PyLong_FromVoidPtr}(ptr %call)
  %no_memory = icmp eq ptr %address, null
  br i1 %no_memory, label %raised, label %run
run:
  %result = call ptr {PyObject_CallOneArg}(ptr %body, ptr %address)
  call void {Py_DecRef}(ptr %address)
  call void {Py_DecRef}(ptr %result)
  %is_error = icmp eq ptr %result, null
  br i1 %is_error, label %raised, label %leave
raised:
  %exception = call ptr {PyErr_Occurred}()
  call void {Py_IncRef}(ptr %exception)
  call void {PyErr_Clear}()
  %noted = call ptr {PyObject_CallOneArg}(ptr %interrupted, ptr %exception)
  call void {Py_DecRef}(ptr %noted)
  call void {PyErr_Clear}()
  %thread = call {long} {PyThread_get_thread_ident}()
  %count = call i32 {PyThreadState_SetAsyncExc}({long} %thread, ptr %exception)
  call void {Py_DecRef}(ptr %exception)
  br label %leave
leave:
  call void {PyGILState_Release}(i32 %gil)
  br label %end
end:
  ret void
}}
"""


@dataclass(frozen=True, slots=True)
class Export:
    """A C function. Its `body` is called with the address of a `parameters`: the first field is the
    int64 result (`result` until the body sets it), the others are the function's parameters in
    order."""

    name: str
    parameters: type[ctypes.Structure]
    body: Callable[[int], None]
    result: int


def native_functions(exports: Sequence[Export], interrupted: Callable[[type[BaseException]], None]) -> tuple[int, ...]:
    """Addresses of the C functions. `interrupted` is called, on the same thread, with an exception
    that leaves a body.

    The Python functions are kept as long as the code is, which is forever.
    """
    python = {name: constant(address_of(getattr(ctypes.pythonapi, name))) for name in _PYTHON_API}
    keep_forever(interrupted)
    text = [_CALL_PYTHON.format(**python, long=UNSIGNED_LONG)]
    for export in exports:
        keep_forever(export.body)
        text.append(_entry(export, constant(id(export.body)), constant(id(interrupted))))
    return assembled("\n".join(text), [export.name for export in exports])


def keep_forever(thing: Any) -> None:
    """Keep an object alive, even when the interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _entry(export: Export, body: str, interrupted: str) -> str:
    """The function as LLVM IR: parameters go into a struct laid out as by ctypes, the result comes
    back."""
    (_, result), *fields = [(name, kind) for name, kind, *_ in export.parameters._fields_]
    frame = f"{{{', '.join([_TYPES[result], *(_TYPES[kind] for _, kind in fields)])}}}"
    declared = ", ".join(f"{_TYPES[kind]} %{name}" for name, kind in fields)
    lines = [
        f"define i64 @{export.name}({declared}) uwtable {{",
        f"%frame.memory = alloca {frame}",
        f"store i64 {int(export.result)}, ptr %frame.memory",
    ]
    for place, (name, kind) in enumerate(fields, 1):
        lines += [
            f"%{name}.place = getelementptr {frame}, ptr %frame.memory, i32 0, i32 {place}",
            f"store {_TYPES[kind]} %{name}, ptr %{name}.place",
        ]
    lines += [
        f"call void @call_python(ptr %frame.memory, ptr {body}, ptr {interrupted})",
        "%frame.result = load i64, ptr %frame.memory",
        "ret i64 %frame.result",
        "}",
    ]
    return "\n".join(lines)
