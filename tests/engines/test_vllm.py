"""The vllm engine, by real vLLM on the device that it was built for: against transformers, against the torch engine,
short of room. `make test-vllm`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import structlog

from specq.engines.profiling import CONTEXT, least_kv_slots
from specq.engines.torch.engine import TorchEngine
from specq.engines.vllm.engine import VllmEngine
from specq.engines.vllm.options import BLOCK_SIZES
from specq.engines.vllm.padding import graphs_up_to
from specq.protocol.arrays import Int32Array
from specq.protocol.errors import EngineError
from specq.protocol.messages import Open, Verdict
from specq.protocol.params import SamplingParams
from specq.protocol.types import NO_TREE, DraftDistributions, SessionStep, Tree
from specq.testing.checkpoints import VOCAB, load_reference, make_checkpoint, random_tokens, reference_text
from specq.verification import STRATEGIES
from specq.verifier.core import Verifier
from specq.verifier.models.step_curve import StepCurve
from specq.verifier.sessions.history import Past
from tests.devices import NEEDS_VLLM, vllm_arguments

pytestmark = NEEDS_VLLM
GREEDY = SamplingParams()
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama-bf16", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module", params=["sessions", "even"])
def started(request, directory, vllm_device):
    """`even`: steps with drafts have as many rows each, as where there are graphs for such steps."""
    made = VllmEngine(str(directory), kv_slots=2048, **vllm_arguments(vllm_device))
    if request.param == "even":
        made._sessions._graphs = graphs_up_to(512, 64)  # type: ignore[attr-defined]
    yield made
    made.shutdown()


@pytest.fixture
def engine(started):
    """An engine without sessions, and after the test again."""
    yield started
    for session_id in range(20):
        started.close(session_id)
    assert started.free_slots == started.info.kv_slots


@dataclass
class Text:
    """One session as a verifier has it: its text so far, and how much of it has KV."""

    session_id: int
    prompt: list[int]
    params: SamplingParams = GREEDY
    kv_len: int = 0
    tokens: list[int] = field(default_factory=list)
    num_accepted: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def said(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    def step(self, tree: Tree = NO_TREE, most: int = 10_000) -> SessionStep:
        pending = np.array(self.tokens[self.kv_len :][:most], np.int32)
        is_end = self.kv_len + len(pending) == len(self.tokens)
        history = Past(self.params, len(self.prompt), (1,)).history(self.tokens)
        params, tree = self.params, tree if is_end else NO_TREE
        return SessionStep(self.session_id, self.kv_len, pending, params, tree, judged=is_end, history=history)


def run(engine, steps: list[SessionStep], texts: dict[int, Text]) -> None:
    """Run one step and let the texts grow."""
    judgements = {judgement.session_id: judgement for judgement in engine.step(steps).judgements}
    assert list(judgements) == [step.session_id for step in steps if step.judged]
    for step in steps:
        text = texts[step.session_id]
        text.kv_len += len(step.token_ids)
        if step.judged:
            judgement = judgements[step.session_id]
            assert judgement.path == tuple(range(len(judgement.path)))
            assert judgement.token_ids[:-1].tolist() == step.tree.token_ids[: len(judgement.path)].tolist()
            text.tokens += judgement.token_ids.tolist()
            text.kv_len += len(judgement.path)
            text.num_accepted += len(judgement.path)


def chain(tokens: list[int] | Int32Array, distributions: DraftDistributions | None = None) -> Tree:
    count = len(tokens)
    parents = np.arange(count, dtype=np.int32) - 1
    return Tree(np.array(tokens, np.int32), parents, np.zeros(count, np.float32), distributions)


def guess(rng: np.random.Generator, truth: list[int]) -> Tree:
    """A chain of any length, right with probability 0.8 a token."""
    right = truth[: rng.integers(0, 8)]
    return chain([token if rng.random() < 0.8 else int(rng.integers(VOCAB)) for token in right])


def test_greedy_text_equals_transformers_for_any_draft_and_batch(engine, directory):
    """Ten sessions; each step takes some of them, contexts in chunks of any size, chains right and wrong."""
    rng, reference = np.random.default_rng(0), load_reference(directory)
    prompts = [random_tokens(rng, int(count)).tolist() for count in rng.integers(2, 150, 10)]
    truth = [reference_text(reference, prompt, NUM_TOKENS + 10) for prompt in prompts]
    texts = {i: Text(i, prompt) for i, prompt in enumerate(prompts)}
    for i, text in texts.items():
        text.kv_len = engine.open(i, np.array(text.prompt, np.int32))
    while growing := [text for text in texts.values() if len(text.said) < NUM_TOKENS]:
        joining = [text for text in growing if rng.random() < 0.6]
        steps = [t.step(guess(rng, truth[t.session_id][len(t.said) :]), int(rng.integers(1, 60))) for t in joining]
        if steps:
            run(engine, steps, texts)
    assert [text.said[:NUM_TOKENS] for text in texts.values()] == [expected[:NUM_TOKENS] for expected in truth]
    accepted = sum(text.num_accepted for text in texts.values())
    assert 40 < accepted < 10 * NUM_TOKENS


def test_drafts_that_are_in_the_prefix_cache_already_are_judged_like_others(engine, directory):
    """vLLM has no logits for what it finds there."""
    prompt = random_tokens(np.random.default_rng(6), 50)
    truth = reference_text(load_reference(directory), prompt.tolist(), 17)
    for session_id in (1, 2, 3):
        text = Text(session_id, prompt.tolist())
        text.kv_len = engine.open(session_id, prompt)
        run(engine, [text.step(chain(truth[:16]))], {session_id: text})
        assert text.said == truth


def distribution_of(tokens: Int32Array, rng: np.random.Generator) -> DraftDistributions:
    """A distribution for each node, of a few tokens besides its own."""
    ids = np.stack(
        [np.r_[token, rng.choice(np.setdiff1d(np.arange(VOCAB), token), 5, replace=False)] for token in tokens]
    )
    weights = rng.integers(1, 5000, ids.shape).astype(np.uint16)
    return DraftDistributions(ids.astype(np.int32), weights, np.arange(len(tokens), dtype=np.int32))


WARM = {"temperature": 0.9, "top_p": 0.95}
ASKED = {
    "deterministic": WARM | {"min_p": 0.01},
    "probabilistic": WARM | {"top_k": 40},
    "threshold": {"temperature": 1.0, "threshold": 0.05},
    "typical": {"temperature": 1.0},
    "greedy": {"temperature": 1.0},
    "penalised": WARM
    | {"frequency_penalty": 0.7, "repetition_penalty": 1.2, "min_tokens": 5, "logit_bias": ((7, 3.0),)},
    "logprobs": {"logprobs": 3},
}


def test_every_strategy_says_what_it_says_with_the_torch_engine(engine, directory):
    """All in one batch: temperature, cuts, penalties, biases, log-probabilities, distributions of drafts; and drafts of
    all kinds were accepted and rejected."""
    rng, other = np.random.default_rng(1), TorchEngine(str(directory), device="cpu")
    reference = load_reference(directory)
    made = [
        SamplingParams(seed=seed, strategy=name if name in STRATEGIES else "deterministic", **params)
        for seed, (name, params) in enumerate(ASKED.items())
    ]
    pairs = []
    for who in (engine, other):
        prompts = np.random.default_rng(2)
        texts = {i: Text(i, random_tokens(prompts, 12 + 9 * i).tolist(), params) for i, params in enumerate(made)}
        for i, text in texts.items():
            text.kv_len = who.open(i, np.array(text.prompt, np.int32))
        pairs.append(texts)
    for _ in range(14):
        likely = {}
        for i, text in pairs[1].items():  # half of the chain is what the target would say without noise
            drafted = random_tokens(rng, 4)
            drafted[:2] = reference_text(reference, text.tokens, 2)
            likely[i] = chain(drafted, distribution_of(drafted, rng) if i % 2 else None)
        for who, texts in zip((engine, other), pairs, strict=True):
            run(who, [text.step(likely[text.session_id]) for text in texts.values()], texts)
    assert {i: text.said for i, text in pairs[0].items()} == {i: text.said for i, text in pairs[1].items()}
    accepted = {name: pairs[0][i].num_accepted for i, name in enumerate(ASKED)}
    assert accepted.pop("greedy") == 0
    accepted.pop("penalised")  # drafts repeat what it avoids
    assert all(0 < count < 4 * 14 for count in accepted.values()), accepted


def test_log_probabilities_are_the_torch_engines(engine, directory):
    prompt = random_tokens(np.random.default_rng(3), 20)
    step = SessionStep(1, 0, prompt, SamplingParams(logprobs=4), chain([5, 6]))
    found = []
    for who in (engine, TorchEngine(str(directory), device="cpu")):
        who.open(1, prompt)
        found.append(who.step([step]).judgements[0].logprobs)
        who.close(1)
    assert np.array_equal(found[0].top_ids, found[1].top_ids)
    np.testing.assert_allclose(found[0].top, found[1].top, atol=1e-4)
    np.testing.assert_allclose(found[0].tokens, found[1].tokens, atol=1e-4)


def test_a_shared_prefix_is_computed_once(directory, vllm_device):
    """Of another session's context, generated text included, whole blocks are found again."""
    engine = VllmEngine(str(directory), kv_slots=512, **vllm_arguments(vllm_device))
    text = Text(1, random_tokens(np.random.default_rng(4), 80).tolist())
    engine.open(1, np.array(text.prompt, np.int32))
    for _ in range(20):
        run(engine, [text.step()], {1: text})
    again = Text(2, text.tokens[:98])
    again.kv_len = engine.open(2, np.array(again.prompt, np.int32))
    assert again.kv_len == 96
    engine.close(1)
    run(engine, [again.step()], {2: again})
    assert again.said == text.tokens[98:99]
    engine.close(2)
    assert engine.free_slots == engine.info.kv_slots
    engine.shutdown()


