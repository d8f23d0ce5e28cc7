"""The conformance suite of engines."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from specq.engines import Engine
from specq.protocol import EngineError, SamplingParams, SessionStep, Tree
from specq.testing.conformance.masks import MaskConformance, check_reference
from specq.testing.conformance.step_outputs import StepOutputConformance
from specq.testing.reference import Target, decode, plain

SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=11)


def generate(
    engine: Engine,
    session_id: int,
    prompt: list[int],
    count: int,
    params: SamplingParams,
    draft: Callable[[list[int]], Tree],
    owner: str = "",
) -> list[int]:
    """Run one session to `count` new tokens. `draft` makes a tree from the text so far."""
    text = list(prompt)
    start = engine.open(session_id, np.array(prompt, np.int32), owner)
    while len(text) < len(prompt) + count:
        step = SessionStep(session_id, start, np.array(text[start:], np.int32), params, draft(text))
        (judgement,) = engine.step([step]).judgements
        assert judgement.session_id == session_id
        assert len(judgement.token_ids) == len(judgement.path) + 1
        start = len(text) + len(judgement.path)
        text.extend(judgement.token_ids.tolist())
    engine.close(session_id)
    return text[: len(prompt) + count]


class EngineConformance(StepOutputConformance, MaskConformance):
    """Needs the fixture `engine`: a new one with 512 KV slots and a vocabulary of at least 64 tokens.

    A text must have space for 600 tokens.
    """

    @pytest.mark.parametrize("params", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
    def test_drafts_change_speed_and_never_text(self, engine: Engine, params: SamplingParams) -> None:
        """Rule 1: no drafts, wrong ones and right ones give one text."""
        rng = np.random.default_rng(0)
        prompt = rng.integers(engine.info.vocab_size, size=19).tolist()
        undrafted = generate(engine, 1, prompt, 30, params, plain)

        def mixed_draft(text: list[int]) -> Tree:
            right = undrafted[len(text) : len(text) + 3]
            tokens = [t if rng.random() < 0.7 else int(rng.integers(engine.info.vocab_size)) for t in right]
            return Tree(
                np.array(tokens, np.int32),
                np.arange(len(tokens), dtype=np.int32) - 1,
                np.zeros(len(tokens), np.float32),
            )

        assert generate(engine, 2, prompt, 30, params, mixed_draft) == undrafted
        assert engine.free_slots == engine.info.kv_slots  # also the slots of rejected nodes

    def test_free_slots_come_back(self, engine: Engine) -> None:
        before = engine.free_slots
        generate(engine, 1, [5] * 40, 20, SamplingParams(), plain)
        assert engine.free_slots == before == engine.info.kv_slots

    def test_open_leaves_at_least_the_last_token_to_compute(self, engine: Engine) -> None:
        prompt = list(range(64))
        generate(engine, 1, prompt, 1, SamplingParams(), plain)
        assert engine.open(2, np.array(prompt, np.int32)) <= 63

    def test_owners_share_no_cached_rows(self, engine: Engine) -> None:
        """This holds for open and closed sessions, and for every length of the common prefix.

        Otherwise the count or the time would reveal the request of another owner. An engine may share as much as it
        likes within one owner. Sharing never changes a text.
        """
        prompt = np.random.default_rng(5).integers(engine.info.vocab_size, size=56).tolist()
        texts = [
            generate(engine, i, prompt, 12, SAMPLED, plain, owner) for i, owner in enumerate(("ann", "ann", "bob"))
        ]
        assert texts[1:] == texts[:1] * 2
        found = {
            (owner, length): engine.open(100 * i + length, np.array(prompt[:length], np.int32), owner)
            for i, owner in enumerate(("ann", "ben", "", "+ann", "ann/", "an"))
            for length in (56, 40, 21)
        }
        assert {count for (owner, _), count in found.items() if owner != "ann"} == {0}

    @pytest.mark.parametrize("length", [17, 25, 32, 39])
    def test_a_context_that_parts_from_a_known_one_says_the_same(self, engine: Engine, length: int) -> None:
        """It holds at every length: known KV may end in the middle of an engine's block."""
        rng = np.random.default_rng(length)
        known, other, others = (rng.integers(engine.info.vocab_size, size=n).tolist() for n in (40, 10, 420))
        parting = known[:length] + other
        alone = generate(engine, 1, parting, 20, SamplingParams(), plain)
        generate(engine, 2, others, 20, SamplingParams(), plain)  # this evicts all slots of the first session
        generate(engine, 3, known, 20, SamplingParams(), plain)
        assert generate(engine, 4, parting, 20, SamplingParams(), plain) == alone
        assert engine.free_slots == engine.info.kv_slots

    def test_a_session_opens_once_and_closes_quietly(self, engine: Engine) -> None:
        context = np.array([1, 2, 3], np.int32)
        engine.open(1, context)
        with pytest.raises(EngineError):
            engine.open(1, context)
        engine.close(1)
        engine.close(1)
        engine.close(77)
        assert engine.open(1, context) <= 2

    def test_a_prefill_only_step_returns_no_judgements(self, engine: Engine) -> None:
        engine.open(1, np.arange(10, dtype=np.int32))
        chunk = SessionStep(1, 0, np.arange(9, dtype=np.int32), SamplingParams(), judged=False)
        assert not engine.step([chunk]).judgements
        (judgement,) = engine.step([SessionStep(1, 9, np.array([9], np.int32), SamplingParams())]).judgements
        assert judgement.path == ()

    def test_too_many_rows_are_refused_without_state_changes(self, engine: Engine) -> None:
        context = np.arange(600, dtype=np.int32) % engine.info.vocab_size
        engine.open(1, context)
        before = engine.free_slots
        with pytest.raises(EngineError):
            engine.step([SessionStep(1, 0, context[:580], SamplingParams())])
        assert engine.free_slots == before

    def test_step_times_has_one_time_a_size(self, engine: Engine) -> None:
        assert len(engine.step_times([1, 8])) == 2

    def test_an_engine_that_launches_steps_says_whether_drafts_may_be_unread(self, engine: Engine) -> None:
        """`overlaps` may depend on the device, so this test runs for every engine that could overlap."""
        assert isinstance(getattr(engine, "takes_unread", None), bool) == hasattr(engine, "launch")


