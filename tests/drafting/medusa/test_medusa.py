"""Medusa heads as a source: their input rows, their trees, and texts that equal the target's for any drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specq.config import TargetConfig
from specq.drafting import Pending, make_sources
from specq.drafting.medusa.drafter import Medusa
from specq.drafting.medusa.interface import HiddenRow
from specq.drafting.medusa.network import load_heads
from specq.drafting.medusa.source import MedusaSource
from specq.engines.torch.engine import TorchEngine
from specq.models import resolve_model
from specq.protocol import (
    LANES,
    MEDUSA,
    NO_TAP,
    ConfigError,
    Open,
    SamplingParams,
    SessionRows,
    SessionStats,
    SessionStep,
    Speculation,
    StepOutput,
    Tap,
    Verdict,
    origin_names,
)
from specq.testing.checkpoints_heads import make_heads
from specq.testing.conformance.sources import LENGTH, PROMPT, Serving
from specq.testing.toy import ToyEngine, toy_text
from specq.testing.toy_drafters import ToyHeads
from specq.verifier import Setup, StepCurve, Verifier
from specq.verifier.sources.interface import DraftSource
from tests.drafting.medusa.serving import ASYNC, CHOICES, serving
from tests.verification.test_draft_distributions import LIMIT, PAIR_LIMIT, MemorylessEngine, chi_squares

CURVE = StepCurve([1, 64], [0.005, 0.006])


def kept(serving: Serving, source: MedusaSource) -> bool:
    """Whether the source raised no exception, which would have disabled it."""
    return source in serving.verifier.sources.sources


def num_accepted(stats: SessionStats) -> int:
    """How many drafts of a session were accepted."""
    return sum(accepted for _, accepted in stats.positions)


# --- rounds
# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("wrong_every", [0, 2, 3, 5])
def test_heads_read_the_state_that_made_the_last_token(mode: str, wrong_every: int) -> None:
    """Wherever in the tree the path ended: the toy heads fail on any other row. Each round but the prompt's own has
    drafts."""
    heads = ToyHeads(PROMPT, wrong_every=wrong_every)
    started, source = serving(heads)
    for i in range(3):
        started.open(i, seed=i, mode=mode)
    assert started.finish() == {i: toy_text(PROMPT, LENGTH, i) for i in range(3)}
    assert kept(started, source)
    stats = started.verifier.sessions[0].stats
    num_rounds = LENGTH - num_accepted(stats)
    assert LENGTH / num_rounds > (4 if wrong_every == 0 else 1.8)
    assert stats.drafted_rounds >= num_rounds - 2  # not the first, nor where only the last token is left


def origins_with(source: DraftSource) -> tuple[list[str], set[int], dict[str, Any]]:
    """Return the origins of a text that a verifier makes with this source alone, the lanes of what was verified, and
    how much of each source was."""
    verifier = Verifier(ToyEngine(), CURVE, [source], incarnation=1, measures_drafts=False)
    verifier.handle(_open(0, SamplingParams(max_tokens=20), ASYNC, PROMPT), 0.0)
    names, lanes = list[str](), set[int]()
    while not verifier.sessions[0].finish:
        verifier.begin(0.0)
        for verdict in verifier.step(lambda: 0.0):
            assert isinstance(verdict, Verdict)
            names += origin_names(verdict.origins.tobytes())
            lanes |= set(verdict.node_lanes.tolist())
    return names, lanes, verifier.heartbeat().metrics["judged"]


def test_what_is_accepted_is_medusas() -> None:
    names, lanes, judged = origins_with(MedusaSource(ToyHeads(PROMPT)))
    assert names.count(MEDUSA) > 12
    assert lanes == {LANES[MEDUSA]}
    assert judged[MEDUSA][1] == names.count(MEDUSA)


def test_scores_are_calibrated_in_the_lane() -> None:
    """Heads that predict 0.7 and are always wrong lose trust until none of their nodes is verified."""
    started, _ = serving(ToyHeads(PROMPT, wrong_every=1, blind=True), max_uncommitted=4096)
    started.open(0)
    started.finish()
    lane = started.verifier.sessions[0].lane(LANES[MEDUSA])
    assert lane is not None
    assert lane.calibration.probability(float(np.log(0.7))) < 0.1


@pytest.mark.parametrize("count", [1, 3, 7])
def test_a_step_without_a_hidden_state_drafts_no_tokens(count: int) -> None:
    """Where others committed in between (another verifier), or before the prompt's own step."""
    heads = ToyHeads(PROMPT)
    started, source = serving(heads)
    for i in range(count):
        started.open(i, seed=i)
    assert not source.begin(list(started.verifier.sessions.values()), None, 0.0)  # type: ignore[arg-type]
    for _ in range(count):
        started.turn()
    sessions = list(started.verifier.sessions.values())
    sessions[-1].token_ids.append(1)
    assert source.begin(sessions, None, 0.0) == (count > 1)  # type: ignore[arg-type]
    assert heads.num_started[-1:] == ([] if count == 1 else [count - 1])


