"""A toy pair of real checkpoints whose next-token laws are known exactly, and the tests that long texts are held
against.

The target's logits are a table: they depend on the last token alone, or, in the memoryless block of the vocabulary, on
nothing at all. A text never leaves the block that its prompt ends in, so that one process serves both:

    MEMORYLESS  one law at every position: thousands of draws from it, which must be independent of each other
    MARKOV      a law for each last token: a residual or bonus taken from another row's law shows
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from specq.protocol import Float32Array, Float64Array, Int64Array

VOCAB = 32
MEMORYLESS = slice(0, 8)
MARKOV = slice(8, 20)
MAX_LENGTH = 16_384
NEVER = -40.0  # the logit of what does not occur
FEWEST = 8.0  # expected count of a cell of a chi-square test; rarer ones are taken together

WIDTH = 40  # of the checkpoints
MLP = HEAD = 16

BAD_RANKS = (1, 7, 3, 0, 5, 2, 6, 4, 8, 9, 10, 11)  # what the bad draft makes of the target's first choice, second ..


# --- checkpoints --------------------------------------------------------------------------------------------------


def target_logits() -> Float64Array:
    """Return f64[VOCAB, VOCAB]: the logits of the next token (column) after the last (row)."""
    table = np.full((VOCAB, VOCAB), NEVER)
    table[MEMORYLESS, MEMORYLESS] = -0.65 * np.arange(8)
    table[MARKOV, MARKOV] = np.random.default_rng(5).normal(0, 1.5, (12, 12))
    return table


def good_logits() -> Float64Array:
    """Return a draft's table that is nearly the target's."""
    table = target_logits()
    return np.where(table == NEVER, NEVER, table + np.random.default_rng(6).normal(0, 0.3, table.shape))


def bad_logits() -> Float64Array:
    """Return a draft's table with the target's own numbers in another order: it is as sure, and mostly of something
    else.

    The order is one in which elder siblings are often rejected and younger ones are what the target likes, so that
    judging these by a wrong law shows: not to renormalise after three draws moves 0.2 of the mass.
    """
    table = target_logits()
    for block in (MEMORYLESS, MARKOV):
        rows = table[block, block]  # a view
        ranks = np.argsort(np.argsort(-rows, axis=1), axis=1)
        rows[:] = np.take_along_axis(-np.sort(-rows, axis=1), np.array(BAD_RANKS)[ranks], 1)
    return table


def write_checkpoint(directory: Path, table: Float64Array) -> str:
    """Write a Llama whose logits after token i are row i of the table, and a tokenizer of VOCAB words; return its
    place.

    Token i is embedded as a unit vector of its own; attention and MLP add nothing; the head reads
    the row off. All sums have one term but zeros, so that logits do not depend on the batch, for any engine.
    """
    directory.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", "vocab_size": VOCAB,
        "hidden_size": WIDTH, "intermediate_size": MLP, "num_hidden_layers": 1, "num_attention_heads": 1,
        "num_key_value_heads": 1, "head_dim": HEAD, "max_position_embeddings": MAX_LENGTH, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    save_file(_weights(table), directory / "model.safetensors", {"format": "pt"})
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    return str(directory)


def _weights(table: Float64Array) -> dict[str, Float32Array]:
    rng = np.random.default_rng(0)
    shapes = {"mlp.gate_proj": (MLP, WIDTH), "mlp.up_proj": (MLP, WIDTH)}
    shapes |= {f"self_attn.{name}_proj": (HEAD, WIDTH) for name in "qkv"}
    weights = {name: rng.normal(0, 0.1, shape) for name, shape in shapes.items()}
    weights |= {"self_attn.o_proj": np.zeros((WIDTH, HEAD)), "mlp.down_proj": np.zeros((WIDTH, MLP))}
    weights |= {name: np.ones(WIDTH) for name in ("input_layernorm", "post_attention_layernorm")}
    head = np.zeros((VOCAB, WIDTH))
    head[:, :VOCAB] = table.T / WIDTH**0.5  # the norm makes a unit vector as long as sqrt(WIDTH)
    named = {f"model.layers.0.{name}.weight": value for name, value in weights.items()}
    named |= {"model.embed_tokens.weight": np.eye(VOCAB, WIDTH), "model.norm.weight": np.ones(WIDTH)}
    return {name: value.astype(np.float32) for name, value in (named | {"lm_head.weight": head}).items()}


# --- laws ---------------------------------------------------------------------------------------------------------


def exact_distributions(table: Float64Array, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Float64Array:
    """Return the law of each row of logits f64[n, VOCAB] after temperature, top-k and top-p, by sorting."""
    return np.stack([_exact_distribution(logits, temperature, top_k or VOCAB, top_p) for logits in table])


def _exact_distribution(logits: Float64Array, temperature: float, top_k: int, top_p: float) -> Float64Array:
    order = np.argsort(-logits, kind="stable")
    probs = np.exp((logits[order] - logits[order[0]]) / temperature)
    probs[top_k:] = 0
    probs /= probs.sum()
    before = np.cumsum(probs) - probs  # the mass of all likelier tokens
    probs[before >= top_p] = 0
    distribution = np.zeros(VOCAB)
    distribution[order] = probs / probs.sum()
    return distribution


def leaked(distributions: Float64Array, draft_distributions: Float64Array, distance: float) -> Float64Array:
    """Return laws f64[n, VOCAB] so far (total variation, each) from `laws` towards a draft's: of a judge that lets too
    much through. Rows in which the two are equal stay."""
    apart = np.abs(distributions - draft_distributions).sum(1, keepdims=True) / 2
    return distributions + (draft_distributions - distributions) * np.divide(
        distance, apart, out=np.zeros_like(apart), where=apart > 0
    )


# --- tests --------------------------------------------------------------------------------------------------------


def distribution_p_value(texts: Sequence[Sequence[int]], distribution: Float64Array) -> float:
    """Return the p-value of all tokens against one law f64[VOCAB] (Pearson's chi-square test)."""
    tokens = np.concatenate([np.asarray(text) for text in texts])
    return _p_value([(np.bincount(tokens, minlength=VOCAB), distribution)])


def transition_p_value(prompt: Sequence[int], texts: Sequence[Sequence[int]], distributions: Float64Array) -> float:
    """Return the p-value of each token against laws f64[VOCAB, VOCAB] of what follows the token before it.

    Under the laws the counts that follow each token are asymptotically those of independent draws, though pairs overlap
    (Billingsley 1961, "Statistical methods in Markov chains"). With equal laws this is a test of independence as well.
    """
    counts = np.zeros((VOCAB, VOCAB), np.int64)
    for text in texts:
        path = np.asarray([prompt[-1], *text])
        np.add.at(counts, (path[:-1], path[1:]), 1)
    return _p_value([(row, distribution) for row, distribution in zip(counts, distributions, strict=True) if row.any()])


def _p_value(rows: Sequence[tuple[Int64Array, Float64Array]]) -> float:
    """Return the p-value of several rows of counts against a law each; impossible tokens that occur give 0."""
    statistic, freedom = 0.0, 0
    for counts, distribution in rows:
        if counts[distribution < 1e-12].any():
            return 0.0
        observed, expected = _cells(counts, distribution * counts.sum())
        statistic += float(((observed - expected) ** 2 / expected).sum())
        freedom += len(observed) - 1
    return _chi_square_tail(statistic, freedom)


def _chi_square_tail(statistic: float, freedom: int) -> float:
    """Return the chance that chi-square of so many degrees of freedom is larger: Q(freedom / 2, statistic / 2), by
    Q(a + 1, x) = Q(a, x) + x^a e^-x / Gamma(a + 1)."""
    x, a = statistic / 2, 0.5 if freedom % 2 else 1.0
    tail = math.erfc(math.sqrt(x)) if freedom % 2 else math.exp(-x)
    while a < freedom / 2:
        tail += math.exp(a * math.log(x) - x - math.lgamma(a + 1)) if x > 0 else 0.0
        a += 1
    return tail


def _cells(counts: Int64Array, expected: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Return (observed, expected) counts; all rare tokens are one cell, of which the rarest of the others is part if
    they are too few together."""
    order = np.argsort(-expected)
    counts, expected = counts[order].astype(float), expected[order]
    num_own = int((expected >= FEWEST).sum())
    if expected[num_own:].sum() < FEWEST:
        num_own = max(num_own - 1, 0)
    rest = slice(num_own, None)
    return np.append(counts[:num_own], counts[rest].sum()), np.append(expected[:num_own], expected[rest].sum())
