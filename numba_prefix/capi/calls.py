"""The Python part of each C function, with the GIL held: read the caller's structs, call
front/encoder.py, report a status."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

from numba_prefix.capi.descriptors import buffer, context, optional_tensor, tensor
from numba_prefix.capi.native import Export
from numba_prefix.capi.status import Refusal, Status, last_text, remember, status_of
from numba_prefix.front.encoder import self_attention_prefix_encoder, self_attention_prefix_encoder_get_workspace_size
from numba_prefix.front.operation import Op

# A handle is a number, not an address, so that a wrong one can be told from a right one.
_FIRST_HANDLE = 0x6E627000  # uninitialised pointers tend to hold small numbers
_handles = itertools.count(_FIRST_HANDLE)
_operations: dict[int, Op] = {}


class _Plan(ctypes.Structure):
    _fields_ = (
        ("result", ctypes.c_int64),
        ("query", ctypes.c_void_p),
        ("key", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        ("blockTables", ctypes.c_void_p),
        ("mask", ctypes.c_void_p),
        ("seqLen", ctypes.c_void_p),
        ("kvSeqLen", ctypes.c_void_p),
        ("slopes", ctypes.c_void_p),
        ("maskType", ctypes.c_int),
        ("headNum", ctypes.c_int32),
        ("kvHeadNum", ctypes.c_int32),
        ("qkScale", ctypes.c_float),
        ("attnOut", ctypes.c_void_p),
        ("workspaceSize", ctypes.c_void_p),
        ("op", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class _Run(ctypes.Structure):
    _fields_ = (
        ("result", ctypes.c_int64),
        ("workspace", ctypes.c_void_p),
        ("workspaceSize", ctypes.c_uint64),
        ("op", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class _Destroy(ctypes.Structure):
    _fields_ = (("result", ctypes.c_int64), ("op", ctypes.c_void_p))


class _GetLastError(ctypes.Structure):
    _fields_ = (("result", ctypes.c_int64), ("text", ctypes.c_void_p), ("size", ctypes.c_uint64))


def _plan(call: Any) -> None:
    if not call.workspaceSize:
        raise Refusal(Status.ERROR_INVALID_PARAM, "workspace_size: got NULL, expected the address of a uint64_t")
    if not call.op:
        raise Refusal(Status.ERROR_INVALID_OPERATION_ADDR, "op: got NULL, expected the address of a handle")
    handle = ctypes.c_void_p.from_address(call.op)
    if handle.value:
        _operation(handle.value)
    size, operation = self_attention_prefix_encoder_get_workspace_size(
        tensor(call.query, "query"),
        tensor(call.key, "key"),
        tensor(call.value, "value"),
        tensor(call.blockTables, "block_tables"),
        optional_tensor(call.mask, "mask"),
        tensor(call.seqLen, "seq_len"),
        tensor(call.kvSeqLen, "kv_seq_len"),
        optional_tensor(call.slopes, "slopes"),
        call.maskType,
        call.headNum,
        call.kvHeadNum,
        call.qkScale,
        tensor(call.attnOut, "attn_out"),
        context(call.context),
    )
    number = handle.value or next(_handles)
    _operations[number] = operation
    ctypes.c_uint64.from_address(call.workspaceSize).value = size
    handle.value = number


def _run(call: Any) -> None:
    operation = _operation(call.op)
    needed, given = operation.workspace_size, call.workspaceSize
    if needed and not call.workspace:
        raise Refusal(
            Status.ERROR_INVALID_WORKSPACE_ADDR, f"workspace: got NULL, expected the address of {needed} bytes"
        )
    if given < needed:
        raise Refusal(
            Status.ERROR_INVALID_WORKSPACE_SIZE, f"workspace_size: got {given} bytes, expected at least {needed}"
        )
    workspace = buffer(call.workspace or 0, needed, "workspace")
    self_attention_prefix_encoder(workspace, needed, operation, context(call.context))


def _destroy(call: Any) -> None:
    _operation(call.op)
    _operations.pop(call.op, None)


def _operation(handle: int | None) -> Op:
    operation = _operations.get(handle or 0)
    if operation is None:
        got = "NULL" if not handle else f"{handle:#x}"
        raise Refusal(
            Status.ERROR_INVALID_OPERATION_ADDR,
            f"op: got {got}, expected an operation that was planned and is not destroyed",
        )
    return operation


def _get_last_error(call: Any) -> None:
    text = last_text().encode("ascii", "backslashreplace")
    call.result = len(text)
    if call.text and call.size:
        written = text[: call.size - 1] + b"\0"
        ctypes.memmove(call.text, written, len(written))


def _reporting(parameters: type[ctypes.Structure], body: Callable[[Any], None]) -> Callable[[int], None]:
    """`body`, with Exceptions turned into the C function's status; native code handles all
    others."""

    def enter(address: int) -> None:
        call: Any = parameters.from_address(address)
        try:
            body(call)
        except Exception as error:
            remember(str(error) or type(error).__name__)
            call.result = status_of(error)
        else:
            remember("")
            call.result = Status.NO_ERROR

    return enter


def interrupted(exception: type[BaseException]) -> None:
    """Note that an exception which is not the call's own ended a call of this thread."""
    remember(f"got {exception.__name__} during the call, which is raised when the thread is back in Python")


EXPORTS = (
    Export("AtbSelfAttentionPrefixEncoderGetWorkspaceSize", _Plan, _reporting(_Plan, _plan), Status.ERROR_RT_FAIL),
    Export("AtbSelfAttentionPrefixEncoder", _Run, _reporting(_Run, _run), Status.ERROR_RT_FAIL),
    Export("NumbaPrefixDestroyOperation", _Destroy, _reporting(_Destroy, _destroy), Status.ERROR_RT_FAIL),
    Export(
        "NumbaPrefixGetLastError",
        _GetLastError,
        lambda address: _get_last_error(_GetLastError.from_address(address)),
        0,
    ),
)
