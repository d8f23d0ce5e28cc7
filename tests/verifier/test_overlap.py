"""Steps that are launched before the last one is collected: the text is the same for any late finding."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specq.drafting.suffix.source import SuffixDecoder
from specq.protocol.messages import Ack, Close, Draft
from specq.protocol.params import Speculation
from specq.testing.late import LateEngine, LateStep
from specq.testing.tokenizer import tokenizer_files
from specq.testing.toy import ToyEngine, toy_text
from specq.text.codec import TextCodec
from specq.verifier.core import Verifier
from specq.verifier.models.step_time import StepTime
from tests.verifier.overlapping import NUM_ACTS, PROMPT, apart, make_verifier, open_session, run, step
from tests.verifier.random_service import serve

KINDS = [{"overlaps": True}, {"overlaps": True, "is_apart": True}, {"overlaps": False}]  # of engines


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
