"""Clients of several small brokers over real TCP."""

from __future__ import annotations

import threading

import pytest

from specq.client import Client, link
from specq.client.core import ClientCore
from specq.client.detached import JobDesk
from specq.client.link import Link, spread
from specq.protocol import Cancel, ConfigError, FetchTokenizer, Follow, Moved, Submit
from specq.testing.fake_broker import ANSWER, FakeBroker, answer


@pytest.fixture
def other():
    with FakeBroker() as fake:
        yield fake


@pytest.fixture(autouse=True)
def first(monkeypatch):
    """Begin with the first address."""
    monkeypatch.setattr(link, "_DRAWN", 0)


def moved_to(address):
    """Return the answers of a broker whose jobs are all at another one."""

    def reply(message):
        if isinstance(message, Submit | Follow | Cancel):
            return [Moved(job_id=message.job_id, address=address)]
        return answer(message)

    return reply


def test_a_job_is_followed_to_a_broker_that_was_not_named(connect, broker, other):
    broker.reply = moved_to(other.address)
    client = connect(broker.address)
    assert client.generate("a", max_tokens=100).text == ANSWER
    assert (broker.num_heard(Submit), other.num_heard(Submit), other.num_heard(FetchTokenizer)) == (1, 1, 0)


def test_a_dead_broker_is_left(connect, free_address, other):
    """For the rest of the connection."""
    client = connect(f"{free_address},{other.address}", timeout_s=1.0)
    assert client.generate("a", max_tokens=100).text == ANSWER
    assert client.generate("b", max_tokens=100).text == ANSWER
    assert client.status()["models"] == ["fake"]


def test_detached_jobs_are_followed(broker, other):
    broker.reply = moved_to(other.address)
    with Client(other.address) as client, JobDesk(f"{broker.address},{other.address}") as desk:
        job = client.submit("a", max_tokens=100)
        job.result()
        (submit,) = other.wait_for(Submit)
        assert list(desk.submit([submit])) == [(submit.job_id, None)]
    assert [message.job_id for message in broker.heard] == [submit.job_id]


def test_every_connection_uses_the_keys(broker, other, monkeypatch):
    used, connect_dealer = [], link.connect_dealer
    monkeypatch.setattr(
        link, "connect_dealer", lambda *given, curve, **named: (used.append(curve), connect_dealer(*given, **named))[1]
    )
    broker.reply = moved_to(other.address)
    keys = object()
    opened, done = Link(ClientCore(broker.address, 10.0), keys), threading.Event()
    opened.request(7, lambda event: done.set(), lambda core, now: core.find(7, now, until_end=False))
    assert other.wait_for(Follow)
    opened.close()
    assert used == [keys, keys]


def test_a_connection_that_the_core_forgot_is_closed(broker, other, monkeypatch):
    opened = Link(ClientCore(broker.address, 10.0))
    try:
        done = threading.Event()
        opened.call(lambda core, now: (core.brokers.learn(other.address), opened._try_open(other.address), done.set()))
        assert done.wait(60)
        closed = threading.Event()

        def forget(core, now):
            socket = opened._sockets[other.address]
            del core.brokers._seen[other.address]
            opened._try_open("nonsense")
            assert (socket.closed, opened._sockets["nonsense"]) == (True, None)
            closed.set()

        opened.call(forget)
        assert closed.wait(60)
    finally:
        opened.close()


def test_a_wrong_address_is_named(broker):
    threads = threading.active_count()
    for wrong in ("tcp://*:5750", "nonsense", ""):
        with pytest.raises(ConfigError, match=f"broker is '?{wrong.replace('*', '.')}'?[;,]"):
            Client(f"{broker.address},{wrong}")
    assert threading.active_count() == threads


def test_no_broker_at_several_addresses(connect, free_address):
    client = connect(f"{free_address},tcp://127.0.0.1:9", timeout_s=0.3)
    with pytest.raises(Exception, match=f"no broker answered at {free_address}, tcp://127.0.0.1:9 .*nothing listens"):
        client.status()


def test_clients_are_spread(monkeypatch):
    found = []
    for drawn in range(3):
        monkeypatch.setattr(link, "_DRAWN", drawn)
        found.append(spread("tcp://a:1,tcp://b:2, tcp://c:3"))
    assert [one.partition(",")[0] for one in found] == ["tcp://a:1", "tcp://b:2", "tcp://c:3"]
    assert {"".join(sorted(one.split(","))) for one in found} == {"tcp://a:1tcp://b:2tcp://c:3"}
    assert spread("tcp://a:1") == "tcp://a:1"
