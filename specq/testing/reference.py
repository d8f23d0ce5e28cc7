"""Speculative decoding in textbook order, one session, one row at a time: draft, verify, accept, correct.

The rest of specq does this for many sessions at once, over sockets, without waiting. Read this file first. The
conformance suites compare with it. The rules for one position are in `specq.testing.oracle`.

- `target`: a function from token ids so far to logits f32[vocab] of the next token.
- `draft`: a function from token ids so far to a tree of guesses. `NO_TREE` is plain decoding.

Source: Leviathan et al. 2023 (arXiv 2211.17192) for chains; SpecInfer (arXiv 2305.09781) for trees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from specq.protocol import NO_TREE, Float32Array, SamplingParams, SessionStep, Tree
from specq.testing import oracle

Target = Callable[[list[int]], Float32Array]
Draft = Callable[[list[int]], Tree]


@dataclass
class Decoded:
    """A text, and the effect of speculation on it.

    - `token_ids`: the generated tokens.
    - `accepted`: the number of accepted draft tokens of each round. 0 for plain decoding.
    """

    token_ids: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


def decode(
    target: Target,
    draft: Draft,
    prompt: Sequence[int],
    num_tokens: int,
    params: SamplingParams,
    stop_ids: Sequence[int] = (),
) -> Decoded:
    """Return at most `num_tokens` tokens after a prompt.

    A token of `stop_ids` ends the text and is part of the text.
    """
    decoded = Decoded()
    accept = oracle.RULES[params.strategy]
    while not is_ended(decoded.token_ids, num_tokens, stop_ids):
        text = [*prompt, *decoded.token_ids]
        tree = draft(text)  # 1. draft: cheap guesses
        rows = verify(target, text, tree)  # 2. verify: the target's logits behind each guess; one pass in specq
        step = SessionStep(0, len(text) - 1, np.array(text[-1:], np.int32), params, tree)
        path, token_ids = accept(step, rows)  # 3. accept a path, and 4. correct: one token of the target's own
        decoded.accepted.append(len(path))
        decoded.token_ids += token_ids
    decoded.token_ids = cut(decoded.token_ids, num_tokens, stop_ids)
    return decoded


def verify(target: Target, text: list[int], tree: Tree) -> Float32Array:
    """Return f32[1 + nodes, vocab]: row 0 follows the text, row i + 1 follows node i."""
    paths: list[list[int]] = []
    for token_id, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token_id])
    rows: Float32Array = np.stack([target([*text, *path]) for path in ([], *paths)]).astype(np.float32)
    return rows


def is_ended(token_ids: Sequence[int], num_tokens: int, stop_ids: Sequence[int]) -> bool:
    """Return whether a text is complete."""
    return len(token_ids) >= num_tokens or any(token_id in stop_ids for token_id in token_ids)


def cut(token_ids: list[int], num_tokens: int, stop_ids: Sequence[int]) -> list[int]:
    """Return the tokens up to the first stop token, at most `num_tokens`. A round may give more."""
    ends = [place + 1 for place, token_id in enumerate(token_ids) if token_id in stop_ids]
    return token_ids[: min([num_tokens, *ends])]


def plain(_text: list[int]) -> Tree:
    """Draft no tokens: plain decoding."""
    return NO_TREE
