"""Log-probabilities of prompt rows with the vllm engine: transformers' and the torch engine's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from specq.engines.torch.engine import TorchEngine
from specq.engines.vllm.engine import VllmEngine
from specq.protocol.messages import Open, Verdict
from specq.protocol.params import SamplingParams, Speculation
from specq.protocol.types import Logprobs, SessionStep
from specq.testing.checkpoints import load_reference, make_checkpoint, random_tokens
from specq.verifier.core import Verifier
from specq.verifier.models.step_curve import StepCurve
from tests.devices import NEEDS_VLLM, vllm_arguments
from tests.engines.overlapping import GREEDY, let_judge
from tests.engines.test_scored_rows import NUM_TOP, scored
from tests.engines.test_vllm import Text, chain

pytestmark = NEEDS_VLLM


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama-bf16", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def started(directory: Path, vllm_device: str) -> Iterator[VllmEngine]:
    made = VllmEngine(str(directory), kv_slots=1536, **vllm_arguments(vllm_device))
    yield made
    made.shutdown()


@pytest.fixture(params=[False, True], ids=["one by one", "in flight"])
def engine(request: pytest.FixtureRequest, started: VllmEngine) -> Iterator[VllmEngine]:
    """An engine without sessions, and after the test again; with the next step in flight or not."""
    started.overlaps = started._sessions.overlaps = request.param
    let_judge(request.param, started._sessions._core.model_executor.driver_worker)  # type: ignore[attr-defined]
    yield started
    for session_id in range(9):
        started.close(session_id)
    assert started.free_slots == started.info.kv_slots
    assert started._sessions._core.scheduler.reset_prefix_cache()  # type: ignore[attr-defined]


def check(found: list[Logprobs], directory: Path, prompt: np.ndarray, atol: float = 1e-4) -> None:
    """Compare with transformers."""
    with torch.inference_mode():
        logits = load_reference(directory)(torch.tensor(prompt[None])).logits[0, :-1].float()
    own = logits.log_softmax(-1)
    top = own.topk(NUM_TOP)
    expected = own.gather(1, torch.tensor(prompt[1:, None]).long())[:, 0]
    np.testing.assert_allclose(np.concatenate([one.tokens for one in found]), expected, atol=atol)
    np.testing.assert_allclose(np.concatenate([one.top for one in found]), top.values, atol=atol)
    assert np.array_equal(np.concatenate([one.top_ids for one in found]), top.indices)


def test_rows_have_the_references_log_probabilities(engine: VllmEngine, directory: Path) -> None:
    """In chunks, of two prompts at a time, beside a session with drafts; nothing else changes."""
    rng = np.random.default_rng(3)
    prompts = {i: random_tokens(rng, count) for i, count in ((1, 41), (2, 23))}
    beside = Text(3, random_tokens(rng, 9).tolist())
    for i, prompt in (*prompts.items(), (3, np.array(beside.prompt, np.int32))):
        assert engine.open(i, prompt, f"alone {i}") == 0
    found: dict[int, list[Logprobs]] = {1: [], 2: []}
    said = {}
    for turn, ends in enumerate(({1: (0, 5)}, {2: (0, 22), 1: (5, 30)}, {1: (30, 41), 2: (22, 23)})):
        steps = [
            SessionStep(i, start, prompts[i][start:end], GREEDY, judged=end == len(prompts[i]),
            scored=scored(prompts[i], start, end)) for i, (start, end) in ends.items()
        ]  # fmt: skip
        steps.insert(turn % 2, beside.step(chain([1, 2, 3]) if turn else chain([])))
        output = engine.step(steps)
        ids = [step.session_id for step in steps]
        assert sorted(output.scored) == [place for place, step in enumerate(steps) if step.scored.num_rows]
        for place, one in output.scored.items():
            found[ids[place]].append(one)
        for judgement in output.judgements:
            said[judgement.session_id] = judgement.token_ids.tolist()
            if judgement.session_id == 3:
                beside.kv_len = len(beside.tokens) + len(judgement.path)
                beside.tokens += judgement.token_ids.tolist()
    for i, prompt in prompts.items():
        check(found[i], directory, prompt)
        engine.close(i)
        assert engine.open(i, prompt, "again") == 0
        plain = engine.step([SessionStep(i, 0, prompt, GREEDY)])
        assert plain.scored == {}
        assert plain.judgements[0].token_ids.tolist() == said[i]


def prompt_rows(engine: VllmEngine | TorchEngine, prompts: dict[int, np.ndarray]) -> dict[int, bytes]:
    """Serve jobs that want them; return what clients receive."""
    verifier = Verifier(engine, StepCurve([1, 64], [0.005, 0.01]), incarnation=1, max_step_rows=24)
    rows: dict[int, bytes] = {}
    params = SamplingParams(prompt_logprobs=NUM_TOP, ignore_eos=True)
    for i, prompt in prompts.items():
        own = params if i % 3 else replace(params, prompt_logprobs=-1)
        verifier.handle(
            Open(session_id=i, epoch=1, prompt_len=len(prompt), tokens_left=6, params=own, token_ids=prompt,
            speculation=Speculation(mode="plain")), 0.0,
        )  # fmt: skip
    for _ in range(200):
        for message in verifier.step(lambda: 0.0) if verifier.has_work else ():
            assert isinstance(message, Verdict)
            if len(message.prompt_rows):
                rows[message.session_id] = message.prompt_rows.tobytes()
    for i in prompts:
        engine.close(i)
    return rows


def test_clients_receive_the_torch_engines_values(engine: VllmEngine, directory: Path) -> None:
    """Prompts in chunks and in turns; where steps overlap, also with the next step in flight."""
    prompts = {i: random_tokens(np.random.default_rng(i // 2), 10 + 17 * (i // 2)) for i in range(1, 7)}
    found, other = (
        {i: np.frombuffer(rows, "<i4").reshape(-1, 1 + 2 * NUM_TOP) for i, rows in prompt_rows(who, prompts).items()}
        for who in (engine, TorchEngine(str(directory), device="cpu"))
    )
    assert sorted(found) == sorted(other) == [1, 2, 4, 5]
    for i, rows in found.items():
        assert len(rows) == len(prompts[i]) - 1
        columns = [0, *range(1 + NUM_TOP, 1 + 2 * NUM_TOP)]
        values, expected = (np.ascontiguousarray(own[:, columns]).view("<f4") for own in (rows, other[i]))
        np.testing.assert_allclose(values, expected, atol=1e-4)
        assert np.array_equal(rows[:, 1 : 1 + NUM_TOP], other[i][:, 1 : 1 + NUM_TOP])
