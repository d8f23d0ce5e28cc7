"""Sources of drafts: one suite over all kinds and their mixtures, and a verifier's sources together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from specq.drafting import SOURCES
from specq.drafting.block.source import BlockSource
from specq.drafting.draft_model.shaped import ShapedTrees
from specq.drafting.draft_model.source import ColocatedSource
from specq.drafting.eagle3.source import EagleSource
from specq.drafting.grammar.source import ForcedTokens
from specq.drafting.lookahead.source import LookaheadDecoder
from specq.drafting.medusa.source import MedusaSource
from specq.drafting.of_engine.source import OfEngine
from specq.drafting.suffix.source import SuffixDecoder
from specq.drafting.worker import DraftWorker
from specq.protocol import (
    COLOCATED,
    NO_TAP,
    NO_TREE,
    REMOTE,
    SUFFIX,
    ConfigError,
    Draft,
    SamplingParams,
    ScratchRows,
    SessionStep,
    Speculation,
    StepOutput,
    Tap,
)
from specq.testing.conformance.sources import PROMPT, Feed, Serving, SourceConformance
from specq.testing.toy import ToyEngine, toy_info, toy_text
from specq.testing.toy_drafters import ToyChains, ToyHeads, ToyProposer, ToyTrees
from specq.verification import StepBatch
from specq.verifier import Budget, ComputedDrafts, DraftBatch, DraftSource, StepCurve, Verifier
from specq.verifier.sessions.session import Session, SessionEvent
from specq.verifier.sources.mailbox import BATCH_NODES, LEAST_S, MAX_NODES, Mailbox
from specq.verifier.sources.source_set import SourceSet
from specq.verifier.step.node_choice import Shares
from specq.verifier.step.rounds import NO_ROUNDS, Round
from specq.verifier.trees import DraftTrees
from tests.verifier.sessions import live_nodes, make_draft, make_session, observe

ALL = frozenset([REMOTE, SUFFIX, COLOCATED, "watcher"])
LEVELS = StepCurve([1, 64], [0.0005, 0.0005])
BUDGET = Budget(StepCurve([1, 64], [0.005, 0.01]), 0.0)


class Both(DraftSource):
    """A mixture: a colocated drafter and suffix decoding, as one source."""

    name = "both"

    def __init__(self) -> None:
        own = ColocatedSource(ToyChains(ToyProposer(wrong_every=3)), LEVELS)
        self.parts = (own, SuffixDecoder(1000))

    @property
    def has_work(self) -> bool:
        return any(part.has_work for part in self.parts)

    def begin(self, sessions: Sequence[Session], budget: Budget, now: float) -> bool:
        begun = [part.begin(sessions, budget, now) for part in self.parts]
        return any(begun)

    def collect(self, sessions: Sequence[Session], budget: Budget, clock: Callable[[], float]) -> Sequence[DraftBatch]:
        return [draft for part in self.parts for draft in part.collect(sessions, budget, clock)]

    def observe(self, rounds: Sequence[Round], computed: Sequence[ComputedDrafts]) -> None:
        for part in self.parts:
            part.observe(rounds, computed)

    def refuse(self, session: Session) -> None:
        for part in self.parts:
            part.refuse(session)

    def close(self, session: Session) -> None:
        for part in self.parts:
            part.close(session)


def colocated(**options: Any) -> ColocatedSource:
    shaped = ShapedTrees(DraftWorker(ToyProposer(**options), incarnation=0))
    return ColocatedSource(ToyChains(ToyProposer(**options)), LEVELS, shaped=shaped)


MAKERS: dict[str, Callable[[], DraftSource | None]] = {
    "remote": lambda: None,
    "suffix": lambda: SuffixDecoder(10_000),
    "grammar": ForcedTokens,  # of sessions without one; tests/grammar/test_service.py has the others
    "lookahead": lambda: LookaheadDecoder(toy_info(), window=6, ngram=3, is_adaptive=False),
    "lookahead, adaptive": lambda: LookaheadDecoder(toy_info(), window=15, ngram=5),
    "colocated": lambda: colocated(wrong_every=4),
    "medusa": lambda: MedusaSource(ToyHeads(PROMPT, wrong_every=4)),
    "medusa, a tree": lambda: MedusaSource(ToyHeads(PROMPT, wrong_every=3), ((0, 1, 0), (0, 0, 0, 0), (1,))),
    "medusa, wrong": lambda: MedusaSource(ToyHeads(PROMPT, wrong_every=1, blind=True)),
    "eagle3": lambda: EagleSource(ToyTrees(wrong_every=4)),
    "eagle3, a tree": lambda: EagleSource(ToyTrees(wrong_every=3), 4, ((0, 1, 0), (0, 0, 0, 0), (1,))),
    "eagle3, wrong": lambda: EagleSource(ToyTrees(wrong_every=1, blind=True)),
    "block": lambda: BlockSource(ToyTrees(wrong_every=4)),
    "block, a tree": lambda: BlockSource(ToyTrees(wrong_every=3), 4, ((0, 1, 0), (0, 0, 0, 0), (1,))),
    "engine": lambda: OfEngine(6),
    "always wrong": lambda: colocated(wrong_every=1, blind=True),
    "mixture": Both,
}


def test_every_source_of_the_table_is_tested() -> None:
    """A new line of the table needs one here."""
    assert set(SOURCES) <= set(MAKERS)


@pytest.fixture(params=MAKERS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_source(kind: str) -> Callable[[], DraftSource | None]:
    return MAKERS[kind]


@pytest.fixture
def feed(kind: str) -> Feed:
    """Return what remote drafters do between two steps: two of them, one right, one wrong, beside every source but
    suffix decoding."""
    next_ids: dict[tuple[int, int, int], int] = {}

    def draft(verifier: Verifier) -> None:
        for session in verifier.sessions.values():
            for lane in (0, 1):
                key = session.session_id, session.epoch, lane
                tokens = toy_text(session.token_ids, 3, session.params.seed) if lane else [1, 2, 3]
                verifier.handle(remote(session, lane, next_ids.get(key, 0), tokens), 0.0)
                next_ids[key] = next_ids.get(key, 0) + len(tokens)

    return (lambda verifier: None) if kind == "suffix" else draft


def remote(session: Session, lane: int, first_id: int, tokens: list[int]) -> Draft:
    """Return a chain at the end of a session's text."""
    parents = [-1, *range(first_id, first_id + len(tokens) - 1)]
    return Draft(
        session_id=session.session_id, epoch=session.epoch, lane=lane, base_len=session.length, first_id=first_id,
        token_ids=np.array(tokens, np.int32), parent_ids=np.array(parents, np.int32),
        scores=np.full(len(tokens), -0.5, np.float16),
    )  # fmt: skip


