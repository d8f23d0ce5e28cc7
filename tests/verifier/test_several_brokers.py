"""A verifier that serves several brokers: whose sessions are whose, whose turn it is, and who receives what."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import zmq

from specq.config import TargetConfig, free_address
from specq.processes.target import VerifierLoop
from specq.protocol import (
    Ack,
    Brokers,
    Clock,
    Close,
    GetActivations,
    GetClock,
    Heartbeat,
    Hello,
    Message,
    Open,
    ProtocolError,
    SamplingParams,
    TraceEvents,
    Verdict,
    Verdicts,
    Welcome,
    decode,
    encode,
)
from specq.testing.fake_broker import FakeBroker
from specq.testing.toy import ToyEngine, toy_info, toy_text
from specq.testing.waiting import wait_until
from specq.transport import broker_identity, broker_links
from specq.verifier.core import Verifier
from specq.verifier.models.step_curve import StepCurve
from tests.verifier.verifiers import PROMPT, chain, make_verifier, step

ONE, TWO = "tcp://one:5750", "tcp://two:5750"


def opened(session_id: int = 7, epoch: int = 1, length: int = 3, **changes: object) -> Open:
    fields: dict[str, object] = {"tokens_left": 50, "params": SamplingParams(max_tokens=50), "prompt_len": length}
    ids = np.resize(np.array(PROMPT, np.int32), length)
    return Open(session_id=session_id, epoch=epoch, token_ids=ids, **fields | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "message",
    [
        Close(session_id=7, epoch=9),
        Ack(session_id=7, epoch=1, length=4, resend=True),
        chain(toy_text(PROMPT, 9)),
        GetActivations(session_id=7, epoch=1, lane=0, tap_layers=(1,)),
        opened(epoch=1),
    ],
    ids=lambda message: message.TYPE,
)
def test_only_the_broker_that_opened_a_session_has_a_say_in_it(message: Message) -> None:
    """Also without a name, while it has one. What another one says is refused, and so counted."""
    verifier = make_verifier()
    verifier.handle(opened(), 0.0, ONE)
    step(verifier)
    for other in (TWO, ""):
        with pytest.raises(ProtocolError, match="another broker"):
            verifier.handle(message, 0.0, other)
    step(verifier)
    assert verifier.sessions[7].token_ids == PROMPT + toy_text(PROMPT, 2), "no draft was used"
    assert verifier.sessions[7].journaled == len(PROMPT)
    assert not verifier.sources.mailbox.feeds.layers
    verifier.handle(message, 0.0, ONE)
    assert (7 in verifier.sessions) == (not isinstance(message, Close))


def test_a_higher_epoch_takes_a_session_over() -> None:
    """From then on the former broker's messages are refused, also of its own epoch."""
    verifier = make_verifier()
    verifier.handle(opened(epoch=1), 0.0, ONE)
    step(verifier)
    assert verifier.handle(opened(epoch=5, length=4), 0.0, TWO) == []
    assert (verifier.sessions[7].epoch, verifier.sessions[7].broker, verifier.sessions[7].length) == (5, TWO, 4)
    for message in (Close(session_id=7, epoch=1), Close(session_id=7, epoch=6), opened(epoch=4)):
        with pytest.raises(ProtocolError, match="another broker"):
            verifier.handle(message, 0.0, ONE)
    assert 7 in verifier.sessions
    verifier.handle(Close(session_id=7, epoch=5), 0.0, TWO)
    assert not verifier.sessions


def test_sessions_of_a_lost_broker_are_closed_and_the_others_stay() -> None:
    """What they held in the engine becomes free, and their traces end."""
    engine = ToyEngine()
    verifier = make_verifier(engine)
    before = engine.free_slots
    for session_id in range(6):
        verifier.handle(opened(session_id, trace=True), 0.0, (ONE, TWO)[session_id % 2])
    step(verifier)
    held = before - engine.free_slots
    verifier.forget_broker(ONE)
    assert [*verifier.sessions] == [1, 3, 5]
    assert before - engine.free_slots == held / 2
    assert not list(verifier.tracer.messages(ONE))
    assert list(verifier.tracer.messages(TWO))
    verifier.forget_broker(TWO)
    assert not verifier.tracer.is_on


