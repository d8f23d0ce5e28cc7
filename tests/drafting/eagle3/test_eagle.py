"""An EAGLE-3 head as a source: its input rows, its trees, and texts that equal the target's for any drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specq.config import TargetConfig
from specq.drafting import Pending, make_sources
from specq.drafting.eagle3.drafter import Eagle
from specq.drafting.eagle3.loading import load_eagle
from specq.drafting.eagle3.source import EagleSource
from specq.drafting.medusa.interface import Ranked
from specq.drafting.medusa.source import MedusaSource
from specq.drafting.trees.interface import Grown, TreeRequest
from specq.engines.torch.engine import TorchEngine
from specq.protocol import (
    EAGLE,
    EAGLE_LANE,
    ConfigError,
    Open,
    SamplingParams,
    Speculation,
    Verdict,
)
from specq.testing.checkpoints_eagle import eagle_shape_of, make_eagle
from specq.testing.conformance.sources import LENGTH, Serving
from specq.testing.growth import Growth
from specq.testing.toy import toy_text
from specq.testing.toy_drafters import ToyTrees
from specq.verifier import Setup, StepCurve, Verifier
from tests.drafting.medusa.test_medusa import (
    TappedMemoryless,
    _open,
    kept,
    num_accepted,
    origins_with,
    random_heads,
    texts,
    tiny,
)
from tests.replaying import StandIn
from tests.verification.test_draft_distributions import LIMIT, PAIR_LIMIT, chi_squares

__all__ = ["random_heads", "tiny"]  # fixtures


ASYNC = Speculation()


CURVE = StepCurve([1, 64], [0.005, 0.006])


def serving(head: ToyTrees, tree: tuple[tuple[int, ...], ...] = (), **options: Any) -> tuple[Serving, EagleSource]:
    source = EagleSource(head, 5, tree)
    return Serving([source], lambda verifier: None, **options), source


# --- rounds
# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("wrong_every", [0, 2, 3, 5])
@pytest.mark.parametrize("max_step_rows", [4, 512])
def test_the_head_is_given_each_row_of_a_text(mode: str, wrong_every: int, max_step_rows: int) -> None:
    """The prompt's, in chunks of any size, and those of the accepted path, wherever in the tree it ended: the toy head
    fails on any other. Each round but the prompt's own has drafts, where there is room."""
    head = ToyTrees(wrong_every=wrong_every)
    started, source = serving(head, max_step_rows=max_step_rows)
    context = list(range(3, 12))
    for i in range(3):
        started.open(i, seed=i, mode=mode, context=context)
    assert started.finish() == {i: toy_text(context, LENGTH, i) for i in range(3)}
    assert kept(started, source)
    assert len(head.num_started) > LENGTH / 6
    stats = started.verifier.sessions[0].stats
    num_rounds = LENGTH - num_accepted(stats)
    if max_step_rows < 512:
        return
    assert LENGTH / num_rounds > (4.5 if wrong_every == 0 else 1.9)
    assert stats.drafted_rounds >= num_rounds - 2  # not the first, nor where only the last token is left


def test_what_is_accepted_is_eagles() -> None:
    names, lanes, judged = origins_with(EagleSource(ToyTrees()))
    assert names.count(EAGLE) > 12
    assert lanes == {EAGLE_LANE}
    assert judged[EAGLE][1] == names.count(EAGLE)


def test_scores_are_calibrated_in_the_lane() -> None:
    """A head that predicts 0.7 and is always wrong loses trust step by step."""
    started, source = serving(ToyTrees(wrong_every=1, blind=True))
    started.open(0)
    started.finish()
    assert kept(started, source)
    lane = started.verifier.sessions[0].lane(EAGLE_LANE)
    assert lane is not None
    assert lane.calibration.probability(float(np.log(0.7))) < 0.1


