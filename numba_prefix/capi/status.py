"""Status codes that C callers get, and the text that goes with them."""

from __future__ import annotations

import re
import threading
from enum import IntEnum

from numba_prefix.inputs.errors import TargetUnavailableError


class Status(IntEnum):
    """The members of ATB's ErrorType (atb/types.h) that occur, with its numbers."""

    NO_ERROR = 0
    ERROR_INVALID_PARAM = 1
    ERROR_INTERNAL_ERROR = 3
    ERROR_RT_FAIL = 4
    ERROR_INVALID_TENSOR_DTYPE = 6
    ERROR_INVALID_TENSOR_DIM = 8
    ERROR_INVALID_TENSOR_SIZE = 9
    ERROR_INVALID_TENSOR_ADDR = 14
    ERROR_INVALID_TENSOR_DIM_NUM = 16
    ERROR_INVALID_WORKSPACE_SIZE = 22
    ERROR_INVALID_WORKSPACE_ADDR = 23
    ERROR_INVALID_OPERATION_ADDR = 24
    ERROR_OUT_OF_HOST_MEMORY = 27


class Refusal(ValueError):
    """An error that only C callers can make, and its status."""

    def __init__(self, status: Status, text: str) -> None:
        super().__init__(text)
        self.status = status


# The beginning of every message about an argument in this package.
_ABOUT_AN_ARGUMENT = re.compile(r"\w+: got (dtype|shape)?")
_OF_TENSORS = {"dtype": Status.ERROR_INVALID_TENSOR_DTYPE, "shape": Status.ERROR_INVALID_TENSOR_DIM}


def status_of(error: Exception) -> Status:
    if isinstance(error, Refusal):
        return error.status
    if isinstance(error, (TypeError, ValueError)):
        about = _ABOUT_AN_ARGUMENT.match(str(error))
        if about is not None:
            return _OF_TENSORS.get(about[1], Status.ERROR_INVALID_PARAM)
    if isinstance(error, MemoryError):
        return Status.ERROR_OUT_OF_HOST_MEMORY
    if isinstance(error, TargetUnavailableError):
        return Status.ERROR_RT_FAIL
    return Status.ERROR_INTERNAL_ERROR


# Keyed by thread ident instead of a threading.local: a thread that Python did not start has no
# state there between its calls. Later threads reuse idents, so few texts are ever needed; those of
# the oldest failures go first.
_texts: dict[int, str] = {}
MOST_TEXTS = 4096


def remember(text: str) -> None:
    """Store the outcome of the calling thread's last call: an error's text, or "" for success."""
    me = threading.get_ident()
    _texts.pop(me, None)
    if text:
        _texts[me] = text
        if len(_texts) > MOST_TEXTS:
            for oldest in list(_texts)[: MOST_TEXTS // 2]:
                _texts.pop(oldest, None)


def last_text() -> str:
    return _texts.get(threading.get_ident(), "")
