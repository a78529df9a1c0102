"""Fuzz targets guided by coverage: the public call, the two-phase pair and the npz reader.

    pip install atheris
    PYTHONPATH=.:tests python tests/support/fuzz_atheris.py TARGET -max_total_time=1200 [DIRECTORY]

TARGET is one_call, two_phases or npz. Inputs start from tests/support/corpus/TARGET; new ones that
reach other code go to DIRECTORY. tests/process/test_fuzz_corpus.py replays the corpus without
atheris.
"""

from __future__ import annotations

import functools
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import atheris

    # Comes before any other import of the package. Modules of functions that Numba compiles must
    # keep their bytecode.
    _COMPILED = (
        *(
            "masks",
            "softmax",
            "tiling",
            "vocabulary",
            "cpu.call",
            "cpu.dots",
            "cpu.few",
            "cpu.jit",
            "cpu.kernel",
            "cpu.lanes",
        ),
        *("cpu.memory", "cpu.rows", "cpu.scores", "cpu.state", "cpu.vector"),
    )
    with atheris.instrument_imports(include=["numba_prefix"], exclude=[f"numba_prefix.{name}" for name in _COMPILED]):
        import numba_prefix.cpu.launch

        import numba_prefix.cli.run

import ml_dtypes
import numpy as np
from cases import DTYPES, MASK_FORMS, Case, make_case, run, same_bits, with_mask
from fuzz_npz import Reader, mutated_inside

import numba_prefix as nbp
from numba_prefix.reference.oracle import reference

CORPUS = Path(__file__).parent / "corpus"
DOCUMENTED = (TypeError, ValueError, nbp.TargetUnavailableError)
ARRAYS = ("query", "key", "value", "block_tables", "mask", "slopes")


