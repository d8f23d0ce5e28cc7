"""The conformance suite of engines with masks: which tokens a row may have (`specq.verification.TokenMasks`)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import pytest

from specq.engines import Engine, takes_masks
from specq.protocol import NO_TREE, Float32Array, Int32Array, SamplingParams, SessionStep, StepOutput, Tree
from specq.testing.reference import Target, decode, plain
from specq.verification import JudgedSteps, MaskedSteps, StepBatch, TokenMasks

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=11)
LENGTH = 12


def is_allowed(position: int, token_ids: Int32Array) -> np.ndarray:
    """Return which tokens may come at a position."""
    found: np.ndarray = (token_ids + position) % 3 == 0
    return found


class ByPosition(TokenMasks):
    """Masks by the positions of tokens, for some sessions. `nothing`: sessions for which no token is allowed."""

    def __init__(self, vocab: int, session_ids: Collection[int], nothing: Collection[int] = ()) -> None:
        self._vocab, self._session_ids, self._nothing = vocab, session_ids, nothing

    def of(self, judged: JudgedSteps) -> MaskedSteps:
        """See `TokenMasks`."""
        found = {}
        for i, step in enumerate(judged):
            if step.session_id in self._session_ids:
                positions = [step.base_len, *(step.base_len + depth for depth in step.tree.depths().tolist())]
                words = [self._words(at) for at in positions]
                found[i] = np.stack(words) * np.int32(step.session_id not in self._nothing)
        return MaskedSteps.of(found)

    def _words(self, position: int) -> Int32Array:
        bits = np.zeros(-(-self._vocab // 32) * 32, np.bool_)
        bits[: self._vocab] = is_allowed(position, np.arange(self._vocab, dtype=np.int32))
        return np.packbits(bits, bitorder="little").view(np.int32)


def masked(target: Target) -> Target:
    """Return a target that follows these masks from the end of the prompt on."""

    def logits(token_ids: list[int]) -> Float32Array:
        found = np.array(target(token_ids), np.float32)
        tokens = np.arange(len(found), dtype=np.int32)
        return np.where(is_allowed(len(token_ids), tokens), found, np.float32(-np.inf))

    return logits


def run(engine: Engine, steps: Sequence[SessionStep], masks: TokenMasks) -> StepOutput:
    """Run a step with masks."""
    batch = StepBatch.of(steps)
    batch.masks = masks
    return engine.step(batch)


def text_of(engine: Engine, session_id: int, params: SamplingParams, right: Sequence[int] = ()) -> list[int]:
    """Return what a session with masks says. `right`: its text, which is drafted with wrong tokens among it."""
    text = list(PROMPT)
    masks = ByPosition(engine.info.vocab_size, [session_id])
    start = engine.open(session_id, np.array(text, np.int32))
    while len(text) < len(PROMPT) + LENGTH:
        drafted = list(right[len(text) - len(PROMPT) :][:3])
        if len(text) % 4 == 0 and drafted:
            drafted[-1] += 1  # a token that its mask forbids
        drafted = drafted[: engine.max_chain] if engine.max_chain else drafted
        parents = np.arange(len(drafted), dtype=np.int32) - 1
        tree = Tree(np.array(drafted, np.int32), parents, np.zeros(len(drafted), np.float32)) if drafted else NO_TREE
        step = SessionStep(session_id, start, np.array(text[start:], np.int32), params, tree)
        (judgement,) = run(engine, [step], masks).judgements
        start = len(text) + len(judgement.path)
        text += judgement.token_ids.tolist()
    engine.close(session_id)
    return text[len(PROMPT) :][:LENGTH]


def forbidding_context(engine: Engine, params: SamplingParams) -> Int32Array:
    """Return a prompt after which the token of the free text is forbidden."""
    for first in range(3, 40):
        context = np.array([first, *PROMPT[1:]], np.int32)
        engine.open(1, context)
        (judgement,) = engine.step([SessionStep(1, 0, context, params)]).judgements
        engine.close(1)
        if not is_allowed(len(context), judgement.token_ids)[0]:
            return context
    raise AssertionError("the masks allow what this model says after each of the prompts")


def needs_masks(engine: Engine) -> None:
    """Skip a test of an engine without masks. Such an engine gets no jobs with grammars."""
    if not takes_masks(engine):
        pytest.skip(f"the {engine.info.engine} engine takes no masks")


class MaskConformance:
    """Needs the fixture `engine`; see `EngineConformance`."""

    @pytest.mark.parametrize("params", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
    def test_masked_texts_have_allowed_tokens_only(self, engine: Engine, params: SamplingParams) -> None:
        """Drafts change nothing, also if some are forbidden."""
        needs_masks(engine)
        text = text_of(engine, 1, params)
        positions = np.arange(len(PROMPT), len(PROMPT) + LENGTH)
        assert all(map(is_allowed, positions.tolist(), np.array(text)))
        assert text_of(engine, 2, params, text) == text
        assert engine.free_slots == engine.info.kv_slots

    def test_masks_are_those_of_their_sessions(self, engine: Engine) -> None:
        """Beside sessions without a mask, chunks of prompts, and a session whose mask allows nothing."""
        needs_masks(engine)
        params = SamplingParams()
        context, alone = forbidding_context(engine, params), []
        for session_id, masks in ((1, [1]), (2, [])):
            engine.open(session_id, context)
            step = SessionStep(session_id, 0, context, params)
            (judgement,) = run(engine, [step], ByPosition(engine.info.vocab_size, masks)).judgements
            alone.append(judgement.token_ids.tolist())
            engine.close(session_id)
        assert alone[0] != alone[1]
        for session_id in (1, 2, 3, 4):
            assert engine.open(session_id, context, f"owner {session_id}") == 0
        steps = [
            SessionStep(4, 0, context[:5], params, judged=False),
            SessionStep(2, 0, context, params),
            SessionStep(3, 0, context, params),
            SessionStep(1, 0, context, params),
        ]
        judged = run(engine, steps, ByPosition(engine.info.vocab_size, [1, 3, 4], nothing=[3])).judgements
        assert [one.session_id for one in judged] == [2, 3, 1]
        assert [judged[2].token_ids.tolist(), judged[0].token_ids.tolist()] == alone
        assert judged[1].fault is not None
        assert "the grammar allows no token there" in judged[1].fault.reason
        rest = SessionStep(4, 5, context[5:], params)
        (judgement,) = run(engine, [rest], ByPosition(engine.info.vocab_size, [4])).judgements
        assert judgement.token_ids.tolist() == alone[0]


def check_reference(engine: Engine, target: Target, params: SamplingParams) -> None:
    """Compare masked texts with those of the reference decoder."""
    needs_masks(engine)
    expected = decode(masked(target), plain, PROMPT, LENGTH, params).token_ids
    assert text_of(engine, 1, params, expected) == expected
