"""A worker's link to its broker counts what happens to it, and heartbeats carry that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count

import pytest
import zmq

from specq.protocol import CAPABILITIES, OLDEST_VERSION, ConfigError, Heartbeat, Hello, Message, Refused, Welcome
from specq.testing.fake_broker import FakeBroker
from specq.testing.toy import toy_info
from specq.testing.waiting import wait_until
from specq.transport import BrokerLink

HELLO = Hello(role="draft", name="d", incarnation=1, model=toy_info())
BEAT = Heartbeat(incarnation=1, state="ready", metrics={"drafts": 3})


def forgetful() -> Callable[[Message], list[Message]]:
    """Answer as a broker that forgets its worker after the second heartbeat, and welcomes it twice where once would
    do."""
    beats = count(1)

    def answer(message: Message) -> list[Message]:
        if isinstance(message, Hello):
            return [Welcome(heartbeat_ms=10), Welcome(heartbeat_ms=10)]
        return [Refused(reason="not registered", fatal=False)] if next(beats) == 2 else []

    return answer


@pytest.fixture
def link() -> Iterator[tuple[BrokerLink, FakeBroker]]:
    with FakeBroker(forgetful()) as broker, zmq.Context() as context:
        link = BrokerLink(context, broker.address, HELLO)
        yield link, broker
        context.destroy(0)


def received(broker: FakeBroker, link: BrokerLink, number: int) -> Heartbeat:
    """Send heartbeats until the broker has a number of them. Return the last one."""

    def is_there() -> bool:
        if link.heartbeat.due():
            link.beat(BEAT, num_dropped=5)
        assert not list(link.receive())
        return broker.num_heard(Heartbeat) >= number

    wait_until(is_there, 20)
    heard = broker.wait_for(Heartbeat)[number - 1]
    assert isinstance(heard, Heartbeat)
    return heard


def test_heartbeats_say_how_often_the_worker_registered_again(link: tuple[BrokerLink, FakeBroker]) -> None:
    worker, broker = link

    assert received(broker, worker, 1).metrics == {"drafts": 3, "reconnects": 0, "messages_dropped": 5}
    wait_until(lambda: received(broker, worker, broker.num_heard(Heartbeat) + 1).metrics["reconnects"] == 1, 20)


def test_it_says_once_that_it_waits_for_a_broker_that_does_not_answer() -> None:
    """Not of one that answers the first time."""
    told: list[str] = []
    with FakeBroker(lambda message: []) as broker, zmq.Context() as context:
        worker = BrokerLink(context, broker.address, HELLO, tell=told.append)
        worker.beat(BEAT)
        assert not told
        for _ in range(3):
            worker.beat(BEAT)
        context.destroy(0)
    assert told == [f"waiting for the broker at {broker.address} (specq broker starts one)"]


def older(message: Message) -> list[Message]:
    """Answer as a broker that reads only the version before."""
    if isinstance(message, Hello) and message.capabilities:
        return [Refused(reason="the broker cannot read this hello: protocol version 6; this side speaks 5")]
    return [Welcome(heartbeat_ms=10)] if isinstance(message, Hello) else []


def test_a_broker_of_the_previous_version_receives_its_format() -> None:
    """At once. One that speaks neither version refuses the worker for good."""
    told = Refused(reason=f"protocol version 6; this side speaks {OLDEST_VERSION - 1}")
    for answer, is_served in ((older, True), (lambda message: [told], False)):
        with FakeBroker(answer) as broker, zmq.Context() as context:
            worker = BrokerLink(context, broker.address, replace(HELLO, capabilities=CAPABILITIES))
            if is_served:
                assert received(broker, worker, 1).metrics["reconnects"] == 0
                assert [hello.capabilities for hello in broker.wait_for(Hello, 2)] == [CAPABILITIES, ()]
            else:
                with pytest.raises(ConfigError, match="refuses this worker: protocol version 6"):
                    received(broker, worker, 1)
            context.destroy(0)
