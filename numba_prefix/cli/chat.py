"""`chat-demo`: a language model answers requests that share the blocks of one long system
prompt."""

from __future__ import annotations

import argparse
import contextlib
import io
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from numba_prefix.cli import table
from numba_prefix.cli.table import UsageError

PAGE_SIZE = 32
NUM_PAGES = 96

SYSTEM = """You are the helper of the Lindenhof mountain railway. Answer in one short sentence, and only from these facts.
The railway climbs from Lindau valley station, at 612 metres, to Hornspitz summit station, at 2,140 metres, in 38 minutes,
with a stop at Mittelalp after 17 minutes. The first train up leaves the valley at 6:40 in summer and at 8:10 in winter; the
last train down leaves the summit at 19:30 in summer and at 16:45 in winter. Trains run every half hour. A return ticket to
the summit costs 34 francs, to Mittelalp 18 francs; children under six travel free, children up to sixteen pay half. Dogs need
a ticket of 5 francs and stay on a lead. Bicycles are carried on the first and the last train of the day only, for 8 francs.
Skis, sledges and pushchairs are carried at no charge. The line was opened in 1907 and electrified in 1931; its steepest part
rises 48 metres in a hundred. There is a restaurant at the summit, open from nine to five, and a fountain with drinking water
at Mittelalp. In strong wind, above 75 kilometres an hour, trains end at Mittelalp, and half of the fare is paid back at the
counter in the valley. Found things are kept at the counter for thirty days. Groups of ten or more book a day ahead."""

QUESTIONS = (
    "How long does the ride to the summit take?",
    "What does a return ticket to Mittelalp cost?",
    "May I bring my bicycle?",
    "When was the line opened?",
    "What happens in strong wind?",
    "When does the last train down leave in winter?",
)


@dataclass(frozen=True, slots=True)
class Session:
    """The answers to all requests, one system prompt in each, and their cost."""

    answers: list[list[int]]
    prompt_tokens: int  # of all requests
    # Those put through the network: keys and values of the others were found in the cache.
    computed_tokens: int
    plans: int
    layer_runs: int
    seconds: float


def command(arguments: argparse.Namespace) -> int:
    try:
        tokenizer, model = _load(arguments)
    except ImportError as error:
        raise UsageError(f"{error}: pip install 'numba_prefix[transformers]' brings what the demo needs") from error
    prompts = [_prompt(tokenizer, question) for question in QUESTIONS]
    with table.slow("answering"):
        shared = _answer(model, prompts, arguments.max_new_tokens, is_shared=True)
    with table.slow("answering again, without sharing pages"):
        alone = _answer(model, prompts, arguments.max_new_tokens, is_shared=False)
    report = {
        "command": "chat-demo",
        "dtype": arguments.dtype,
        "requests": [
            {
                "question": question,
                "prompt_tokens": len(prompt),
                "tokens": answer,
                "answer": tokenizer.decode(answer, skip_special_tokens=True),
            }
            for question, prompt, answer in zip(QUESTIONS, prompts, shared.answers, strict=True)
        ],
        "shared": asdict(shared),
        "alone": asdict(alone),
        "ok": shared.answers == alone.answers,
    }
    if arguments.json:
        table.emit_json(report)
    else:
        table.emit(_text(report))
    return 0 if report["ok"] else 1


def _load(arguments: argparse.Namespace) -> tuple[Any, Any]:
    from numba_prefix.integrations.transformers import register
    from numba_prefix.integrations.transformers.gguf import HOW_TO_GET, installed_model, load

    path = Path(arguments.model) if arguments.model else installed_model()
    if path is None:
        raise UsageError(f"no model: {HOW_TO_GET}")
    register()
    with table.slow("loading the model"), contextlib.redirect_stderr(io.StringIO()):
        try:
            return load(path, arguments.dtype)
        except ImportError:
            raise
        except Exception as error:  # a damaged file fails in many ways
            raise UsageError(f"{path}: {error}") from error


def _prompt(tokenizer: Any, question: str) -> list[int]:
    turns = [{"role": "system", "content": " ".join(SYSTEM.split())}, {"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _answer(model: Any, prompts: list[list[int]], max_new_tokens: int, *, is_shared: bool) -> Session:
    """Answer the first request alone, then the others together."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    from numba_prefix.integrations.transformers import counts

    generation = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=model.generation_config.eos_token_id
    )
    config = ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=NUM_PAGES,
        max_batch_tokens=512,
        max_requests_per_batch=8,
        allow_block_sharing=is_shared,
    )
    before, began = counts(), time.perf_counter()
    answers: dict[str, list[int]] = {}
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config, warmup=False
    ) as manager:
        for first, last in ((0, 1), (1, len(prompts))):
            for i in range(first, last):
                manager.add_request(prompts[i], request_id=str(i), max_new_tokens=max_new_tokens)
            while len(answers) < last:
                output = manager.get_result(timeout=1.0)
                if output is None:
                    if not manager.is_running():
                        raise RuntimeError("continuous batching ended early")
                    continue
                if output.error is not None:
                    raise RuntimeError(output.error)
                answers[output.request_id] = output.generated_tokens
    elapsed, after = time.perf_counter() - began, counts()
    listed = [answers[str(i)] for i in range(len(prompts))]
    # A request's first token comes from its prompt.
    decoded = sum(len(tokens) - 1 for tokens in listed)
    return Session(
        listed,
        sum(map(len, prompts)),
        after.query_tokens - before.query_tokens - decoded,
        after.plans - before.plans,
        after.runs - before.runs,
        elapsed,
    )


def _text(report: dict[str, Any]) -> str:
    shared, alone = report["shared"], report["alone"]
    rows = [
        (request["question"], str(request["prompt_tokens"]), " ".join(request["answer"].split()))
        for request in report["requests"]
    ]
    saved = shared["prompt_tokens"] - shared["computed_tokens"]
    summary = [
        ("prompt tokens", f"{shared['prompt_tokens']} in {len(rows)} requests"),
        ("computed", f"{shared['computed_tokens']}: {saved} ({saved / shared['prompt_tokens']:.0%}) were found in shared pages"),
        ("without sharing", f"{alone['computed_tokens']} computed, {table.seconds(alone['seconds'])}; "
                            f"with it {table.seconds(shared['seconds'])}"),
        ("attention", f"{shared['layer_runs']} layers run on {shared['plans']} plans"),
        ("same tokens", "yes" if report["ok"] else "NO"),
    ]  # fmt: skip
    return table.columns(("question", "tokens", "answer"), rows) + "\n\n" + table.pairs(summary)
