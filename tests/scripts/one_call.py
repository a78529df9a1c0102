"""One call in a fresh process. Prints JSON: a digest of the bits, how much Numba compiled, and with --flags what its
optimiser was allowed to assume."""

from __future__ import annotations

import gc
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numba.core import event
from numba.core.dispatcher import Dispatcher

RELAXED = re.compile(
    r"^.*\b(?:fadd|fsub|fmul|fdiv|fneg|fcmp|call|select|phi)\b.*\b(?:fast|nnan|ninf)\b.*$", re.MULTILINE
)


def flags() -> dict[str, Any]:
    """The package's dispatchers, those with fastmath options, and LLVM instructions that may assume no NaN or infinity."""
    mine = [
        x for x in gc.get_objects() if isinstance(x, Dispatcher) and x.py_func.__module__.startswith("numba_prefix")
    ]
    relaxed = [x.py_func.__name__ for x in mine if x.targetoptions.get("fastmath")]
    texts = [text for x in mine for text in x.inspect_llvm().values()]
    lines = [line.strip() for text in texts for line in RELAXED.findall(text)]
    return {"dispatchers": len(mine), "fastmath": relaxed, "llvm_bytes": sum(map(len, texts)), "lines": lines[:10]}


def main() -> None:
    options = {name: int(value) for name, value in (x.split("=") for x in sys.argv[1:] if "=" in x)}
    rng = np.random.default_rng(3)
    q = rng.standard_normal((21, 4, 24)).astype(np.float16)
    k, v = (rng.standard_normal((40, 8, 2, 24)).astype(np.float16) for _ in range(2))
    table = rng.permutation(40).astype(np.int32).reshape(2, 20)
    with event.install_recorder("numba:run_pass") as recorder:
        import numba_prefix as nbp

        arguments = (q, k, v, table, [1, 20], [150, 31])
        out, lse = nbp.prefix_encoder(*arguments, qk_scale=0.2, target="cpu", return_lse=True, **options)
    ref = nbp.reference(*arguments, qk_scale=0.2)
    result = {
        "bits": hashlib.sha256(out.tobytes() + lse.tobytes()).hexdigest(),
        "error": float(np.abs(out - ref).max()),
        "passes": len(recorder.buffer),
        "where": str(Path(nbp.__file__).parent),
    }
    print(json.dumps(result | (flags() if "--flags" in sys.argv else {})))


main()