class TestSources(SourceConformance):
    """Each source that there is, and a mixture."""


def test_drafts_take_no_longer_than_the_last_step() -> None:
    """However much they cost: of forty large ones that take 1 ms each, as many are hung as there is time for; the rest
    is dropped."""
    now = [100.0]
    trees = DraftTrees()
    sources, sessions = SourceSet((), ToyEngine()), [make_session(trees=trees, session_id=i) for i in range(80)]

    def clock() -> float:
        now[0] += 0.001
        return now[0]

    def put(some: Sequence[Session]) -> None:
        for session in some:
            sources.put(session, make_draft(3, 0, list(range(4, 4 + BATCH_NODES)), [-1] * BATCH_NODES))

    put(sessions[:40])
    sources.collect((), ALL, BUDGET, clock)
    num_hung = sum(session.num_live > 0 for session in sessions)
    assert num_hung == pytest.approx(LEAST_S / 0.001, abs=1)
    assert sources.num_dropped == 40 - num_hung
    sources.observe(NO_ROUNDS, (), 0.02)
    put(sessions[40:])
    sources.account(0.01)  # half of it went on receiving them
    sources.collect((), ALL, BUDGET, clock)
    assert sum(session.num_live > 0 for session in sessions[40:]) == pytest.approx(10, abs=1)


