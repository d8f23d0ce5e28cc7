"""Steps that are launched before the last one is collected: the text is the same for any late finding."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specq.drafting.draft_model import source as colocated
from specq.drafting.suffix.source import SuffixDecoder
from specq.protocol.arrays import Int32Array
from specq.protocol.errors import SpecqError
from specq.protocol.messages import Ack, Close, Draft, Open, SessionFailed
from specq.protocol.params import SamplingParams, Speculation
from specq.testing.late import LateEngine, LateStep
from specq.testing.tokenizer import tokenizer_files
from specq.testing.toy import ToyEngine, toy_info, toy_text
from specq.text.codec import TextCodec
from specq.verification import StepBatch
from specq.verifier import core
from specq.verifier.control.choices import Step
from specq.verifier.core import Verifier
from specq.verifier.models.step_curve import StepCurve
from specq.verifier.models.step_time import StepTime
from specq.verifier.sessions import open_sessions as kv_admission
from specq.verifier.sessions.open_sessions import OpenSessions
from specq.verifier.sources import SourceSet
from specq.verifier.step import in_flight
from specq.verifier.step import plan as planner
from specq.verifier.step.in_flight import StepsInFlight
from tests.verifier.random_service import FailingLater, serve

PROMPT = [5, 6, 7]
PLAIN = Speculation(mode="plain")
NUM_ACTS = 60
KINDS = [{"overlaps": True}, {"overlaps": True, "is_apart": True}, {"overlaps": False}]  # of engines


def make_verifier(engine: ToyEngine | None = None, **options: Any) -> Verifier:
    return Verifier(engine or LateEngine(), StepCurve([1, 64], [0.005, 0.01]), incarnation=1, **options)


def open_session(
    verifier: Verifier, session_id: int = 7, tokens_left: int = 12, speculation: Speculation = PLAIN, **params: Any
) -> None:
    message = Open(
        session_id=session_id, epoch=1, prompt_len=3, tokens_left=tokens_left, params=SamplingParams(**params),
        token_ids=np.array(PROMPT, np.int32), speculation=speculation,
    )  # fmt: skip
    assert verifier.handle(message, 0.0) == []


def step(verifier: Verifier) -> list[Any]:
    return list(verifier.step(lambda: 0.0))


def run(verifier: Verifier) -> dict[int, list[int]]:
    """Step until all work is done. Return the verdicts of each session."""
    texts: dict[int, list[int]] = {i: [] for i in verifier.sessions}
    for _ in range(100):
        if not verifier.has_work:
            return texts
        for message in step(verifier):
            texts[message.session_id] += message.token_ids.tolist()
    raise AssertionError("the sessions never end")


# --- at random
# ----------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(random=st.randoms(use_true_random=True), kind=st.sampled_from(KINDS))
def test_texts_are_the_targets_own(random: Random, kind: dict[str, bool]) -> None:
    """With sessions that come and go, stop, are drafted for, wait for the journal, and with steps that fail."""
    serve(random, NUM_ACTS, **kind)


@settings(max_examples=40, deadline=None)
@given(random=st.randoms(use_true_random=True), kind=st.sampled_from(KINDS))
def test_texts_with_chains_are_the_targets_own(random: Random, kind: dict[str, bool]) -> None:
    """With a colocated drafter whose chains are verified before they are read, or cannot be read; and drafts of others
    beside it."""
    serve(random, NUM_ACTS, **kind, has_chains=True)


def test_chains_are_verified_unread_in_the_random_service() -> None:
    """Where steps can be launched with them, and nowhere else."""
    for overlaps in (True, False):
        served = [serve(Random(seed), NUM_ACTS, overlaps=overlaps, has_chains=True) for seed in range(5)]
        assert (sum(service.chains.num_unread for service in served) > 10) is overlaps


def _looks_at_all(shares: Any, *arguments: Any, commit: Any = core.commit, **_options: Any) -> Any:
    return commit(shares, *arguments)


def _next_ones(chunks: Any, before: Any, fed_by: Any = planner._fed_by) -> Any:
    found = fed_by(chunks, before)
    return None if found is None else np.where(found > 0, found - 1, found)


def _keeps_those_behind(self: StepsInFlight) -> None:
    self._steps.clear()


def _forgets_starts(self: StepsInFlight) -> None:
    while self._steps:
        for _, launched in self._steps.pop().parts:
            launched.discard()


def _discards_one(self: StepsInFlight, discard: Any = StepsInFlight._discard_behind) -> None:
    older = [self._steps.popleft() for _ in range(len(self) - 1)]
    discard(self)
    self._steps.extend(older)


def _lets_all_go_on(self: OpenSessions, _: Any) -> bool:
    return True


def _forgets_histories(self: OpenSessions, look: Any = OpenSessions._look) -> Any:
    found = look(self)
    return found._replace(joins=found.runs)


MUTANTS: dict[str, tuple[object, str, Callable[..., object]]] = {
    "what is said of sessions that ended is looked at": (core, "commit", _looks_at_all),
    "a session is fed with another's token": (planner, "_fed_by", _next_ones),
    "a step behind one that failed is not discarded": (StepsInFlight, "_discard_behind", _keeps_those_behind),
    "sessions of a discarded step are not as they were": (StepsInFlight, "_discard_behind", _forgets_starts),
    "any step is followed": (StepsInFlight, "can_follow", lambda self, step: self._engine.overlaps and step.parts),
    "all are fed, whatever their tokens depend on": (OpenSessions, "_look", _forgets_histories),
    "steps are repeated with tokens that were not known": (StepBatch, "fed", lambda self, _: self),
    "ended sessions are computed again": (in_flight, "_again", lambda shares: shares),
}


def _serve_some(*, is_apart: bool = False, has_chains: bool = False) -> None:
    for seed in range(40):
        serve(Random(seed), NUM_ACTS, is_apart=is_apart, has_chains=has_chains)


@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("name", MUTANTS)
def test_the_random_service_finds(name: str, is_apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above is worth: each of these mistakes breaks a rule within a few runs."""
    owner, attribute, mutant = MUTANTS[name]
    monkeypatch.setattr(owner, attribute, mutant)
    with pytest.raises((AssertionError, SpecqError, KeyError)):  # the text is wrong, or a check of the engine's fails
        _serve_some(is_apart=is_apart)