def test_a_block_is_shared_once_a_new_session_has_filled_it(directory, vllm_device):
    """Also where that session, whose context ends with the block, had room for it as soon as it was opened."""
    engine = VllmEngine(str(directory), kv_slots=512, **vllm_arguments(vllm_device))
    block_size, found = engine._block_slots, []
    tokens = random_tokens(np.random.default_rng(5), 2 * block_size + 1).tolist()
    for session_id, length in enumerate((block_size + 1, 2 * block_size, 2 * block_size + 1)):
        text = Text(session_id, tokens[:length])
        text.kv_len = engine.open(session_id, np.array(text.prompt, np.int32))
        found.append(text.kv_len)
        run(engine, [text.step()], {session_id: text})
    assert found == [0, block_size, 2 * block_size]
    engine.shutdown()


def test_text_stays_right_where_sessions_are_evicted_and_opened_again(directory, vllm_device):
    """Eight sessions that grow to twice the room; each ends with the text that transformers says."""
    engine = VllmEngine(str(directory), kv_slots=256, **vllm_arguments(vllm_device))
    verifier = Verifier(engine, StepCurve([1, 64], [0.005, 0.01]), incarnation=1)
    rng, reference = np.random.default_rng(5), load_reference(directory)
    prompts = {i: random_tokens(rng, 20) for i in range(8)}
    for i, prompt in prompts.items():
        params = SamplingParams(ignore_eos=True)
        verifier.handle(
            Open(session_id=i, epoch=1, prompt_len=20, tokens_left=40, params=params, token_ids=prompt), 0.0
        )
    said: dict[int, list[int]] = {i: [] for i in prompts}
    with structlog.testing.capture_logs() as logs:
        for _ in range(1000):
            for verdict in verifier.step(lambda: 0.0) if verifier.has_work else ():
                assert isinstance(verdict, Verdict)
                said[verdict.session_id] += verdict.token_ids.tolist()
    assert sum(entry["event"] == "session_evicted" for entry in logs) > 4
    assert said == {i: reference_text(reference, prompt.tolist(), 40) for i, prompt in prompts.items()}
    engine.shutdown()


