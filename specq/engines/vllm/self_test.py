"""Check that drafts do not change the text. It runs at the start of a vLLM version that was not tested.

A few sessions decode greedily, first without drafts, then with drafts. These are right, wrong, or right at first and
then wrong. If the two likeliest tokens are nearly equally likely, rounding may choose either. No other difference is
allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from specq.engines.interface import Engine
from specq.protocol import NO_TREE, EngineError, Int32Array, SamplingParams, SessionStep, Tree

CONTEXTS = (5, 17, 33)  # tokens; none is a whole number of blocks
NUM_TOKENS = 12
DEPTH = 4  # of a draft
NUM_RIGHT = (DEPTH, 0, 2)  # right tokens of a draft: all, none, or the first ones
NEAR_TIE = 0.5  # nats between the two likeliest tokens
WITH_RUNNER_UP = SamplingParams(logprobs=2)


@dataclass(slots=True)
class _Decoded:
    """The tokens of a session. If requested, also the token that was nearly as likely at each place, -1: none."""

    prompt: Int32Array
    said: list[int] = field(default_factory=list)
    near_ties: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_accepted: int = 0


def check_drafts(engine: Engine, most_sessions: int) -> None:
    """Raise EngineError if drafts change the engine's text, or if right drafts are never accepted."""
    random = np.random.default_rng(0)
    prompts = [random.integers(0, engine.info.num_tokens, n, np.int32) for n in CONTEXTS[:most_sessions]]
    plain = _decode(engine, prompts, WITH_RUNNER_UP, lambda _session, _num_said: NO_TREE)

    def draft(session: int, num_said: int) -> Tree:
        right = np.array(plain[session].said[num_said:][:DEPTH], np.int32)
        num_right = NUM_RIGHT[(session + num_said) % len(NUM_RIGHT)]
        wrong = (right[num_right:] + 1) % engine.info.num_tokens
        return _chain(np.concatenate([right[:num_right], wrong]))

    drafted = _decode(engine, prompts, SamplingParams(), draft)
    for expected, found in zip(plain, drafted, strict=True):
        _compare(expected, found)
    if not sum(text.num_accepted for text in drafted):
        raise EngineError("correct drafts are rejected")


def _decode(
    engine: Engine, prompts: Sequence[Int32Array], params: SamplingParams, draft: Callable[[int, int], Tree]
) -> list[_Decoded]:
    """Return the continuations of the prompts. `draft` returns a chain for a session and its number of tokens."""
    texts = [_Decoded(prompt) for prompt in prompts]
    try:
        for i, text in enumerate(texts):
            text.num_computed = engine.open(-1 - i, text.prompt)  # real sessions have ids >= 0
        while growing := {-1 - i: text for i, text in enumerate(texts) if len(text.said) < NUM_TOKENS}:
            steps = [_step(i, text, params, draft(-1 - i, len(text.said))) for i, text in growing.items()]
            for step, judgement in zip(steps, engine.step(steps).judgements, strict=True):
                text = growing[step.session_id]
                text.num_computed += len(step.token_ids) + len(judgement.path)
                text.num_accepted += len(judgement.path)
                text.said += judgement.token_ids.tolist()
                if judgement.logprobs is not None:
                    best, next_best = judgement.logprobs.top.T
                    runners_up = judgement.logprobs.top_ids[:, 1]
                    text.near_ties += np.where(best - next_best < NEAR_TIE, runners_up, -1).tolist()
    finally:
        for i in range(len(texts)):
            engine.close(-1 - i)
    return texts


def _step(session_id: int, text: _Decoded, params: SamplingParams, tree: Tree) -> SessionStep:
    tokens = np.concatenate([text.prompt, np.array(text.said, np.int32)])[text.num_computed :]
    return SessionStep(session_id, text.num_computed, tokens, params, tree)


def _chain(token_ids: Int32Array) -> Tree:
    count = len(token_ids)
    return Tree(token_ids, np.arange(count, dtype=np.int32) - 1, np.zeros(count, np.float32))


def _compare(expected: _Decoded, found: _Decoded) -> None:
    """Raise EngineError unless both texts are the same up to a near tie."""
    for place, (right, other) in enumerate(zip(expected.said, found.said, strict=False)):
        if right != other:
            if other != expected.near_ties[place]:
                raise EngineError(f"with drafts, token {place + 1} is {other} and not {right}")
            return