def test_what_others_committed_is_not_drafted_for() -> None:
    """Where the head does not know the end of a text, it stands back; it goes on where rows come again."""
    head = ToyTrees()
    started, source = serving(head)
    started.open(0)
    session = started.verifier.sessions[0]
    assert not source.begin([session], None, 0.0)  # type: ignore[arg-type]
    started.turn()
    session.token_ids.append(1)
    assert not source.begin([session], None, 0.0)  # type: ignore[arg-type]
    session.token_ids.pop()
    assert source.begin([session], None, 0.0)  # type: ignore[arg-type]
    assert head.num_started == [1]


def test_jobs_without_drafts_have_no_cost() -> None:
    """No rows of their prompts are requested, and no state is kept."""
    head = ToyTrees()
    started, source = serving(head)
    started.open(0, mode="plain")
    assert not source.wants_prompt(started.verifier.sessions[0])
    started.turn()
    assert not head.texts
    started.finish()
    assert not head.num_started


def test_a_job_gets_the_tree_that_it_asks_for() -> None:
    """As deep as the configuration allows; else the configured one, else best first."""
    for tree, shape, expected in (
        ((), {"tree": ((0,), (0, 0), (1,), (1, 0))}, {(0,), (0, 0), (1,), (1, 0)}),
        ((), {"tree": ((0,) * 9,)}, {(0,) * n for n in range(1, 6)}),
        (((0, 1), (2,)), {}, {(0,), (1,), (2,), (0, 0), (0, 1)}),
        (((0, 1), (2,)), {"max_depth": 1}, {(0,), (1,), (2,)}),
        ((), {"num_candidates": 2, "max_depth": 2}, {(0,), (0, 0), (1,), (1, 0)}),
    ):
        started, source = serving(ToyTrees(), tree)
        started.open(0, **shape)
        started.turn()
        session = started.verifier.sessions[0]
        assert source.begin([session], None, 0.0)  # type: ignore[arg-type]
        (batch,) = source.collect([session], None, lambda: 0.0)  # type: ignore[arg-type]
        assert paths_of(batch, session.token_ids) == expected


def paths_of(batch: Any, context: Sequence[int]) -> set[tuple[int, ...]]:
    """The paths of ranks of a toy batch's nodes: a toy head's choice of rank r is the right token plus r."""
    found: list[tuple[tuple[int, ...], list[int]]] = []
    for token, parent in zip(batch.token_ids.tolist(), batch.parent_ids.tolist(), strict=True):
        ranks, text = found[parent] if parent >= 0 else ((), list(context))
        right = toy_text(text, 1)[0]
        rank = 0 if token == right else (token - 1 - right) % 49 + 1
        found.append(((*ranks, rank), [*text, token]))
    return {ranks for ranks, _ in found}


def test_many_sessions_have_trees_of_fewer_levels() -> None:
    """Since each has few nodes; a job that asks for nodes, or for a shape, has as many levels as it may."""
    asked: list[TreeRequest] = []

    class Asked(ToyTrees):
        def start(self, requests: Sequence[TreeRequest]) -> list[Pending[Grown]]:
            asked.extend(requests)
            return super().start(requests)

    for count, shape, expected in (
        (1, {}, {8}),
        (40, {}, {5}),
        (40, {"max_nodes": 8}, {8}),
        (40, {"max_depth": 3}, {3}),
    ):
        asked.clear()
        source = EagleSource(Asked(), 8)
        started = Serving([source], lambda verifier: None)
        for i in range(count):
            started.open(i, seed=i, **shape)
        started.turn()
        sessions = list(started.verifier.sessions.values())
        asked.clear()
        assert source.begin(sessions, None, 0.0)  # type: ignore[arg-type]
        assert {request.depth for request in asked} == expected
        assert sum(len(request.session_ids) for request in asked) == count


# --- with a real model
# ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def random_eagle(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    info = TorchEngine(tiny, device="cpu", kv_slots=64).info
    tokenizer = {"num_tokens": info.num_tokens, "tokenizer_hash": info.tokenizer_hash}
    shape = eagle_shape_of(256, info.vocab_size, 300, **tokenizer)
    return make_eagle(tmp_path_factory.mktemp("eagle"), shape, embedding=False, scale=0.05)