# --- with a real model
# ----------------------------------------------------------------------------------------------------


def _open(session_id: int, params: SamplingParams, speculation: Speculation, prompt: Sequence[int]) -> Open:
    return Open(
        session_id=session_id, epoch=1, prompt_len=len(prompt), tokens_left=params.max_tokens, params=params,
        speculation=speculation, token_ids=np.array(prompt, np.int32),
    )  # fmt: skip


@pytest.fixture(scope="module")
def tiny() -> str:
    return resolve_model("tiny", "target")


@pytest.fixture(scope="module")
def random_heads(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    info = TorchEngine(tiny, device="cpu", kv_slots=64).info
    return make_heads(
        tmp_path_factory.mktemp("heads"), 256, tokenizer=(info.num_tokens, info.tokenizer_hash), head_size=300
    )


def texts(tiny: str, sources: Callable[[TorchEngine], list[Any]], jobs: Sequence[Open]) -> dict[int, list[int]]:
    """What a verifier with these sources commits for some jobs."""
    engine = TorchEngine(tiny, device="cpu", kv_slots=2048)
    verifier = Verifier(engine, CURVE, sources(engine), incarnation=1, measures_drafts=False)
    for job in jobs:
        verifier.handle(job, 0.0)
    found: dict[int, list[int]] = {job.session_id: [] for job in jobs}
    for _ in range(300):
        verifier.begin(0.0)
        for verdict in verifier.step(lambda: 0.0):
            assert isinstance(verdict, Verdict)
            found[verdict.session_id] += verdict.token_ids.tolist()
        verifier.heartbeat()
        if all(session.finish for session in verifier.sessions.values()):
            return found
    raise AssertionError("the sessions never end")


def test_heads_are_made_of_a_configuration(tiny: str, random_heads: Path) -> None:
    """And refused there, where their tree is deeper than they are."""
    info = TorchEngine(tiny, device="cpu", kv_slots=64).info
    config = TargetConfig(model="tiny", heads=str(random_heads), heads_tree=CHOICES, prompt_lookup="none")
    setup = Setup(config, info, "", "cpu", lambda line: None, target=tiny, heads=str(random_heads))
    source, _ = make_sources(setup)
    assert isinstance(source, MedusaSource)
    assert source.head.heads.num_heads == 4
    assert [one.name for one in make_sources(setup._replace(heads=""))] == ["grammar"]
    deeper = replace(config, heads_tree="[[0,0,0,0,0]]")
    with pytest.raises(ConfigError, match="5 deep"):
        list(make_sources(setup._replace(config=deeper)))


def test_an_engine_without_hidden_states_is_refused() -> None:
    engine = ToyEngine()
    engine.num_tap_layers = 0
    with pytest.raises(ConfigError, match=r"medusa drafts by hidden states .* the toy engine gives none"):
        Verifier(engine, CURVE, [MedusaSource(ToyHeads(PROMPT))], incarnation=1)


def test_rows_of_several_calls_are_joined(tiny: str, random_heads: Path) -> None:
    """As those of a step that was repeated in halves; the job's own noise is added at the right places."""
    info = TorchEngine(tiny, device="cpu", kv_slots=64).info
    heads = load_heads(str(random_heads), tiny, info, "cpu")
    ranking = Medusa(heads, info.num_tokens)
    states = torch.randn(6, 256, generator=torch.Generator().manual_seed(1))
    params = [SamplingParams(), SamplingParams(temperature=0.8, seed=3)]
    one = ranking.start([HiddenRow(states, 4), HiddenRow(states, 1)], params, [9, 30], 5).collect()
    other = ranking.start([HiddenRow(states[4:], 0), HiddenRow(states, 1)], params, [9, 30], 5).collect()
    assert one.token_ids.tolist() == other.token_ids.tolist()
    assert one.token_ids.shape == one.scores.shape == (2, 4, 5)
    moved = ranking.start([HiddenRow(states, 4), HiddenRow(states, 1)], params, [9, 31], 5).collect()
    assert moved.token_ids[0].tolist() == one.token_ids[0].tolist()  # greedy
    assert moved.token_ids[1, 0].tolist() != one.token_ids[1, 0].tolist()


# --- distributions
# --------------------------------------------------------------------------------------------------------


class TappedMemoryless(MemorylessEngine):
    """With hidden states, which say nothing."""

    def step(self, steps: Sequence[SessionStep], tap: Tap = NO_TAP) -> StepOutput:
        output = super().step(steps)
        if not tap.layers:
            return output
        starts = np.cumsum([0, *(tap.num_rows(step) for step in steps)], dtype=np.int32)
        return replace(output, hidden=SessionRows(np.zeros((starts[-1], 3), np.float32), starts))


class FixedHeads:
    """Say of every place the same: the tokens in this order."""

    num_heads = 3

    def __init__(self, order: Sequence[int]) -> None:
        self.order = np.array(order, np.int32)

    def start(self, states: Sequence[HiddenRow], params: Any, lengths: Any, count: int) -> Pending[Any]:
        from specq.drafting.trees.ranked import Ranked

        own = self.order[:count]
        token_ids = np.broadcast_to(own, (len(states), self.num_heads, len(own)))
        scores = np.broadcast_to(np.log(np.full(len(own), 0.3, np.float32)), token_ids.shape)
        return Pending(lambda: Ranked(token_ids, scores))


@pytest.mark.slow
@pytest.mark.parametrize("order", [[1, 2, 3, 4, 5, 6, 7, 8], [8, 7, 6, 5, 4, 3, 2, 1]], ids=["good", "bad"])
@pytest.mark.parametrize("speculation", [ASYNC, Speculation(mode="sync"), Speculation(tree=((0, 0, 0), (1, 1), (2,)))])
@pytest.mark.parametrize("strategy", ["probabilistic", "deterministic"])
def test_the_text_has_the_targets_distribution(order: list[int], speculation: Speculation, strategy: str) -> None:
    """Heads choose nodes by content, so these are point masses; whatever they are, tokens and pairs of tokens are as
    the target draws them."""
    tokens: list[int] = []
    accepted = 0
    for seed in (1, 2):
        verifier = Verifier(
            TappedMemoryless(), CURVE, [MedusaSource(FixedHeads(order))], incarnation=1, measures_drafts=False
        )
        params = SamplingParams(max_tokens=750, temperature=1.0, seed=seed, strategy=strategy)
        verifier.handle(_open(seed, params, speculation, [5, 6, 7]), 0.0)
        session = verifier.sessions[seed]
        while not session.finish:
            verifier.begin(0.0)
            verifier.step(lambda: 0.0)
            session.journaled = session.length
            verifier.heartbeat()
        tokens += session.token_ids[3:]
        accepted += num_accepted(session.stats)
    assert accepted > 50
    singles, pairs = chi_squares(tokens)
    assert singles < LIMIT
    assert pairs < PAIR_LIMIT
