"""A draft worker that serves several brokers: whose sessions are whose, and where drafts go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specq.config import DraftConfig
from specq.drafting.worker import DraftWorker
from specq.processes.draft import DrafterLoop
from specq.protocol import (
    Activations,
    Assign,
    Brokers,
    Clock,
    Draft,
    GetClock,
    Heartbeat,
    Hello,
    Message,
    ProtocolError,
    Release,
    SamplingParams,
    TraceEvents,
    Verdicts,
    Welcome,
)
from specq.testing.fake_broker import FakeBroker
from specq.testing.toy import toy_info, toy_text
from specq.testing.toy_drafters import ToyProposer
from specq.testing.waiting import wait_until
from specq.transport import broker_links
from tests.drafting.worker.sessions import PROMPT, verdict

ONE, TWO = "tcp://one:5750", "tcp://two:5750"


def assign(session_id: int = 7, epoch: int = 1, **changes: Any) -> Assign:
    fields = {"lane": 0, "prompt_len": 3, "params": SamplingParams(max_tokens=100)} | changes
    return Assign(session_id=session_id, epoch=epoch, token_ids=np.array(PROMPT, np.int32), **fields)


def make_worker() -> DraftWorker:
    return DraftWorker(ToyProposer(toy_info()), incarnation=1)


def verdicts(*session_ids: int) -> Verdicts:
    """Return a step's verdicts on these sessions, of one token each."""
    n = len(session_ids)
    ones, none = np.ones(n, np.int32), np.zeros(n, np.int32)
    return Verdicts(
        session_ids=np.array(session_ids), epochs=np.ones(n, np.int64), base_lens=3 * ones, num_tokens=ones,
        num_nodes=none, num_seen=none, waited_us=none, token_ids=np.full(n, toy_text(PROMPT, 1)[0], np.int32),
        origins=np.full(n, 2, np.uint8),
    )  # fmt: skip


@pytest.mark.parametrize(
    "message",
    [
        Release(session_id=7, epoch=9),
        verdict(3, [1]),
        replace(verdict(3, [1]), finish="stop"),
        Activations(session_id=7, epoch=1, lane=0, first=1, width=1, data=np.zeros(0, np.uint8)),
        assign(epoch=1, lane=1),
    ],
    ids=lambda message: message.TYPE,
)
def test_only_the_broker_that_assigned_a_session_has_a_say_in_it(message: Message) -> None:
    worker = make_worker()
    worker.handle(assign(), ONE)
    for other in (TWO, ""):
        with pytest.raises(ProtocolError, match="another broker"):
            worker.handle(message, other)
    session = worker.sessions[7]
    assert (session.token_ids, session.lane, session.broker) == (PROMPT, 0, ONE)


def test_verdicts_of_another_broker_on_some_sessions_do_not_harm_the_rest() -> None:
    worker = make_worker()
    for session_id, broker in ((1, ONE), (2, TWO), (3, ONE)):
        worker.handle(assign(session_id), broker)
    with pytest.raises(ProtocolError, match="another broker"):
        worker.handle(verdicts(1, 2, 3), ONE)
    assert [session.length for session in worker.sessions.values()] == [4, 3, 4]


def test_a_session_that_is_assigned_anew_with_a_higher_epoch_moves() -> None:
    """Its former broker has no say from then on, also if it assigns it with a lower epoch."""
    worker = make_worker()
    worker.handle(assign(epoch=3), ONE)
    worker.step()
    worker.handle(assign(epoch=5, lane=1), TWO)
    assert (worker.sessions[7].epoch, worker.sessions[7].broker) == (5, TWO)
    for message in (assign(epoch=4), Release(session_id=7, epoch=9), replace(verdict(3, [1]), epoch=5)):
        with pytest.raises(ProtocolError, match="another broker"):
            worker.handle(message, ONE)
    (draft,) = worker.step()
    assert (draft.epoch, draft.lane, draft.first_id) == (5, 1, 0)
    worker.handle(Release(session_id=7, epoch=5), TWO)
    assert not worker.sessions


def test_sessions_of_a_lost_broker_are_dropped_and_the_others_stay() -> None:
    """With their traces. Each broker gets the events of its own sessions, by its own clock."""
    worker = make_worker()
    for session_id, broker in ((1, ONE), (2, TWO), (3, ONE)):
        worker.handle(assign(session_id, trace=True), broker)
    for broker, ahead in ((ONE, 1), (TWO, 2)):
        now = int(worker.tracer.clock() * 1e6)
        worker.handle(Clock(echo_us=now, clock_us=now + ahead * 10**12), broker)
    found = {broker: [*worker.tracer.messages(broker)] for broker in (ONE, TWO)}
    for broker, ahead, ids in ((ONE, 1, [1, 3]), (TWO, 2, [2])):
        clock, *events = found[broker]
        assert isinstance(clock, GetClock)
        assert [event.job_id for event in events if isinstance(event, TraceEvents)] == ids
        assert {int(event.times_us[0]) // 10**12 for event in events if isinstance(event, TraceEvents)} == {ahead}
    worker.forget_broker(ONE)
    assert [*worker.sessions] == [2]
    assert not [*worker.tracer.messages(ONE)]


@pytest.fixture
def brokers() -> Iterator[tuple[FakeBroker, FakeBroker]]:
    def answer(message: Message) -> list[Message]:
        return [Welcome(heartbeat_ms=10)] if isinstance(message, Hello) else []

    with FakeBroker(answer) as one, FakeBroker(answer) as two:
        yield one, two


def test_drafts_go_to_the_broker_that_assigned_the_session(
    brokers: tuple[FakeBroker, FakeBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And heartbeats list only its sessions. Those of a broker that another one lists no more are dropped."""
    one, two = brokers
    monkeypatch.setattr(broker_links, "GONE_S", 0.05)
    loop = DrafterLoop(DraftConfig(broker=f"{one.address},{two.address}"), make_worker(), "d")

    def ids(broker: FakeBroker, kind: type) -> list[list[int]]:
        heard = [message for message in [*broker.heard] if isinstance(message, kind)]
        return [m.session_ids.tolist() if kind is Heartbeat else [m.session_id] for m in heard]

    def until(condition: Any) -> None:
        wait_until(lambda: (loop.turn(), condition())[1], 20)

    try:
        until(lambda: sum(link.registered for link in loop.links) == 2)
        one.reply = lambda message: [assign(1)] if isinstance(message, Heartbeat) else []
        two.reply = lambda message: [assign(2)] if isinstance(message, Heartbeat) else []
        until(lambda: ids(one, Draft) and ids(two, Draft))
        until(lambda: ids(one, Heartbeat)[-1] == [1] and ids(two, Heartbeat)[-1] == [2])
        assert {*map(tuple, ids(one, Draft))} == {(1,)}
        assert {*map(tuple, ids(two, Draft))} == {(2,)}
        one.reply = two.reply = lambda message: []
        links = {link.endpoint: link for link in loop.links}
        for addresses in ((one.address, two.address), (one.address,)):
            loop.links._follow(links[one.address], Brokers(addresses=addresses, own=one.address))
        until(lambda: [*loop.worker.sessions] == [1])
    finally:
        loop.close()
    wait_until(lambda: [getattr(broker.heard[-1], "state", "") for broker in (one, two)] == ["leaving"] * 2)