def test_events_go_to_the_session_s_broker_by_its_clock() -> None:
    verifier = make_verifier()
    now = 10.0
    verifier.tracer.clock = lambda: now
    for session_id, broker in ((1, ONE), (2, TWO)):
        verifier.handle(opened(session_id, trace=True), now, broker)
        assert [type(message) for message in verifier.tracer.messages(broker)] == [GetClock]
        ahead = 1000 * session_id
        verifier.handle(Clock(echo_us=int(now * 1e6), clock_us=int((now + ahead) * 1e6)), now, broker)
    for session_id, broker in ((1, ONE), (2, TWO)):
        (_, events) = verifier.tracer.messages(broker)
        assert isinstance(events, TraceEvents)
        assert (events.job_id, events.times_us[0]) == (session_id, int((10 + 1000 * session_id) * 1e6))


# --- room -------------------------------------------------------------------------------------------------------------


def order_of_ends(verifier: Verifier) -> list[int]:
    """Serve until no session is left; return these in the order of their ends.

    Those in the background get a token only in a step in which all others that are left do.
    """
    ended = list[int]()
    while verifier.has_work:
        sessions = dict(verifier.sessions)
        advanced = {verdict.session_id for verdict in step(verifier)}
        if any(sessions[session_id].is_background for session_id in advanced):
            assert advanced >= {i for i, session in sessions.items() if not session.is_background}
        for session in [one for one in verifier.sessions.values() if one.finish]:
            ended.append(session.session_id)
            verifier.handle(Close(session_id=session.session_id, epoch=1), 0.0, session.broker)
    return ended


@pytest.mark.parametrize("num_steps", [0, 4])
@pytest.mark.parametrize("background", [False, True])
def test_brokers_take_turns_where_sessions_wait_for_room(num_steps: int, background: bool) -> None:
    """One of another broker need not wait for all sixteen that came before, whether these have their room already or
    not. The sessions of a broker keep their order, and those in the background come last, of whichever broker."""
    verifier = make_verifier(ToyEngine(toy_info(kv_slots=100)))
    for session_id in range(16):
        verifier.handle(opened(session_id, length=20, tokens_left=3 + session_id % 4), 0.0, ONE)
    for _ in range(num_steps):
        step(verifier)
    for session_id in (16, 17):
        verifier.handle(opened(session_id, length=20, tokens_left=3, is_background=background), 0.0, TWO)
    ended = order_of_ends(verifier)
    assert sorted(ended) == [*range(18)]
    if background:
        assert min(ended.index(16), ended.index(17)) >= 13  # at most three are left, and all have room
    else:
        assert {16, 17} <= {*ended[: 5 + num_steps]}, ended


# --- the process ------------------------------------------------------------------------------------------------------


class Service:
    """A verifier's loop with two brokers that it registers with, and their sockets at it."""

    def __init__(self, first: FakeBroker, second: FakeBroker) -> None:
        self.verifier = Verifier(ToyEngine(), StepCurve([1, 64], [0.001, 0.002]), incarnation=1)
        addresses = f"{first.address}, {second.address}, {free_address()}"
        self.loop = VerifierLoop(TargetConfig(broker=addresses), self.verifier, "toy")
        self.brokers = {first.address: first, second.address: second}
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.sockets = {address: self.context.socket(zmq.DEALER) for address in self.brokers}
        for address, socket in self.sockets.items():
            socket.setsockopt(zmq.IDENTITY, broker_identity(address))
            socket.connect(self.loop.links.hello.endpoint)
        self.heard: dict[str, list[Message]] = {address: [] for address in self.brokers}

    def send(self, broker: str, *messages: Message) -> None:
        for message in messages:
            self.sockets[broker].send_multipart(encode(message))

    def turn(self) -> None:
        self.loop.turn()
        for address, socket in self.sockets.items():
            while socket.poll(0):
                self.heard[address].append(decode(socket.recv_multipart()))

    def until(self, condition: object) -> None:
        def holds() -> object:
            self.turn()
            return condition()  # type: ignore[operator]

        wait_until(holds, 20)

    def beats(self, broker: str) -> list[list[int]]:
        heard = self.brokers[broker].heard
        return [beat.session_ids.tolist() for beat in [*heard] if isinstance(beat, Heartbeat)]


@pytest.fixture
def service() -> Iterator[Service]:
    def welcome(message: Message) -> list[Message]:
        return [Welcome(heartbeat_ms=10)] if isinstance(message, Hello) else []

    with FakeBroker(welcome) as first, FakeBroker(welcome) as second:
        service = Service(first, second)
        yield service
        service.loop.close()
        service.context.destroy(0)