class ReferenceConformance:
    """Needs the fixtures `engine`, as above, and `target`: the logits of the same model from other code."""

    @pytest.mark.parametrize("params", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
    def test_texts_are_the_reference_decoders(self, engine: Engine, target: Target, params: SamplingParams) -> None:
        """Compare with and without trees that are partly right."""
        rng = np.random.default_rng(3)
        prompt = rng.integers(engine.info.vocab_size, size=9).tolist()
        expected = decode(target, plain, prompt, 16, params).token_ids

        def draft(text: list[int]) -> Tree:
            """Draft a chain of the right tokens, and a wrong sibling of each."""
            right = expected[len(text) - len(prompt) :][:3]
            wrong = [(token + 1) % engine.info.vocab_size for token in right]
            parents = [2 * (i // 2) - 2 if i > 1 else -1 for i in range(2 * len(right))]
            if engine.max_chain:  # chains only
                right, wrong, parents = right[: engine.max_chain], [], list(range(-1, len(right) - 1))
            token_ids = [token for pair in zip(right, wrong, strict=True) for token in pair] if wrong else right
            scores = np.zeros(len(token_ids), np.float32)
            return Tree(np.array(token_ids, np.int32), np.array(parents, np.int32), scores)

        drafted = decode(target, draft, prompt, 16, params)
        assert drafted.token_ids == expected
        assert max(drafted.accepted) == 3
        assert generate(engine, 1, prompt, 16, params, draft)[len(prompt) :] == expected

    @pytest.mark.parametrize("params", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
    def test_masked_texts_are_the_reference_decoders(
        self, engine: Engine, target: Target, params: SamplingParams
    ) -> None:
        check_reference(engine, target, params)