APART_MUTANTS: dict[str, tuple[object, str, Callable[..., object]]] = {
    "of two steps behind one that failed the newest alone is discarded": (
        StepsInFlight,
        "_discard_behind",
        _discards_one,
    ),
    "any step is planned behind two others": (OpenSessions, "all_go_on", _lets_all_go_on),
}


@pytest.mark.parametrize("name", APART_MUTANTS)
def test_the_random_service_with_steps_launched_by_others_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where three steps may be in flight."""
    owner, attribute, mutant = APART_MUTANTS[name]
    monkeypatch.setattr(owner, attribute, mutant)
    with pytest.raises((AssertionError, SpecqError, KeyError)):
        _serve_some(is_apart=True)


CHAIN_MUTANTS: dict[str, tuple[object, str, Callable[..., object]]] = {
    "chains hang unread beside other nodes": (colocated, "may_be_unread", lambda *_: True),
    "what hangs unread is not read": (SourceSet, "read", lambda *_: False),
}


@pytest.mark.parametrize("name", CHAIN_MUTANTS)
def test_the_random_service_with_chains_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same of chains that are verified before they are read."""
    owner, attribute, mutant = CHAIN_MUTANTS[name]
    monkeypatch.setattr(owner, attribute, mutant)
    with pytest.raises((AssertionError, SpecqError)):
        _serve_some(has_chains=True)


# --- one by one
# ---------------------------------------------------------------------------------------------------------


