"""Readers of a problem from an npz file, and the writer of a result to one."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numba_prefix.cli.table import UsageError
from numba_prefix.inputs.arrays import describe
from numba_prefix.verify.testing import Inputs, bfloat16_array, stored_bits

SAMPLE = "sample.npz"
REQUIRED = ("query", "key", "value", "block_tables", "seq_len", "kv_seq_len")
ARRAYS = (*REQUIRED, "mask", "slopes")
SCALARS = ("mask_type", "qk_scale", "head_num", "kv_head_num", "dtype")
MAX_TEXT_BYTES = 4096


@dataclass(frozen=True)
class Loaded:
    name: str  # for messages
    inputs: Inputs
    texts: dict[str, str] = field(default_factory=dict)  # the file's description of itself


def load(file: str | None) -> Loaded:
    """The problem in a file, or the package's sample (None). Raises UsageError for anything wrong
    with the file."""
    if file is None:
        name = f"{SAMPLE} (comes with the package)"
        try:
            source: Any = io.BytesIO(resources.files("numba_prefix.cli").joinpath("data", SAMPLE).read_bytes())
        except OSError as error:
            raise UsageError(f"{SAMPLE}: the package's own sample cannot be read: {error}") from error
    else:
        name, source = file, file
    found, texts = _read(source, name)
    missing = [key for key in REQUIRED if key not in found]
    if missing:
        raise UsageError(f"{name}: got no {', '.join(missing)}, expected {', '.join(REQUIRED)}")
    dtype = found.pop("dtype", None)
    if dtype == "bfloat16":
        found |= {key: _bfloat16(found[key], key, name) for key in ("query", "key", "value")}
        if "mask" in found and found["mask"].dtype != np.float32:
            found["mask"] = _bfloat16(found["mask"], "mask", name)
    elif found["query"].dtype in (np.dtype(np.uint16), np.dtype("V2")):
        got = found["query"].dtype
        raise UsageError(
            f"{name}: query: got dtype {got}, expected it along with dtype='bfloat16' if that is what it is"
        )
    elif dtype is not None and str(found["query"].dtype) != dtype:
        raise UsageError(f"{name}: dtype: got {dtype!r}, expected {str(found['query'].dtype)!r}, which query has")
    return Loaded(name, Inputs(**found), texts)


def _read(source: Any, name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The arrays and scalars that are known, and short texts and numbers under any other name."""
    try:
        opened = np.load(source, allow_pickle=False)
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror or error}") from error
    # Any error of a parser means the same: the bytes are not an npz.
    except Exception as error:
        raise UsageError(f"{name}: got something else, expected an npz file") from error
    if not isinstance(opened, np.lib.npyio.NpzFile):
        raise UsageError(f"{name}: got a single array, expected an npz file")
    found: dict[str, Any] = {}
    texts: dict[str, str] = {}
    with opened:
        for key in _readable(opened):
            is_known = key in ARRAYS or key in SCALARS
            try:
                array = opened[key]
                if not isinstance(array, np.ndarray):
                    raise ValueError("not an array")
            except Exception as error:  # damaged, encrypted, pickled, too large, …
                if is_known:
                    raise UsageError(f"{name}: {key} cannot be read: {error}") from error
                continue
            if key in SCALARS:
                found[key] = _scalar(array, key, name)
            elif is_known:
                found[key] = array
            elif array.dtype.kind in "Uiuf" and array.size == 1:
                texts[key] = str(_item(array))
    return found, texts


def _readable(opened: np.lib.npyio.NpzFile) -> Iterator[str]:
    """The known keys, and others that are small enough to show on a line."""
    entries = opened.zip.infolist() if opened.zip is not None else []
    sizes = {entry.filename.removesuffix(".npy"): entry.file_size for entry in entries}
    return (k for k in opened.files if k in ARRAYS or k in SCALARS or sizes.get(k, 0) <= MAX_TEXT_BYTES)


def _item(array: NDArray[Any]) -> Any:
    """The only element. NumPy makes a text of any 32-bit numbers, on which the interpreter raises
    an error: invalid ones are replaced."""
    if array.dtype.kind == "U" and array.dtype.itemsize:
        native = np.ascontiguousarray(array.reshape(1)).astype(array.dtype.newbyteorder("="))
        codes = native.view(np.uint32).tolist()
        return "".join(chr(code) if code <= sys.maxunicode else "?" for code in codes).rstrip("\0")
    return array.reshape(()).item()


def _scalar(array: NDArray[Any], key: str, name: str) -> Any:
    if array.size != 1:
        raise UsageError(f"{name}: {key}: got shape {array.shape}, expected one value")
    value = _item(array)
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value


def _bfloat16(array: NDArray[Any], key: str, name: str) -> Any:
    """The array as bfloat16: NumPy stores ml_dtypes.bfloat16 as two bytes without a type."""
    if array.dtype not in (np.dtype(np.uint16), np.dtype("V2")):
        raise UsageError(f"{name}: {key}: got dtype {array.dtype}, expected uint16 with dtype='bfloat16'")
    return bfloat16_array(np.ascontiguousarray(array).view(np.uint16), key)


def check_writable(file: str, source: str | None, force: bool) -> None:
    """Raise UsageError where a result must not, or cannot, be written."""
    path = Path(file)
    if path.exists():
        if path.is_dir():
            raise UsageError(f"--out: got {file}, a directory, expected a file")
        if source is not None and os.path.samefile(path, source):
            raise UsageError(f"--out: got {file}, which is the input, expected another file")
        if not force:
            raise UsageError(f"--out: got {file}, which exists, expected a new file (or --force)")
    elif not path.parent.is_dir():
        raise UsageError(f"--out: got {file}, expected a directory that exists")


def save(file: str, out: Any, lse: NDArray[np.float32], force: bool) -> None:
    """Write out (bfloat16 as uint16, with dtype="bfloat16") and lse. Raises UsageError if that
    fails."""
    t = describe(out, "out")
    values = stored_bits(out) if t.dtype == "bfloat16" else np.asarray(out)
    try:
        with open(file, "wb" if force else "xb") as stream:
            np.savez(stream, out=values, lse=lse, dtype=np.array(t.dtype))
    except OSError as error:
        raise UsageError(f"--out: cannot write {file}: {error.strerror or error}") from error
