"""Subnormal numbers where some threads flush them to zero, as libraries built with -ffast-math make
them do.

A call has the mode of the thread that makes it, whichever threads help and started the helpers.
"""

from __future__ import annotations

import threading

import torch
from cases import make_case, run, same_bits

# Values so small that every output is subnormal; enough work for helpers.
CASE = make_case([200, 200], [400, 400], head_num=8, head_size=64, value=lambda b, j, h, c: 1e-40 * (1 + (j + c) % 7))


def same_with_helpers(what: str) -> None:
    alone = run(CASE, "cpu", num_threads=1)
    for attempt in range(8):
        try:
            same_bits(run(CASE, "cpu", num_threads=2), alone)
        except AssertionError:
            raise AssertionError(f"{what}: the bits of call {attempt} depend on the number of threads") from None


def in_thread(work: object, *arguments: object) -> None:
    errors: list[BaseException] = []

    def body() -> None:
        try:
            work(*arguments)  # type: ignore[operator]
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def flushing() -> None:
    assert torch.set_flush_denormal(True)
    same_with_helpers("a thread that flushes, helpers that it started")


def main() -> None:
    assert run(CASE, "cpu", num_threads=1).max() > 0
    in_thread(flushing)
    same_with_helpers("an ordinary thread, helpers started by one that flushes")