def drafting(
    tiny: str, heads: Path, drafted: dict[str, int], *, is_recorded: bool = False
) -> Callable[[TorchEngine], list[Any]]:
    """Return what makes an EAGLE-3 source that counts its nodes."""

    def make(engine: TorchEngine) -> list[Any]:
        replays = StandIn() if is_recorded else None
        source = EagleSource(Eagle(load_eagle(str(heads), tiny, engine.info, "cpu"), replays))
        collect = source.collect

        def counted(*asked: Any) -> Any:
            batches = collect(*asked)
            drafted["nodes"] = drafted.get("nodes", 0) + sum(len(batch.token_ids) for batch in batches)
            return batches

        source.collect = counted  # type: ignore[method-assign]
        return [source]

    return make


@pytest.mark.parametrize("is_recorded", [False, True], ids=["as needed", "recorded"])
def test_a_random_head_changes_no_text(tiny: str, random_eagle: Path, is_recorded: bool) -> None:
    """Greedy and sampled, sync and async, best first and in trees, several at once: that of plain decoding, token for
    token."""
    ways = [
        (SamplingParams(max_tokens=24, temperature=temperature, seed=7 * i, ignore_eos=True, top_k=top_k), speculation)
        for i, speculation in enumerate((ASYNC, Speculation(mode="sync"), Speculation(tree=((0, 0, 1), (1,), (2, 0)))))
        for temperature, top_k in ((0.0, 0), (0.8, 0), (0.8, 3))
    ]
    prompts = [[5 + i, 90, 17 * i + 3, 1000, 44] for i in range(len(ways))]
    jobs = [_open(i, params, way, prompts[i]) for i, (params, way) in enumerate(ways)]
    plain = [replace(job, speculation=Speculation(mode="plain")) for job in jobs]
    drafted = dict[str, int]()
    found = texts(tiny, drafting(tiny, random_eagle, drafted, is_recorded=is_recorded), jobs)
    assert found == texts(tiny, lambda engine: [], plain)
    assert drafted["nodes"] > 200