def tree(parents: list[int]) -> Tree:
    return Tree(np.zeros(len(parents), np.int32), np.array(parents, np.int32), np.zeros(len(parents), np.float32))


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (SessionStep(1, 0, np.array([5, 6], np.int32), GREEDY, tree([-1, -1])), "takes chains of at most 16"),
        (
            SessionStep(1, 0, np.array([5, 6], np.int32), GREEDY, tree(list(range(-1, 16)))),
            "takes chains of at most 16",
        ),
        (SessionStep(1, 1, np.array([6], np.int32), GREEDY), "its KV holds 0 tokens"),
        (SessionStep(2, 0, np.array([6], np.int32), GREEDY), "session 2 is not open"),
        (SessionStep(1, 0, np.array([5, VOCAB], np.int32), GREEDY), "token ids outside"),
    ],
)
def test_steps_that_do_not_fit_are_refused(engine, step, message):
    engine.open(1, np.array([5, 6], np.int32))
    with pytest.raises(EngineError, match=message):
        engine.step([step])


@pytest.mark.parametrize(
    ("tokens", "judged", "message"),
    [
        ([5, 7], True, "not those of its transcript"),
        ([5], True, "judged at the end"),
        ([5, 6], False, "judged at the end"),
    ],
)
def test_what_vllm_could_not_follow_is_refused(directory, vllm_device, tokens, judged, message):
    arguments = vllm_arguments(vllm_device)
    engine = VllmEngine(str(directory), kv_slots=64, max_sessions=1, **arguments)
    engine.open(1, np.array([5, 6], np.int32))
    with pytest.raises(EngineError, match=message):
        engine.step([SessionStep(1, 0, np.array(tokens, np.int32), GREEDY, judged=judged)])
    engine.open(2, np.array([5, 6], np.int32))
    with pytest.raises(EngineError, match="a step of 2 sessions and 4 rows; vLLM was made for 1"):
        engine.step([SessionStep(i, 0, np.array([5, 6], np.int32), GREEDY) for i in (1, 2)])
    engine.shutdown()


def test_steps_are_measured_with_as_few_sessions_and_kv_slots_as_it_was_made_for(directory, vllm_device):
    """A verifier measures them at its start, whatever its --max-sessions, with the fewest --kv-slots that are not
    refused."""
    least = least_kv_slots(64, CONTEXT, 2, BLOCK_SIZES[vllm_device])
    made = VllmEngine(str(directory), kv_slots=least, max_sessions=2, max_step_rows=64, **vllm_arguments(vllm_device))
    assert made.info.kv_slots == least
    times = made.step_times([1, 8, 64])
    assert len(times) == 3
    assert all(seconds > 0 for seconds in times)
    assert made.free_slots == made.info.kv_slots
    made.shutdown()
