"""How far integer arithmetic is from exact arithmetic on the same GGUF file, beside llama.cpp if that is installed.

Each prompt's tokens are computed at once. At each position: KL(exact, other) of the next token's distribution in nats,
and whether both have the same best token. The standard error is that of prompts, since their positions are alike.

    python bench/__main__.py bench.integer_quality MODEL.gguf [--tokens 3000]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.rivals.llama import is_installed
from specq.engines.native import EXACT, INTEGER, RowPacker, load
from specq.protocol import Float32Array
from specq.samples import DATA, codec_of, files_of, load_prompts, shipped

Logits = Callable[[list[int]], Float32Array]
LONGEST = 400  # tokens of a prompt


def native_logits(path: Path, arithmetic: str) -> Logits:
    """Return the native engine's logits of all positions of a text, on the file's exact values."""
    forward = load(str(path), dtype="float32", kv_slots=LONGEST, arithmetic=arithmetic).forward

    def logits(token_ids: list[int]) -> Float32Array:
        packer = RowPacker()
        packer.add_session(np.arange(LONGEST, dtype=np.int32))
        for position, token_id in enumerate(token_ids):
            packer.add_chain([token_id], [position], position, judged=True)
        return np.asarray(forward(packer.pack()).logits)

    return logits


def llama_logits(path: Path) -> Logits:
    """Return llama.cpp's logits of all positions of a text."""
    from llama_cpp import Llama

    model = Llama(str(path), n_ctx=LONGEST, n_batch=LONGEST, logits_all=True, verbose=False)

    def logits(token_ids: list[int]) -> Float32Array:
        model.reset()
        model.eval(token_ids)
        return np.array(model.scores[: len(token_ids)], np.float32)

    return logits


def log_softmax(logits: Float32Array) -> npt.NDArray[np.float64]:
    shifted: npt.NDArray[np.float64] = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    found: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return found


def texts(path: Path, num_tokens: int) -> Iterator[list[int]]:
    """Yield prompts of the three bundled data sets until they have this many tokens."""
    prompts = load_prompts((*shipped(), *files_of(DATA / "chat")), 40, codec_of(str(path)))
    order = np.random.default_rng(0).permutation(len(prompts))
    for i in order:
        if num_tokens <= 0:
            return
        yield list(prompts[i].token_ids)[:LONGEST]
        num_tokens -= len(prompts[i].token_ids[:LONGEST])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=3000)
    asked = parser.parse_args()
    exact = native_logits(asked.model, EXACT)
    others: dict[str, Logits] = {"integer": native_logits(asked.model, INTEGER)}
    if is_installed():
        others["llama.cpp"] = llama_logits(asked.model)
    found: dict[str, list[tuple[int, float, int]]] = {name: [] for name in others}
    for token_ids in texts(asked.model, asked.tokens):
        expected = log_softmax(exact(token_ids))
        for name, logits in others.items():
            other = log_softmax(logits(token_ids))
            divergence = (np.exp(expected) * (expected - other)).sum(-1)
            same = (expected.argmax(-1) == other.argmax(-1)).sum()
            found[name].append((len(token_ids), float(divergence.sum()), int(same)))
    for name, rows in found.items():
        sizes, sums, same = (np.array(column, np.float64) for column in zip(*rows, strict=True))
        mean, total = sums.sum() / sizes.sum(), sizes.sum()
        error = np.sqrt((((sums - mean * sizes) ** 2).sum()) / (len(sizes) - 1) * len(sizes)) / total
        sys.stdout.write(
            f"{name:10} KL {mean:.5f} +- {error:.5f}, same best token {same.sum() / total:.4f}, {total:.0f} tokens\n"
        )


if __name__ == "__main__":
    main()
