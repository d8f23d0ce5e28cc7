"""What every engine of the table must do; the same suite for each."""

from __future__ import annotations

import numpy as np
import pytest

from specq.engines import ENGINES
from specq.protocol.errors import EngineError
from specq.protocol.params import SamplingParams
from specq.protocol.types import NO_TREE, SessionStep, Tree
from specq.testing.checkpoints import VOCAB, make_checkpoint, random_tokens
from tests.devices import NEEDS_CUDA, NEEDS_VLLM, vllm_arguments

SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=11)


VARIANTS = {
    "vllm-prompts": ("vllm", {"way": "prompts"}),
    "torch on cuda": ("torch", {"device": "cuda", "dtype": "float32"}),  # in bf16 near-ties may fall either way there
}
MARKS = {"vllm": NEEDS_VLLM, "vllm-prompts": NEEDS_VLLM, "torch on cuda": NEEDS_CUDA}


@pytest.fixture(params=[pytest.param(name, marks=MARKS.get(name, ())) for name in sorted([*ENGINES, *VARIANTS])])
def engine(request, tmp_path):
    """Each of the table on the CPU, what runs on CUDA there too; vllm on what it was built for."""
    name, options = VARIANTS.get(request.param, (request.param, {"device": "cpu"}))
    if name == "vllm":
        kind = request.getfixturevalue("vllm_device")
        options = options | {"device": kind} | vllm_arguments(kind)
    made = ENGINES.resolve(name).make(str(make_checkpoint("llama-bf16", tmp_path)), kv_slots=512, **options)
    yield made
    made.shutdown()


def generate(engine, session_id: int, prompt: list[int], count: int, params: SamplingParams, draft) -> list[int]:
    """Run one session to `count` new tokens; `draft` turns the text so far into a tree."""
    text = list(prompt)
    start = engine.open(session_id, np.array(prompt, np.int32))
    while len(text) < len(prompt) + count:
        step = SessionStep(session_id, start, np.array(text[start:], np.int32), params, draft(text))
        (judgement,) = engine.step([step])
        assert judgement.session_id == session_id
        assert len(judgement.token_ids) == len(judgement.path) + 1
        start = len(text) + len(judgement.path)
        text.extend(judgement.token_ids.tolist())
    engine.close(session_id)
    return text[: len(prompt) + count]


def no_draft(text: list[int]) -> Tree:
    return NO_TREE


@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_drafts_change_speed_and_never_text(engine, params):
    """Rule 1: no drafts, wrong ones and right ones give one text."""
    rng = np.random.default_rng(0)
    prompt = random_tokens(rng, 19).tolist()
    plain = generate(engine, 1, prompt, 30, params, no_draft)

    def mixed_draft(text: list[int]) -> Tree:
        right = plain[len(text) : len(text) + 3]
        tokens = [t if rng.random() < 0.7 else int(rng.integers(VOCAB)) for t in right]
        return Tree(
            np.array(tokens, np.int32), np.arange(len(tokens), dtype=np.int32) - 1, np.zeros(len(tokens), np.float32)
        )

    assert generate(engine, 2, prompt, 30, params, mixed_draft) == plain
    assert engine.free_slots == engine.info.kv_slots  # those of rejected nodes too


def test_free_slots_come_back(engine):
    before = engine.free_slots
    generate(engine, 1, [5] * 40, 20, SamplingParams(), no_draft)
    assert engine.free_slots == before == engine.info.kv_slots


def test_open_leaves_at_least_the_last_token_to_compute(engine):
    prompt = list(range(64))
    generate(engine, 1, prompt, 1, SamplingParams(), no_draft)
    assert engine.open(2, np.array(prompt, np.int32)) <= 63


def test_a_session_opens_once_and_closes_quietly(engine):
    context = np.array([1, 2, 3], np.int32)
    engine.open(1, context)
    with pytest.raises(EngineError):
        engine.open(1, context)
    engine.close(1)
    engine.close(1)
    engine.close(77)
    assert engine.open(1, context) <= 2


def test_a_step_of_only_prefill_judges_nothing(engine):
    engine.open(1, np.arange(10, dtype=np.int32))
    assert engine.step([SessionStep(1, 0, np.arange(9, dtype=np.int32), SamplingParams(), judged=False)]) == []
    (judgement,) = engine.step([SessionStep(1, 9, np.array([9], np.int32), SamplingParams())])
    assert judgement.path == ()


def test_too_many_rows_are_refused_with_nothing_changed(engine):
    context = np.arange(600, dtype=np.int32) % VOCAB
    engine.open(1, context)
    before = engine.free_slots
    with pytest.raises(EngineError):
        engine.step([SessionStep(1, 0, context[:580], SamplingParams())])
    assert engine.free_slots == before


def test_step_times_has_one_time_a_size(engine):
    assert len(engine.step_times([1, 8])) == 2
