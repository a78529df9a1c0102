"""A WSGI application: GET /NUMBER/THREADS answers with the bytes of out and lse of problem NUMBER.
Checks nothing.

The problem was called once where this module is imported, which with gunicorn's preload is before
the workers are forked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from cases import Case, make_case, run, with_mask

FORMS = ("causal", "alibi-generator", "none", "alibi_sqrt-template")


def problem(number: int) -> Case:
    q, kv = [40 + number, 1, 7], [300 + 9 * number, 1200, 7]
    dtype = ("float16", "bfloat16", "float32")[number % 3]
    case = make_case(q, kv, head_num=8, kv_head_num=4, head_size=64, dtype=dtype, seed=number)
    return with_mask(case, FORMS[number % 4])


def answer(case: Case, threads: int) -> bytes:
    out, lse = run(case, "cpu", num_threads=threads, return_lse=True)
    return bytes(out.tobytes() + lse.tobytes())


PROBLEMS = [problem(number) for number in range(12)]
answer(PROBLEMS[0], 2)
if "HOST_HAS_PARALLEL_REGION" in os.environ:
    from hosts import bring_up

    bring_up()


def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    number, threads = map(int, environ["PATH_INFO"].strip("/").split("/"))
    body = answer(PROBLEMS[number], threads)
    start_response("200 OK", [("Content-Type", "application/octet-stream"), ("Content-Length", str(len(body)))])
    return [body]
