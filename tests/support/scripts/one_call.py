"""One call in a fresh process. Prints JSON: a digest of the bits, how much Numba compiled and, with
--flags, what its optimiser was allowed to assume.

--interrupt: Ctrl-C again and again until a first call, not counted, comes to its end.
layers=NAME,…: for each, a child is forked whose host has a parallel region under that layer before
the same call.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from interrupting import interrupted_until_done

RELAXED = re.compile(
    r"^.*\b(?:fadd|fsub|fmul|fdiv|fneg|fcmp|call|select|phi)\b.*\b(?:fast|nnan|ninf)\b.*$", re.MULTILINE
)


def flags() -> dict[str, Any]:
    """The package's dispatchers, those with fastmath options, and LLVM instructions that may assume
    no NaN or infinity."""
    from numba.core.dispatcher import Dispatcher

    mine = [
        x for x in gc.get_objects() if isinstance(x, Dispatcher) and x.py_func.__module__.startswith("numba_prefix")
    ]
    relaxed = [x.py_func.__name__ for x in mine if x.targetoptions.get("fastmath")]
    texts = [text for x in mine for text in x.inspect_llvm().values()]
    lines = [line.strip() for text in texts for line in RELAXED.findall(text)]
    return {"dispatchers": len(mine), "fastmath": relaxed, "llvm_bytes": sum(map(len, texts)), "lines": lines[:10]}


def in_child(layer: str, call: Callable[[], Any], expected: np.ndarray) -> int:
    """Exit status of a forked child that runs the call."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            import numba

            if layer != "any":
                os.environ["NUMBA_THREADING_LAYER"] = numba.config.THREADING_LAYER = layer
            from hosts import bring_up

            bring_up()
            status = 0 if call()[0].tobytes() == expected.tobytes() else 2
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    given = dict(x.split("=") for x in sys.argv[1:] if "=" in x)
    layers = [layer for layer in given.pop("layers", "").split(",") if layer]
    options = {name: int(value) for name, value in given.items()}
    rng = np.random.default_rng(3)
    q = rng.standard_normal((21, 4, 24)).astype(np.float16)
    k, v = (rng.standard_normal((40, 8, 2, 24)).astype(np.float16) for _ in range(2))
    table = rng.permutation(40).astype(np.int32).reshape(2, 20)
    import numba_prefix as nbp

    arguments = (q, k, v, table, [1, 20], [150, 31])

    def call() -> Any:
        return nbp.prefix_encoder(*arguments, qk_scale=0.2, target="cpu", return_lse=True, **options)

    interrupted = interrupted_until_done(call)[1] if "--interrupt" in sys.argv else 0
    from numba.core import event

    with event.install_recorder("numba:run_pass") as recorder:
        out, lse = call()
    ref = nbp.reference(*arguments, qk_scale=0.2)
    result = {
        "bits": hashlib.sha256(out.tobytes() + lse.tobytes()).hexdigest(),
        "error": float(np.abs(out - ref).max()),
        "passes": len(recorder.buffer),
        "where": str(Path(nbp.__file__).parent),
        "interrupted": interrupted,
        "layers": {layer: in_child(layer, call, out) for layer in layers},
    }
    print(json.dumps(result | (flags() if "--flags" in sys.argv else {})))


main()