def test_the_next_step_is_launched_before_the_last_one_is_collected() -> None:
    """Its verdicts come a call later; at most two steps are in flight, and no token is computed twice."""
    engine = LateEngine()
    verifier = make_verifier(engine)
    open_session(verifier)
    assert step(verifier) == []
    assert (len(engine.flights), verifier.sessions[7].length) == (1, 3)
    (verdict,) = step(verifier)
    assert verdict.token_ids.tolist() == toy_text(PROMPT, 1)
    assert (len(engine.flights), engine.most) == (1, 2)
    assert verdict.token_ids.tolist() + run(verifier)[7] == toy_text(PROMPT, 12)
    assert engine.num_launched == 12  # the end by length is foreseen


def apart() -> LateEngine:
    """Return an engine whose steps other processes launch."""
    engine = LateEngine()
    engine.is_apart = True
    return engine


def test_the_next_step_is_launched_before_the_last_one_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two steps are in flight while the host does other things, and a third is launched before it waits for the oldest;
    no token is computed twice."""
    engine = apart()
    verifier, told = make_verifier(engine), list[int]()
    monkeypatch.setattr(verifier.sources, "observe", lambda *_: told.append(engine.num_launched))
    open_session(verifier)
    assert [step(verifier), step(verifier)] == [[], []]
    assert (len(engine.flights), engine.most, told) == (2, 2, [])
    (verdict,) = step(verifier)
    assert verdict.token_ids.tolist() == toy_text(PROMPT, 1)
    assert (len(engine.flights), engine.most, told) == (2, 3, [3])
    assert verdict.token_ids.tolist() + run(verifier)[7] == toy_text(PROMPT, 12)
    assert told == [*range(3, 13), 12, 12]  # the end by length is foreseen
    assert engine.num_launched == 12


def test_a_session_that_ends_beside_two_steps_in_flight_reports_no_more() -> None:
    """A text that stops wastes two rows, one more than elsewhere."""
    engine, text = apart(), toy_text(PROMPT, 12)
    verifier = make_verifier(engine)
    open_session(verifier, 7, stop_token_ids=(text[3],))
    open_session(verifier, 8, tokens_left=30)
    for _ in range(2):
        step(verifier)
    verifier.handle(Close(session_id=8, epoch=1), 0.0)
    assert run(verifier) == {7: text[:4]}
    assert engine.num_launched == 4 + 2
    verifier.handle(Close(session_id=7, epoch=1), 0.0)
    assert engine.free_slots == engine.info.kv_slots


def test_a_step_that_cannot_be_judged_early_is_judged_when_it_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that was committed before goes unreported."""

    def fails(_: LateStep) -> None:
        raise MemoryError

    monkeypatch.setattr(LateStep, "judge", fails)
    verifier = make_verifier(LateEngine())
    open_session(verifier)
    assert run(verifier)[7] == toy_text(PROMPT, 12)


@pytest.mark.parametrize("number", [3, 4])
def test_of_the_steps_in_flight_the_oldest_may_fail(number: int) -> None:
    """The two launched behind it are discarded then, and every session goes on; what had ended is said before what came
    of the repetition."""
    engine = apart()
    engine.failing[number] = RuntimeError("once")
    verifier = make_verifier(engine)
    for session_id in (7, 8):
        open_session(verifier, session_id)
    assert run(verifier) == {7: toy_text(PROMPT, 12), 8: toy_text(PROMPT, 12)}
    assert engine.num_discarded == 2


def test_a_burst_is_awaited_beside_two_steps_in_flight() -> None:
    """Of those in flight no token is known to be pending."""
    verifier = make_verifier(apart())
    open_session(verifier, 7, tokens_left=30)
    for _ in range(4):
        step(verifier)
    assert verifier.sessions.num_pending() == 0
    open_session(verifier, 8)
    assert verifier.sessions.num_pending() == len(PROMPT)