def test_a_mailbox_is_bounded() -> None:
    """What comes when it is full is dropped; when it was emptied, it takes drafts again."""
    mailbox, session = Mailbox(), make_session()
    draft = make_draft(3, 0, list(range(512)), [-1] * 512)
    taken = [mailbox.put(session, draft) for _ in range(MAX_NODES // 512 + 1)]
    assert taken == [True] * (MAX_NODES // 512) + [False]
    assert mailbox.clear() == MAX_NODES // 512
    assert mailbox.put(session, draft)


def test_sources_see_what_those_before_them_drafted() -> None:
    """What a text repeats stands back where a remote draft promises more."""
    phrase = list(range(10, 22))
    session = make_session([*phrase, 1, 2, 3, *phrase[:3]])
    suffix = SuffixDecoder()
    (alone,) = suffix.collect([session], BUDGET, lambda: 0.0)
    assert alone.token_ids[0] == phrase[3]
    sources = SourceSet((suffix,), ToyEngine())
    rival = make_draft(session.length, 0, [*phrase[3:], 1, 2, 3], list(range(-1, 11)))
    for _ in range(60):
        observe(session, 0, float(rival.scores[0]), accepted=True)
    sources.put(session, rival)
    sources.collect([session], ALL, BUDGET, lambda: 0.0)
    assert {node.lane for node in live_nodes(session)} == {0}


class Watcher(DraftSource):
    """Drafts nothing, and keeps what it is shown: hidden states of both layers, and the logits of scratch rows."""

    name = "watcher"
    layers = (0, 1)
    uses_scratch = True

    def __init__(self) -> None:
        self.hidden: list[tuple[int, int]] = []  # (layer, token) of each row that was shown
        self.scratch_tokens: list[list[int]] = []
        self.asked: list[list[int]] = []

    def collect(self, sessions: Sequence[Session], budget: Budget, clock: Callable[[], float]) -> Sequence[DraftBatch]:
        return ()

    def scratch(self, session: Session) -> ScratchRows:
        """Return a chain of two tokens that follow the context."""
        end = session.length
        return ScratchRows(np.array([9, 8], np.int32), np.array([-1, 0], np.int32), np.array([end, end + 1], np.int32))

    def wants_prompt(self, session: Session) -> bool:
        return True

    def observe(self, rounds: Sequence[Round], computed: Sequence[ComputedDrafts]) -> None:
        for shares, output in computed:
            assert output.hidden is not None
            for i, share in enumerate(shares):
                rows = output.hidden.of(i)  # [rows, (layer, position, token) of each layer]
                self.hidden += [(int(row[3]), int(row[2])) for row in rows]
                if share.step.judged and output.scratch_logits is not None:
                    self.scratch_tokens.append(output.scratch_logits.of(i).argmax(1).tolist())
                    self.asked.append([*share.session.token_ids[: share.step.base_len], 9, 8])


def test_a_prompts_rows_are_asked_for_however_few_they_are() -> None:
    """Also for an unjudged chunk of one token. Not for a decoding session, whose rows are all given anyway."""
    trees = DraftTrees()
    sessions = [make_session(trees=trees, session_id=i) for i in range(3)]
    steps = [
        SessionStep(
            session_id=i, start=0, token_ids=np.arange(count, dtype=np.int32), judged=judged, params=SamplingParams(),
            tree=NO_TREE,
        )
        for i, (count, judged) in enumerate([(1, False), (1, True), (3, False)])
    ]  # fmt: skip
    places = np.array([session.place for session in sessions])
    shares = Shares(sessions, places, StepBatch.of(steps), np.zeros(0, np.int32))
    sources = SourceSet([Watcher()], ToyEngine())
    assert sources.tap(shares) == Tap((0, 1), frozenset([0, 2]))
    sources.control(frozenset(), frozenset([Watcher.name]))
    assert sources.tap(shares) == NO_TAP, "it sleeps"


@pytest.mark.parametrize("others", [0, 1])
def test_a_source_is_shown_what_it_asks_for(others: int) -> None:
    """Hidden states of each row, the prompt's included, and logits of scratch rows behind any tree; the text is the
    target's."""
    watcher = Watcher()
    drafter = ColocatedSource(ToyChains(ToyProposer(wrong_every=3)), LEVELS)
    serving = Serving([*[drafter][:others], watcher], lambda verifier: None)
    serving.open(0)
    assert serving.finish()[0] == toy_text([5, 6, 7], 40)
    assert watcher.hidden[:3] == [(1, 5), (1, 6), (1, 7)]
    assert len(watcher.scratch_tokens) > 10
    for found, context in zip(watcher.scratch_tokens, watcher.asked, strict=True):
        if found:
            assert found == [toy_text(context[:-1], 1)[0], toy_text(context, 1)[0]]


def test_the_engines_own_drafts_are_accepted() -> None:
    """A step drafts for the next one, and each level is judged by its own outcomes. A source that sleeps asks for
    nothing, one without sessions lets the drafter follow."""
    source = OfEngine(6)
    serving = Serving([source], lambda verifier: None)
    serving.open(0)
    assert serving.finish()[0] == toy_text([5, 6, 7], 40)
    assert serving.verifier.num_steps < 20
    sources, shares = serving.verifier.sources, plain_shares()
    source.collect((), BUDGET, lambda: 0.0)
    assert sources.tap(shares) == Tap(drafts=0)
    source.collect(shares.sessions, BUDGET, lambda: 0.0)
    assert sources.tap(shares) == Tap(drafts=6)
    shares.sessions[0].takes_drafts = False
    assert sources.tap(shares) == NO_TAP, "no session takes drafts"
    source.collect(shares.sessions, BUDGET, lambda: 0.0)
    shares.sessions[0].takes_drafts = True
    assert sources.tap(shares) == Tap(drafts=0)
    sources.control(frozenset(), frozenset([OfEngine.name]))
    assert sources.tap(shares) == NO_TAP


@pytest.mark.parametrize("mode", ["sync", "jit"])
def test_a_job_that_waits_for_drafts_has_the_engines_at_once(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind its prompt, too. No heartbeat passes in which it waits."""
    serving = Serving([OfEngine(6)], lambda verifier: None)
    monkeypatch.setattr(serving.verifier, "heartbeat", lambda: None)
    serving.open(0, mode=mode)
    while not serving.verifier.sessions[0].finish:
        serving.verifier.begin(0.0)
        assert serving.verifier.has_work, "it waits"
        serving.step()
    assert serving.texts[0] == toy_text([5, 6, 7], 40)
    assert serving.verifier.num_steps < 20


def plain_shares() -> Shares:
    """Return the shares of a step with one decoding session."""
    session = make_session()
    session.note(SessionEvent.ADMITTED)
    step = SessionStep(3, 0, np.array([7], np.int32), SamplingParams(), NO_TREE)
    return Shares([session], np.array([session.place]), StepBatch.of([step]), np.zeros(0, np.int32))


def test_the_engines_drafts_are_for_the_text_that_they_follow() -> None:
    """Once, for the session that it was, in the levels that its job allows; not for a job that asks for a tree."""
    source, shares = OfEngine(3), plain_shares()
    (session,) = shares.sessions
    output = StepOutput((), drafts=np.array([[4, 5, -1]], np.int32))
    source.observe(NO_ROUNDS, [ComputedDrafts(shares, output)])
    (batch,) = source.collect([session], BUDGET, lambda: 0.0)
    assert batch.token_ids.tolist() == [4, 5]
    assert not source.collect([session], BUDGET, lambda: 0.0)
    source.observe(NO_ROUNDS, [ComputedDrafts(shares, output)])
    assert not source.collect([make_session(session_id=session.session_id)], BUDGET, lambda: 0.0)
    session.speculation = Speculation(max_depth=1)
    source.observe(NO_ROUNDS, [ComputedDrafts(shares, output)])
    (batch,) = source.collect([session], BUDGET, lambda: 0.0)
    assert batch.token_ids.tolist() == [4]
    session.speculation = Speculation(num_candidates=2)
    source.observe(NO_ROUNDS, [ComputedDrafts(shares, output)])
    assert not source.collect([session], BUDGET, lambda: 0.0)


def test_scratch_rows_are_for_one_step() -> None:
    """Those of a session that was evicted, or must wait, would stand at positions of before when it comes back."""
    trees = DraftTrees()
    first, second = make_session(session_id=1, trees=trees), make_session(session_id=2, trees=trees)
    sources = SourceSet([Watcher()], ToyEngine())
    sources.collect([first, second], ALL, BUDGET, lambda: 0.0)
    assert (first.scratch.num_rows, second.scratch.num_rows) == (2, 2)
    sources.collect([second], ALL, BUDGET, lambda: 0.0)
    assert (first.scratch.num_rows, second.scratch.num_rows) == (0, 2)
    assert trees.num_scratch.sum() == 2


def test_scratch_rows_are_skipped_without_room() -> None:
    """Sessions take part with their plain rows."""
    watcher = Watcher()
    serving = Serving([watcher], lambda verifier: None, max_step_rows=4)
    for i in range(3):
        serving.open(i, seed=i)
    assert serving.finish() == {i: toy_text([5, 6, 7], 40, i) for i in range(3)}
    assert any(watcher.scratch_tokens), "where two sessions are left, there is room for one's"
    assert max(serving.verifier.engine.num_rows) <= 4


@pytest.mark.parametrize(("limit", "said"), [("num_tap_layers", "gives none"), ("takes_scratch", "does not support")])
def test_what_the_engine_does_not_give_is_refused_at_start(limit: str, said: str) -> None:
    """With the source's name and the engine's."""
    engine = ToyEngine()
    setattr(engine, limit, 0)
    with pytest.raises(ConfigError, match=f"watcher .* the toy engine {said}"):
        Verifier(engine, StepCurve([1, 64], [0.005, 0.01]), [Watcher()], incarnation=1)


def test_a_verifier_serves_without_any_source() -> None:
    """It then drafts no tokens, and works without them."""
    verifier = Verifier(ToyEngine(), StepCurve([1, 64], [0.005, 0.01]), incarnation=1)
    assert [source.name for source in verifier.sources.sources] == ["remote"]
    assert not verifier.has_work