class Bytes:
    """The part of atheris.FuzzedDataProvider that the targets use, reading the same values from the
    same bytes."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def ConsumeBytes(self, count: int) -> bytes:
        taken, self.data = self.data[:count], self.data[count:]
        return taken

    def ConsumeIntInRange(self, low: int, high: int) -> int:
        """An integer from the end of the data, from as many bytes as the range needs."""
        value, span = 0, high - low
        while span and self.data:
            value, self.data, span = value << 8 | self.data[-1], self.data[:-1], span >> 8
        return low + value % (high - low + 1)


def pick(provider: Any, choices: Any) -> Any:
    return choices[provider.ConsumeIntInRange(0, len(choices) - 1)]


SHAPES = [
    (),
    (0,),
    (4,),
    (4, 4),
    (2, 5),
    (4, 2, 8),
    (9, 4, 2, 8),
    (0, 4, 8),
    (4, 0, 8),
    (4, 2, 0),
    (256, 256),
    (128, 128),
]
OTHER_DTYPES: list[Any] = [
    *("f2", "f4", "f8", ">f2", ">i4", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "?", "c8", "O", "U3", "S2", "M8[s]", "V2"),
    *("f2,f4", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn),
]  # fmt: skip
OBJECTS: list[Any] = [
    *(None, True, 1j, "", "causal", "ALIBI", "alibi_left_align", "cpu", "cuda", "reference", "full", "shape", b"causal", object(), object),
    *(np.ndarray, {}, (), [], [[1]], [None, None], [True, False], ["3"], slice(1), ..., range(3), np.array(None)),
    *(np.float32(2), np.bool_(True), nbp.MaskType.ALIBI_COMPRESS, nbp.Context(), nbp.Context("cpu", 0), nbp.Context(7)),
]  # fmt: skip
NUMBERS = [0, -1, 1, 2, 4, 8, 9, 2**31 - 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**40, 1e-45, 3.4e38, 1e300]
VIEWS: list[Callable[[np.ndarray], Any]] = [
    *(lambda a: a, lambda a: a[::2], lambda a: a[::-1], lambda a: a.T, lambda a: a[..., :1], lambda a: a[..., ::2]),
    *(np.ma.masked_array, np.asfortranarray, list, memoryview, lambda a: a.tolist(), lambda a: a.view("u1")),
    *(lambda a: np.broadcast_to(a, (2, *a.shape)), lambda a: np.broadcast_to(a[:1], a.shape), bytearray),
    lambda a: a.reshape(*a.shape[:-2], -1), lambda a: np.frombuffer(b"\0" + a.tobytes(), "u1")[1:].view(a.dtype),
]  # fmt: skip


def anything(provider: Any, known: Any) -> Any:
    """A value for an argument that has no reason to suit it, or `known` (the right one) in another
    form."""
    kind = provider.ConsumeIntInRange(0, 6)
    if kind == 0:
        return pick(provider, OBJECTS)
    if kind == 1:
        return pick(provider, NUMBERS)
    if kind == 2:
        return [provider.ConsumeIntInRange(-2, 40) for _ in range(provider.ConsumeIntInRange(0, 4))]
    if kind == 3:
        return float(np.frombuffer(provider.ConsumeBytes(8).ljust(8, b"\0"), "f8")[0])
    if kind == 4 and isinstance(known, np.ndarray) and known.size:
        changed = known.copy()
        values = np.array([0, 1, -1, 7, 2**31 - 1, -(2**31)], "f8")
        with np.errstate(all="ignore"):
            changed.flat[provider.ConsumeIntInRange(0, known.size - 1)] = pick(provider, values.astype(known.dtype))
        return changed
    array = known
    if kind == 5 or not isinstance(known, np.ndarray):
        array = np.zeros(pick(provider, SHAPES), pick(provider, OTHER_DTYPES))
    try:
        return pick(provider, VIEWS)(array)
    except (TypeError, ValueError, IndexError):
        return array


def problem(provider: Any) -> Case:
    """A sound problem that is small enough to be judged each time."""
    q = [provider.ConsumeIntInRange(0, 5) for _ in range(provider.ConsumeIntInRange(0, 3))]
    kv = [n + provider.ConsumeIntInRange(0, 40) for n in q]
    kv_heads = provider.ConsumeIntInRange(1, 2)
    case = make_case(
        q, kv, head_num=kv_heads * provider.ConsumeIntInRange(1, 4), kv_head_num=kv_heads,
        head_size=pick(provider, (8, 16, 1, 33)), block_size=provider.ConsumeIntInRange(1, 9),
        dtype=pick(provider, list(DTYPES)), seed=provider.ConsumeIntInRange(0, 255),
    )  # fmt: skip
    return with_mask(case, pick(provider, MASK_FORMS))


def changes(provider: Any, sound: dict[str, Any], most: int = 3) -> dict[str, Any]:
    names = [pick(provider, list(sound)) for _ in range(provider.ConsumeIntInRange(0, most))]
    return {name: anything(provider, sound[name]) for name in names}


def attempt(call: Callable[[], Any]) -> Any:
    """Result of the call in a tuple, or None after a documented exception whose message names an
    argument."""
    try:
        return (call(),)
    except DOCUMENTED as error:
        if ": got " in str(error) or "workspace" in str(error):
            return None
        raise AssertionError(f"no argument is named: {error}") from error


def assert_right(case: Case, out: Any) -> None:
    """Assert a right result, within a wider budget than the house's.

    Scores are rounded to float32, here up to about 20 of them; the house's budget, which follows
    the error of a plain computation, is for more numbers than these (5.5 eps were seen where that
    erred by 0.8).
    """
    expected = reference(**case.arguments())
    allowed = 2 * float(ml_dtypes.finfo(out.dtype).eps) + 32 * float(np.finfo(np.float32).eps)
    np.testing.assert_allclose(
        out.astype(np.float64), expected, rtol=0, atol=allowed * np.abs(expected).max(initial=0.0)
    )


def one_call(provider: Any) -> None:
    """Call the operator: a right result, the same on one thread; or, with arguments changed, a
    documented exception."""
    case = problem(provider)
    rest = {"head_num": case.query.shape[1], "kv_head_num": case.key.shape[2], "out": None, "return_lse": True}
    rest |= {"target": "cpu", "num_threads": 2, "workspace": None, "stream": None, "validate": "full"}
    sound = case.arguments() | rest
    changed = changes(provider, sound)
    # With this argument the caller has checked the ids.
    if isinstance(how := changed.get("validate"), str) and how == "shape":
        changed = {"validate": "shape"}
    with np.errstate(all="ignore"):
        result = attempt(lambda: nbp.prefix_encoder(**(sound | changed)))
    assert result or changed, "refused a sound problem"
    out, lse = run(case, "cpu", num_threads=1, return_lse=True)
    assert_right(case, out)
    if result and not changed:
        same_bits(result[0][0], out)
        same_bits(result[0][1], lse)


def two_phases(provider: Any) -> None:
    """Plan, run and rebind with arguments changed; after an error an operation is bound as
    before."""
    case = problem(provider)
    out = np.full_like(case.query, np.nan)
    heads = {"head_num": case.query.shape[1], "kv_head_num": case.key.shape[2]}
    sound = case.arguments() | heads | {"attn_out": out, "context": nbp.Context("cpu", 2)}
    plan = nbp.self_attention_prefix_encoder_get_workspace_size
    with np.errstate(all="ignore"):
        changed = changes(provider, sound, 2)
        made = attempt(lambda: plan(**(sound | changed)))
        assert made or changed, "refused a sound problem"
        size, op = made[0] if made else plan(**sound)
        phase = {"workspace": bytearray(size), "workspace_size": size, "op": op, "context": None}
        changed = changes(provider, phase, 2)
        ran = attempt(lambda: nbp.self_attention_prefix_encoder(**(phase | changed)))
        assert ran or changed, "refused to run what it planned"
        size, op = plan(**sound)
        bound = {name: sound[name] for name in (*ARRAYS, "attn_out")}
        changed = changes(provider, bound, 2)
        if not attempt(lambda: op.rebind(**changed)):
            out[...] = np.nan
            nbp.self_attention_prefix_encoder(bytearray(size), size, op)
            assert_right(case, out)


@functools.cache
def reader() -> Reader:
    return Reader()


def npz(data: bytes) -> None:
    """Read the file: a documented exit code, and no traceback."""
    reader().read(data)


def from_bytes(target: Callable[[Any], None], make: Callable[[bytes], Any]) -> Callable[[bytes], None]:
    return lambda data: target(make(data))


def targets(provider: Callable[[bytes], Any]) -> dict[str, Callable[[bytes], None]]:
    """Consumers of bytes, by name. provider: atheris.FuzzedDataProvider, or Bytes."""
    return {"one_call": from_bytes(one_call, provider), "two_phases": from_bytes(two_phases, provider), "npz": npz}


def mutated_archive(data: bytes, max_size: int, seed: int) -> bytes:
    """A damaged archive: libFuzzer's own changes rarely leave one that can be read."""
    try:
        made = mutated_inside(data, random.Random(seed))
    except Exception:  # not a sound archive
        made = b""
    return made if 0 < len(made) <= max_size else bytes(atheris.Mutate(data, max_size))


def main(name: str, *options: str) -> None:
    target = targets(atheris.FuzzedDataProvider)[name]
    directory = [] if options and not options[-1].startswith("-") else [tempfile.mkdtemp(prefix="numba_prefix_fuzz_")]
    arguments = [sys.argv[0], f"-max_len={8192 if name == 'npz' else 256}", *options, *directory, str(CORPUS / name)]
    mutator = {"custom_mutator": mutated_archive} if name == "npz" else {}
    atheris.Setup(arguments, target, **mutator)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