@pytest.mark.parametrize(
    "what", [{"stop_token_ids": (toy_text(PROMPT, 4)[3],)}, {"stop": "string"}], ids=["id", "text"]
)
def test_a_late_stop_wastes_a_row_and_no_token(what: dict[str, Any]) -> None:
    files, text = tokenizer_files(), toy_text(PROMPT, 4)
    params = {"stop": (TextCodec(files).decode(text[3:]),)} if "stop" in what else what
    engine = LateEngine()
    verifier = make_verifier(engine, tokenizer_files=files)
    open_session(verifier, **params)
    assert run(verifier)[7] == text
    assert (verifier.sessions[7].finish, engine.num_launched) == ("stop", 5)
    assert (len(engine.contexts[7]), verifier.sessions[7].length) == (7, 7)
    verifier.handle(Close(session_id=7, epoch=1), 0.0)
    assert engine.free_slots == engine.info.kv_slots


def test_a_closed_session_reports_no_more_tokens() -> None:
    engine = LateEngine()
    verifier = make_verifier(engine)
    for session_id in (7, 8):
        open_session(verifier, session_id)
    step(verifier)
    verifier.handle(Close(session_id=7, epoch=1), 0.0)
    assert run(verifier) == {8: toy_text(PROMPT, 12)}
    assert engine.free_slots == engine.info.kv_slots - len(engine.contexts[8])


@pytest.mark.parametrize("is_apart", [False, True])
def test_a_session_joins_while_others_run(is_apart: bool) -> None:
    """A step that computes its prompt is followed as any other."""
    engine = apart() if is_apart else LateEngine()
    verifier = make_verifier(engine, max_step_rows=2)
    open_session(verifier, 7, 20)
    for _ in range(6):
        step(verifier)
    open_session(verifier, 8, 20)
    said = 0
    while verifier.has_work:
        assert len(engine.flights) in ((1, 2) if is_apart else (1,))  # it never drains
        said += sum(len(verdict.token_ids) for verdict in step(verifier))
    assert verifier.sessions[8].token_ids == PROMPT + toy_text(PROMPT, 20)
    assert said > 20


@pytest.mark.parametrize(
    ("mode", "sources", "params", "is_followed"),
    [
        ("plain", [SuffixDecoder()], {}, True),
        ("async", [], {}, True),
        ("async", [SuffixDecoder()], {}, False),
        ("sync", [], {}, False),
        ("jit", [], {}, False),
        ("plain", [], {"presence_penalty": 0.1}, False),
        ("plain", [], {"logprobs": 0}, True),
        ("plain", [], {"logit_bias": ((3, 1.0),)}, True),
        ("plain", [], {"bad_token_ids": ((60, 61),)}, False),
    ],
)
def test_sessions_that_need_the_host_are_waited_for(
    mode: str, sources: list[Any], params: dict[str, Any], is_followed: bool
) -> None:
    engine = LateEngine()
    verifier = make_verifier(engine, sources=sources, measures_drafts=False)
    open_session(verifier, speculation=Speculation(mode=mode), **params)
    step(verifier)
    assert bool(engine.flights) == is_followed