def test_each_broker_hears_of_its_own_sessions_in_one_message_a_step(service: Service) -> None:
    """Heartbeats list these, a step's verdicts are packed for each, and the last heartbeat says that it leaves."""
    one, two = service.brokers
    service.until(lambda: sum(link.registered for link in service.loop.links) == 2)
    for broker, first_id in ((one, 10), (two, 20)):
        service.send(broker, *(opened(first_id + i) for i in range(6)))
    service.until(lambda: len(service.verifier.sessions) == 12)
    service.until(lambda: all(isinstance(heard[-1], Verdicts) for heard in service.heard.values() if heard))
    service.until(lambda: all(any(isinstance(m, Verdicts) for m in heard) for heard in service.heard.values()))
    for broker, first_id in ((one, 10), (two, 20)):
        for message in service.heard[broker]:
            ids = message.session_ids.tolist() if isinstance(message, Verdicts) else [message.session_id]  # type: ignore[attr-defined]
            assert {*ids} <= set(range(first_id, first_id + 6))
        packed = [message for message in service.heard[broker] if isinstance(message, Verdicts)]
        assert max(len(message.session_ids) for message in packed) == 6
    service.until(lambda: all(len(service.beats(broker)[-1]) == 6 for broker in (one, two)))
    assert (sorted(service.beats(one)[-1]), sorted(service.beats(two)[-1])) == ([*range(10, 16)], [*range(20, 26)])
    service.loop.verifier.state = "draining"
    service.send(two, Close(session_id=10, epoch=1))
    dropped = service.loop.num_dropped
    service.until(lambda: service.loop.num_dropped > dropped)
    assert 10 in service.verifier.sessions


def test_a_session_that_was_taken_over_reports_to_its_new_broker(service: Service) -> None:
    one, two = service.brokers
    service.until(lambda: sum(link.registered for link in service.loop.links) == 2)
    service.send(one, opened(7, epoch=1))
    service.until(lambda: service.heard[one])
    service.send(two, opened(7, epoch=2))
    service.until(lambda: service.heard[two])
    num_heard = len(service.heard[one])
    service.send(one, opened(7, epoch=2))  # it lost, and must not become the reader
    num_verdicts = len(service.heard[two])
    service.until(lambda: len(service.heard[two]) > num_verdicts + 5)
    assert {message.epoch for message in service.heard[two] if isinstance(message, Verdict)} == {2}
    assert len(service.heard[one]) == num_heard
    service.until(lambda: service.beats(two)[-1] == [7] and service.beats(one)[-1] == [])


def test_sessions_of_a_broker_that_the_other_lists_no_more_are_closed(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a while. Those of the other go on."""
    one, two = service.brokers
    service.until(lambda: sum(link.registered for link in service.loop.links) == 2)
    service.send(one, opened(7))
    service.send(two, opened(8))
    service.until(lambda: len(service.verifier.sessions) == 2)
    links = {link.endpoint: link for link in service.loop.links}
    monkeypatch.setattr(broker_links, "GONE_S", 0.05)
    for listed in ((one, two), (one,)):
        service.loop.links._follow(links[one], Brokers(addresses=listed, own=one))
        num_beats = len(service.beats(two))
        service.until(lambda: len(service.beats(two)) > num_beats + 8)  # noqa: B023
        assert set(service.verifier.sessions) == {7} | ({8} if two in listed else set())


def test_a_verifier_that_drains_does_not_wait_for_a_broker_that_is_away(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the sessions of the others, until they have moved."""
    one, _ = service.brokers
    service.until(lambda: sum(link.registered for link in service.loop.links) == 2)
    turns = list[int]()

    def turn() -> None:
        turns.append(1)
        if len(turns) == 3:
            service.verifier.forget_broker(one)

    monkeypatch.setattr(service.loop, "turn", turn)
    stop = SimpleNamespace(asked_again=False)
    service.verifier.handle(opened(7), 0.0, "tcp://away:1")
    service.loop._drain(stop)  # type: ignore[arg-type]
    assert not turns
    service.verifier.handle(opened(8), 0.0, one)
    service.loop._drain(stop)  # type: ignore[arg-type]
    assert len(turns) == 3
    assert [*service.verifier.sessions] == [7]
