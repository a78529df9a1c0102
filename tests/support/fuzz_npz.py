"""Damaged npz files for the command line: the corpus and a mutator.

    PYTHONPATH=.:tests python tests/support/fuzz_npz.py --seconds 1200 [--seed N]

tests/support/fuzz_atheris.py has the same guided by coverage.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import sys
import tempfile
import time
import zipfile
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from cases import make_case, with_mask

CODES = (0, 1, 2)
INTERESTING = (
    b"\x00",
    b"\xff",
    b"\x7f\xff\xff\xff",
    b"\x80\x00\x00\x00",
    b"\xff" * 8,
    b"PK\x05\x06",
    b"\x93NUMPY",
    b"|O",
    b"<f8",
)
HEADERS = (
    b"<f2",
    b"<f4",
    b"<u2",
    b"<i4",
    b"<i8",
    b"|O",
    b">f2",
    b"|V2",
    b"<U4",
    b"|b1",
    b"<c8",
    b"|S0",
    b"<M8[s]",
    b"<f16",
)
NUMBERS = (b"0", b"1", b"2", b"-1", b"7", b"64", b"4294967296", b"99999999999999999999")


def corpus() -> list[bytes]:
    """Small files of each form, stored and deflated, and the beginning and the end of the package's
    sample."""
    files = []
    for index, form in enumerate(
        ("causal", "none", "alibi-generator", "alibi_sqrt-template", "alibi_left_align-heads")
    ):
        dtype = ("float16", "float32", "bfloat16")[index % 3]
        case = make_case([3, 0, 1], [9, 2, 4], head_num=4, kv_head_num=2, head_size=8, block_size=4, dtype=dtype)
        case = with_mask(case, form)
        arrays = {name: np.asarray(x) for name, x in case.arguments().items() if x is not None}
        if dtype == "bfloat16":
            arrays |= {name: arrays[name].view(np.uint16) for name in ("query", "key", "value")}
        arrays |= {"dtype": np.array(dtype), "head_num": np.array(4), "note": np.array("a text")}
        file = io.BytesIO()
        (np.savez if index % 2 else np.savez_compressed)(file, **arrays)
        files.append(file.getvalue())
    sample = resources.files("numba_prefix.cli").joinpath("data", "sample.npz").read_bytes()
    return [*files, sample[:20_000] + sample[-4_000:]]


def mutated(data: bytes, rng: random.Random) -> bytes:
    """The file with a few bytes changed, moved, cut out or put in."""
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(5):
            case 0:
                out[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                out[at : at + rng.choice([1, 4, 64])] = b""
            case 2:
                out[at:at] = rng.choice(INTERESTING)
            case 3:
                piece = rng.choice(INTERESTING)
                out[at : at + len(piece)] = piece
            case _:
                start = rng.randrange(len(out) + 1)
                out[at:at] = out[start : start + rng.choice([1, 8, 100])]
    return bytes(out[: rng.randrange(len(out) + 1)]) if rng.random() < 0.1 else bytes(out)


def mutated_inside(data: bytes, rng: random.Random) -> bytes:
    """A sound archive with members damaged, their headers changed, left out, renamed or
    exchanged."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    for _ in range(rng.choice([1, 1, 2, 3])):
        name = rng.choice(list(members))
        content = members[name]
        match rng.randrange(6):
            case 0:
                members[name] = mutated(content, rng)
            case 1:
                at = content.find(b"'descr': '") + 10
                members[name] = content[:at] + rng.choice(HEADERS) + content[content.find(b"'", at) :]
            case 2:
                at = content.find(b"(") + 1
                shape = b", ".join(rng.choice(NUMBERS) for _ in range(rng.randrange(4)))
                members[name] = content[:at] + shape + content[content.find(b")", at) :]
            case 3:
                del members[name]
                if not members:
                    return data
            case 4:
                members[name] = rng.choice(list(members.values()))
            case _:
                body = bytearray(content)
                for _ in range(rng.choice([1, 4, 40])):
                    body[rng.randrange(min(128, len(body)), len(body) + 1) :][:1] = b""
                    body[-1 - rng.randrange(max(1, len(body) - 128))] = rng.choice([0, 1, 127, 128, 255])
                members[name] = bytes(body)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


class Reader:
    """The command line in this process, on the bytes of a file."""

    def __init__(self) -> None:
        from numba_prefix.cli import run as run_command

        run_command.ENOUGH_SECONDS = 0.0  # no time is measured here
        handle, self.path = tempfile.mkstemp(suffix=".npz")
        os.close(handle)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: Any) -> None:
        os.unlink(self.path)

    def read(self, data: bytes, *options: str) -> int:
        """Exit code of `run`. Raises AssertionError for an undocumented one and for a traceback,
        and the exceptions of the command."""
        from numba_prefix.__main__ import main

        Path(self.path).write_bytes(data)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(["run", self.path, "--threads", "1", *options])
        text = err.getvalue()
        assert code in CODES, (code, text)
        assert "Traceback" not in text, text
        if code == 2:
            errors = [line for line in text.splitlines() if "error: " in line]
            assert len(errors) == 1 and not out.getvalue(), text
        return code


def fuzz(seconds: float, most: int, seed: int) -> dict[int, int]:
    """Count of each exit code; an input that breaks the reader is written beside the error's
    message."""
    files, codes, end = corpus(), dict.fromkeys(CODES, 0), time.monotonic() + seconds
    with Reader() as reader:
        for number in range(most):
            if time.monotonic() > end:
                break
            rng = random.Random(f"{seed} {number}")
            index = rng.randrange(len(files))
            is_whole = index < len(files) - 1
            data = (mutated_inside if is_whole and rng.random() < 0.75 else mutated)(files[index], rng)
            try:
                codes[reader.read(data)] += 1
            except BaseException as error:
                place = Path(tempfile.gettempdir()) / f"npz_{seed}_{number}.npz"
                place.write_bytes(data)
                raise AssertionError(
                    f"seed {seed}, number {number}, {place}: {type(error).__name__}: {error}"
                ) from error
    return codes


if __name__ == "__main__":
    options = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    print(fuzz(float(options["--seconds"]), sys.maxsize, int(options.get("--seed", "0"))))