@pytest.mark.parametrize(("num_shaped", "is_followed"), [(3, True), (4, False)])
def test_few_sessions_that_need_the_host_join_every_second_step(
    num_shaped: int, is_followed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What launching early saves of all sessions, a fifth of a step here, must be more than half a token of each of
    these."""
    engine = LateEngine()
    verifier = make_verifier(engine)
    monkeypatch.setattr(StepTime, "saved_s", verifier.curve(10) / 5.9)
    verifier.policy.learn = lambda _: None  # type: ignore[method-assign]
    for session_id in range(10):
        open_session(verifier, session_id, presence_penalty=0.1 * (session_id < num_shaped))
    lengths = list[list[int]]()
    for _ in range(8):
        step(verifier)
        lengths.append([verifier.sessions[i].length for i in range(10)])
    assert bool(engine.flights) == is_followed
    grown = np.diff(lengths[-5:], axis=0)
    assert (grown[:, num_shaped:] == 1).all()
    assert grown[:, :num_shaped].sum(0).tolist() == [2 if is_followed else 4] * num_shaped
    assert {tuple(text) for text in run_on(verifier)} == {tuple(toy_text(PROMPT, 12))}


def run_on(verifier: Verifier) -> list[list[int]]:
    """Step until all work is done. Return the texts."""
    run(verifier)
    return [session.token_ids[len(PROMPT) :] for session in verifier.sessions.values()]


@pytest.mark.parametrize(("num_sessions", "is_put_off"), [(1, False), (3, False), (4, True), (10, True)])
def test_after_a_burst_drafts_begin_when_the_load_is_known(
    num_sessions: int, is_put_off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others of the burst have arrived during the step; few sessions are drafted for at once."""
    verifier = make_verifier(LateEngine(), sources=[SuffixDecoder()], measures_drafts=False)
    begun, loads = list[int](), list[int]()
    monkeypatch.setattr(verifier.sources, "begin", lambda sessions, *_: begun.append(len(sessions)))
    meet = verifier.policy.meet
    monkeypatch.setattr(verifier.policy, "meet", lambda num: loads.append(num) or meet(num))
    for session_id in range(num_sessions):
        open_session(verifier, session_id, speculation=Speculation())
    step(verifier)
    verifier.begin(0.0)
    assert begun == [num_sessions] * (not is_put_off)
    for session_id in range(num_sessions, num_sessions + 20):
        open_session(verifier, session_id, speculation=Speculation())
    step(verifier)
    assert begun[0] == num_sessions
    assert loads == [num_sessions, num_sessions + 20]


def test_nodes_that_come_while_a_step_is_in_flight_are_verified_after_it() -> None:
    """They hang from the text as it is committed; what the step says decides which of them live on."""
    engine = LateEngine()
    verifier = make_verifier(engine)
    open_session(verifier, speculation=Speculation())
    step(verifier)
    text = toy_text(PROMPT, 12)
    draft = Draft(
        session_id=7, epoch=1, lane=0, base_len=3, first_id=0, token_ids=np.array(text[:4], np.int32),
        parent_ids=np.arange(-1, 3, dtype=np.int32), scores=np.full(4, -0.1, np.float16),
    )  # fmt: skip
    verifier.handle(draft, 0.0)
    (first,) = step(verifier)
    assert (first.token_ids.tolist(), engine.flights) == (text[:1], [])
    (second,) = step(verifier)
    assert second.token_ids.tolist() == text[1:5]
    assert second.mask.tolist() == [1, 1, 1]


def test_a_session_far_ahead_of_the_journal_pauses_at_the_same_token() -> None:
    """As far ahead as without overlap."""
    found = []
    for engine in (LateEngine(), apart(), ToyEngine()):
        verifier = make_verifier(engine, max_uncommitted=5)
        open_session(verifier, tokens_left=50)
        run(verifier)
        found.append(verifier.sessions[7].length)
        verifier.handle(Ack(session_id=7, epoch=1, length=9), 0.0)
        run(verifier)
        found.append(verifier.sessions[7].length)
    assert found == [9, 15] * 3


def test_reports_contain_only_committed_tokens() -> None:
    """Heartbeats and repeated messages do not include a step in flight."""
    verifier = make_verifier()
    open_session(verifier)
    step(verifier)
    step(verifier)
    assert verifier.heartbeat().lengths.tolist() == [4]
    (again,) = verifier.handle(Ack(session_id=7, epoch=1, length=3, resend=True), 0.0)
    assert again.token_ids.tolist() == toy_text(PROMPT, 1)


def test_a_step_that_fails_when_it_is_collected_is_repeated() -> None:
    """What was launched behind it is discarded; every session goes on."""
    engine = LateEngine()
    engine.failing[3] = RuntimeError("once")
    verifier = make_verifier(engine)
    for session_id in (7, 8):
        open_session(verifier, session_id)
    assert run(verifier) == {7: toy_text(PROMPT, 12), 8: toy_text(PROMPT, 12)}
    assert engine.num_discarded == 1


@pytest.mark.parametrize("owner", ["", "ann", "+digest ann"])
def test_another_owner_s_prompt_is_not_waited_for(owner: str) -> None:
    """It cannot be shared, and the wait would reveal that it is the same."""
    verifier, prompt = make_verifier(LateEngine()), np.arange(1, 41, dtype=np.int32)
    for session_id, own in ((7, "ben"), (8, owner)):
        message = Open(
            session_id=session_id, epoch=1, prompt_len=40, tokens_left=5, params=SamplingParams(), token_ids=prompt,
            speculation=PLAIN, owner=own,
        )  # fmt: skip
        verifier.handle(message, 0.0)
    step(verifier)
    assert verifier.sessions[7].is_open
    assert verifier.sessions[8].is_open


def test_sessions_wait_for_a_shared_prompt_in_flight() -> None:
    engine = LateEngine()
    verifier = make_verifier(engine)
    prompt = np.arange(1, 41, dtype=np.int32)
    for session_id in (7, 8):
        message = Open(
            session_id=session_id, epoch=1, prompt_len=40, tokens_left=5, params=SamplingParams(), token_ids=prompt,
            speculation=PLAIN,
        )  # fmt: skip
        verifier.handle(message, 0.0)
        step(verifier)
    assert not verifier.sessions[8].is_open
    step(verifier)
    assert verifier.sessions[8].is_open


class KnowingEngine(LateEngine):
    """Has KV of the first 32 tokens of all contexts."""

    def open(self, session_id: int, token_ids: Int32Array, owner: str = "") -> int:
        start: int = super().open(session_id, token_ids) + 32
        self.contexts[session_id] = token_ids[:start].tolist()
        return start


def test_a_prompt_that_is_in_flight_is_not_waited_for_where_it_shares_no_more() -> None:
    """What both begin with had KV before: the second opens behind the step in which the first computes its own part."""
    verifier = make_verifier(KnowingEngine())
    for session_id, own in ((7, 41), (8, 42)):
        message = Open(
            session_id=session_id, epoch=1, prompt_len=41, tokens_left=5, params=SamplingParams(),
            token_ids=np.array([*range(1, 41), own], np.int32), speculation=PLAIN,
        )  # fmt: skip
        verifier.handle(message, 0.0)
        step(verifier)
    assert verifier.sessions[8].is_open


@pytest.mark.parametrize("is_apart", [False, True])
def test_sessions_in_flight_are_not_evicted(is_apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room, the step in flight ends first."""
    engine = LateEngine(toy_info(kv_slots=30))
    engine.is_apart = is_apart
    verifier = make_verifier(engine)
    evict = kv_admission._evict

    def checked(session: Any, of: Any) -> None:
        assert not engine.flights
        evict(session, of)

    monkeypatch.setattr(kv_admission, "_evict", checked)
    for session_id in (7, 8):
        open_session(verifier, session_id, 20)
    texts = run(verifier)
    assert set(map(tuple, texts.values())) == {tuple(toy_text(PROMPT, 20))}


def test_the_controller_learns_from_whole_steps() -> None:
    """A step takes from the end of the one before to its own end, however early it was launched; which it says."""
    verifier = make_verifier()
    open_session(verifier, tokens_left=30, speculation=Speculation(mode="async"))
    learned = list[Step]()
    verifier.policy.learn = learned.append  # type: ignore[method-assign]
    now = iter(range(10_000))
    ends = []
    while verifier.has_work:
        if list(verifier.step(lambda: float(next(now)))):
            ends.append(verifier.control.last_end)
    verifier.control.learn()
    assert [step.seconds for step in learned[:-1]] == [end - start for start, end in pairwise(ends[:-1])]
    assert {step.kind.is_early for step in learned} == {True}


# --- faults and bursts beside three steps
# ---------------------------------------------------------------------------------


def _planned_in_vain(session_id: int, from_call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plans with a session raise from some call on."""
    plan, calls = planner.plan, list[int]()

    def planned(sessions: Any, *arguments: Any, **options: Any) -> Any:
        calls.append(0)
        if len(calls) >= from_call and any(session.session_id == session_id for session in sessions):
            raise ValueError("a plan")
        return plan(sessions, *arguments, **options)

    monkeypatch.setattr(planner, "plan", planned)


def test_a_session_at_fault_in_the_oldest_step_and_in_the_next_plan_fails_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step is planned before the oldest says what is wrong with it."""
    engine = FailingLater()
    engine.is_apart, engine.bad = True, set()
    verifier = make_verifier(engine)
    for session_id in (7, 8):
        open_session(verifier, session_id)
    for _ in range(4):
        step(verifier)
    assert len(engine.flights) == 2
    engine.bad.add(7)
    _planned_in_vain(7, 0, monkeypatch)
    said = step(verifier)
    assert [one.session_id for one in said if isinstance(one, SessionFailed)] == [7]
    assert 7 not in verifier.sessions


def test_a_text_that_has_ended_does_not_fail_by_the_next_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops in the oldest step, when the next one was planned in vain."""
    text = toy_text(PROMPT, 30)
    verifier = make_verifier(apart())
    open_session(verifier, 7, 30, stop_token_ids=(text[4],))
    open_session(verifier, 8, 30)
    _planned_in_vain(7, 5 + 2, monkeypatch)  # when two steps behind the fourth token's are in flight
    said = [one for _ in range(12) if verifier.has_work for one in step(verifier) if one.session_id == 7]
    assert [one for one in said if isinstance(one, SessionFailed)] == []
    assert (said[-1].finish, verifier.sessions[7].token_ids) == ("stop", PROMPT + text[:5])


def test_sources_begin_after_a_burst_beside_steps_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Either the host lets them begin between two steps, or the step does."""
    verifier, begun = make_verifier(apart()), list[int]()
    monkeypatch.setattr(verifier.sources, "begin", lambda *_, **__: begun.append(0))
    for session_id in range(20):
        open_session(verifier, session_id, 30)
    for number in range(1, 9):
        verifier.begin(0.0)
        step(verifier)
        assert len(begun) == number


class BlockEngine(ToyEngine):
    """KV in blocks of sixteen tokens that belong to one session each; where more sessions need another one than there
    are, nothing is free."""

    num_blocks = 9

    @property
    def free_slots(self) -> int:
        lengths = [len(context) for context in self.contexts.values()]
        free = self.num_blocks - sum(-(-length // 16) for length in lengths)
        if sum(length % 16 == 0 for length in lengths) > free:
            return 0
        return 16 * free + sum(-length % 16 for length in lengths)


def test_sessions_that_have_no_room_let_others_go_on() -> None:
    """More sessions than a step may have, all blocks in use: it is the turn of two that fit only into what others have
    left of theirs."""
    engine = BlockEngine()
    verifier = make_verifier(engine, max_sessions=2)
    for session_id in (7, 8, 9, 10, 11):
        if session_id == 10:
            for _ in range(48):
                step(verifier)
            assert {-(-len(context) // 16) for context in engine.contexts.values()} == {3}
        open_session(verifier, session_id, 40 if session_id < 10 else 3)
    texts = run(verifier)
    assert [len(verifier.sessions[i].token_ids) for i in (7, 8, 9, 10, 11)] == [43, 43, 43, 6, 6]
    assert texts[10] == texts[11] == toy_text(PROMPT, 3)