def test_sessions_come_and_go(tiny: str, random_eagle: Path) -> None:
    """Jobs begin while others run, end, and their ids are used again."""
    engine = TorchEngine(tiny, device="cpu", kv_slots=2048)
    drafted = dict[str, int]()
    verifier = Verifier(
        engine, CURVE, drafting(tiny, random_eagle, drafted)(engine), incarnation=1, measures_drafts=False
    )
    jobs, found = list[Open](), dict[tuple[int, int], list[int]]()
    for turn in range(200):
        if turn % 4 == 0 and turn < 60:
            session_id, epoch = (turn // 4) % 4, 1 + turn // 16
            params = SamplingParams(
                max_tokens=9 + turn % 7, temperature=0.8 * (turn % 8 == 0), seed=turn, ignore_eos=True
            )
            job = replace(_open(session_id, params, ASYNC, [5 + turn, 9, 700, 3]), epoch=epoch)
            verifier.handle(job, 0.0)
            jobs.append(job)
            found[session_id, epoch] = []
        verifier.begin(0.0)
        for verdict in verifier.step(lambda: 0.0):
            assert isinstance(verdict, Verdict)
            found[verdict.session_id, verdict.epoch] += verdict.token_ids.tolist()
        verifier.heartbeat()
    plain = [replace(job, session_id=i, speculation=Speculation(mode="plain")) for i, job in enumerate(jobs)]
    expected = texts(tiny, lambda engine: [], plain)
    assert {i: found[job.session_id, job.epoch] for i, job in enumerate(jobs)} == {
        i: text[: len(found[jobs[i].session_id, jobs[i].epoch])] for i, text in expected.items()
    }
    assert sum(map(len, found.values())) > 100
    assert drafted["nodes"] > 100


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_paused_head_receives_no_states_and_drafts_after_the_gap(mode: str) -> None:
    """From the fifth to the fifteenth turn, unless a synchronous session asks for it; the text is the target's."""
    started, source = serving(ToyTrees(wrong_every=1, blind=True))
    started.open(0, mode=mode)
    head, given = source.head, list[int]()
    assert isinstance(head, ToyTrees)
    for turn in range(30):
        started.verifier.policy.asleep = frozenset([EAGLE] if 5 <= turn < 15 else [])
        before = head.known(0)
        started.turn()
        given.append(head.known(0) - before)
    assert all(given[:5])
    assert (sum(given[6:15]) > 0) == (mode == "sync"), "a step in flight may still be shown to it"
    assert given[15] >= (1 if mode == "sync" else 10), "it goes on behind the gap"
    assert all(given[16:])
    num_drafted = sum(head.num_started)
    assert started.finish() == {0: toy_text([5, 6, 7], LENGTH)}
    assert sum(head.num_started) > num_drafted


def test_a_head_is_made_of_a_configuration(tiny: str, random_eagle: Path, random_heads: Path) -> None:
    """By what its directory holds; a tree deeper than the chain is refused."""
    info = TorchEngine(tiny, device="cpu", kv_slots=64).info
    config = TargetConfig(model="tiny", heads=str(random_eagle), heads_tree="[[0,0],[1]]", prompt_lookup="none")
    setup = Setup(config, info, "", "cpu", lambda line: None, target=tiny, heads=str(random_eagle))
    source, _ = make_sources(setup)
    assert isinstance(source, EagleSource)
    assert source.layers == (1, 5, 8)
    other, _ = make_sources(setup._replace(heads=str(random_heads)))
    assert isinstance(other, MedusaSource)
    assert [one.name for one in make_sources(setup._replace(heads=""))] == ["grammar"]
    deeper = replace(config, heads_tree="[[0,0,0]]", chain=2)
    with pytest.raises(ConfigError, match=r"3 deep; target.chain is 2, so paths may have 2 ranks at most"):
        list(make_sources(setup._replace(config=deeper)))


# --- distributions
# --------------------------------------------------------------------------------------------------------


class FixedTrees(ToyTrees):
    """Say of every place the same: the tokens in this order."""

    def __init__(self, order: Sequence[int]) -> None:
        super().__init__()
        self.order = np.array(order, np.int32)
        self.ends: dict[int, int] = {}

    def observe(self, values: Any, followed: Any) -> None:
        self.ends |= {one.session_id: one.first + len(one.rows) for one in followed}

    def known(self, session_id: int) -> int:
        return self.ends.get(session_id, 0)

    def growth(self, request: TreeRequest) -> Growth:
        self.shape: tuple[int, ...] = len(request.session_ids), 1
        return self

    def ranked(self, count: int) -> Ranked:
        own = self.order[:count]
        token_ids = np.broadcast_to(own, (*self.shape, len(own)))
        return Ranked(token_ids, np.broadcast_to(np.log(np.full(len(own), 0.3, np.float32)), token_ids.shape))

    def expand(self, parents: Any, token_ids: Any) -> None:
        self.shape = parents.shape


@pytest.mark.slow
@pytest.mark.parametrize("order", [[1, 2, 3, 4, 5, 6, 7, 8], [8, 7, 6, 5, 4, 3, 2, 1]], ids=["good", "bad"])
@pytest.mark.parametrize("speculation", [ASYNC, Speculation(mode="sync"), Speculation(tree=((0, 0, 0), (1, 1), (2,)))])
@pytest.mark.parametrize("strategy", ["probabilistic", "deterministic"])
def test_the_text_has_the_targets_distribution(order: list[int], speculation: Speculation, strategy: str) -> None:
    """A head chooses nodes by content, so these are point masses; whatever they are, tokens and pairs of tokens are as
    the target draws them."""
    tokens: list[int] = []
    accepted = 0
    for seed in (1, 2):
        verifier = Verifier(
            TappedMemoryless(), CURVE, [EagleSource(FixedTrees(order), 3)], incarnation=1, measures_drafts=False
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
