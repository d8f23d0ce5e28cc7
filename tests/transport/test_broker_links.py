"""A worker's links to its brokers: which there are, what each broker hears, and what becomes of a broker's sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import zmq

from specq.config.values import free_address
from specq.protocol import (
    CAPABILITIES,
    OLDEST_VERSION,
    Brokers,
    Clock,
    ConfigError,
    Draft,
    Drafts,
    GetClock,
    Heartbeat,
    Hello,
    Message,
    Refused,
    Welcome,
    decode,
    encode,
)
from specq.testing.toy import toy_info
from specq.testing.waiting import wait_until
from specq.transport import BrokerLinks, broker_identity, broker_in
from specq.transport.broker_links import GONE_S

HELLO = Hello(role="draft", name="d", incarnation=1, model=toy_info(), capabilities=CAPABILITIES)


class Hub:
    """A broker's ROUTER in the test's own thread. It answers each `Hello` as `answers` says."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], name: str = "", address: str = "") -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.socket.bind(address or "tcp://127.0.0.1:*")
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.name = name or self.address
        self.answers: list[Message] = [Welcome(heartbeat_ms=10), Brokers(own=self.name)]
        self.heard: list[Message] = []
        self.workers: list[bytes] = []  # registered and not left, by identity

    def turn(self) -> None:
        while self.socket.poll(0):
            identity, *frames = self.socket.recv_multipart()
            message = decode(frames)
            self.heard.append(message)
            if isinstance(message, Hello):
                self.workers += [] if identity in self.workers else [identity]
                self._send(identity, self.answers)
            if isinstance(message, Heartbeat) and message.state == "leaving":
                self.workers.remove(identity)

    def tell(self, *messages: Message) -> None:
        for identity in self.workers:
            self._send(identity, messages)

    def list(self, *hubs: Hub) -> None:
        """Say which brokers there are, now and to all who come."""
        self.answers[1:] = [Brokers(addresses=tuple(hub.name for hub in hubs), own=self.name)]
        self.tell(self.answers[1])

    def _send(self, identity: bytes, messages: Sequence[Message]) -> None:
        for message in messages:
            self.socket.send_multipart([identity, *encode(message)])

    def beats(self) -> list[Heartbeat]:
        return [message for message in self.heard if isinstance(message, Heartbeat)]


class House:
    """Hubs, and the links of one worker with some sessions."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.poller, self.hubs = zmq.Poller(), list[Hub]()
        self.sessions: dict[int, str] = {}  # each session's broker
        self.received: list[tuple[str, Message]] = []
        self.told: list[str] = []
        self.links: BrokerLinks

    def hub(self, name: str = "", address: str = "") -> Hub:
        self.hubs.append(Hub(self.context, name, address))
        return self.hubs[-1]

    def stop(self, hub: Hub) -> None:
        self.hubs.remove(hub)
        hub.socket.close(0)

    def link(self, *addresses: str, hello: Hello = HELLO) -> BrokerLinks:
        told = self.told.append
        self.links = BrokerLinks(self.context, ",".join(addresses), hello, self.poller, tell=told)
        return self.links

    def turn(self) -> None:
        for hub in self.hubs:
            hub.turn()
        self.received += self.links.receive(dict(self.poller.poll(2)))
        if self.links.heartbeat.due():
            ids = np.array(list(self.sessions), np.int64)
            beat = Heartbeat(
                incarnation=1, state="ready", metrics={"drafts": 3}, session_ids=ids, epochs=ids + 1,
                lengths=np.array(ids + 2, np.int32),
            )  # fmt: skip
            traces: Callable[[str], list[Message]] = lambda name: [GetClock(sent_us=len(name))]  # noqa: E731
            self.links.beat(beat, self.sessions.__getitem__, traces, num_dropped=5)

    def until(self, condition: Callable[[], object]) -> None:
        def holds() -> object:
            self.turn()
            return condition()

        wait_until(holds, 20)

    def addresses(self) -> set[str]:
        return {link.endpoint for link in self.links}

    def registered(self) -> set[str]:
        return {link.endpoint for link in self.links if link.registered}


@pytest.fixture
def house() -> Iterator[House]:
    house = House()
    yield house
    house.context.destroy(0)


# --- one broker -------------------------------------------------------------------------------------------------------


def test_heartbeats_say_how_often_the_worker_registered_again(house: House) -> None:
    """And what was dropped. A second welcome where one would do is none."""
    hub = house.hub()
    hub.answers.insert(0, hub.answers[0])
    house.link(hub.address)
    house.until(hub.beats)
    assert hub.beats()[0].metrics == {"drafts": 3, "reconnects": 0, "messages_dropped": 5}
    hub.tell(Refused(reason="not registered", fatal=False))
    hub.workers.clear()
    house.until(lambda: hub.beats()[-1].metrics["reconnects"] == 1)


def test_it_says_once_that_it_waits_for_a_broker_that_does_not_answer(house: House) -> None:
    """Not while another one serves the worker."""
    hub, silent = house.hub(), house.hub()
    silent.answers = []
    for addresses, told in (([hub.address, silent.address], 0), ([silent.address], 1)):
        house.link(*addresses)
        house.until(lambda: house.links.registered or len(addresses) == 1)  # noqa: B023
        house.told.clear()
        for _ in range(4):
            house.links.beat(Heartbeat(incarnation=1, state="ready"), str, lambda _: [])
        assert house.told == [f"waiting for the broker at {silent.address} (specq broker starts one)"] * told


def test_a_broker_of_the_previous_version_receives_its_format(house: House) -> None:
    """At once. It does not say its name. One that speaks neither version refuses the worker for good."""
    hub = house.hub()
    hub.answers = [Refused(reason="the broker cannot read this hello: protocol version 6; this side speaks 5")]
    links = house.link(hub.address)
    house.until(lambda: len(hub.heard) == 2)
    assert [hello.capabilities for hello in hub.heard if isinstance(hello, Hello)] == [CAPABILITIES, ()]
    hub.tell(Welcome(heartbeat_ms=10))
    house.until(hub.beats)
    assert links.name_of("") == hub.address
    hub.tell(Refused(reason=f"protocol version 6; this side speaks {OLDEST_VERSION - 1}"))
    with pytest.raises(ConfigError, match="refuses this worker: protocol version 6"):
        house.until(lambda: False)


@pytest.mark.parametrize(("capabilities", "kinds"), [(CAPABILITIES, [Drafts]), ((), [Draft, Draft])])
def test_drafts_travel_together_to_a_broker_that_reads_them_so(house: House, capabilities, kinds) -> None:
    hub = house.hub("a")
    hub.answers[0] = Welcome(heartbeat_ms=10, capabilities=capabilities)
    links = house.link(hub.address)
    house.until(lambda: links.is_served("a"))
    one = {"epoch": 1, "lane": 0, "base_len": 1, "first_id": 0, "token_ids": [1], "parent_ids": [-1], "scores": [0]}
    links.send_drafts("a", [Draft(session_id=i, **one) for i in (1, 2)])
    house.until(lambda: sum(isinstance(message, Draft | Drafts) for message in hub.heard) == len(kinds))
    sent = [message for message in hub.heard if isinstance(message, Draft | Drafts)]
    assert [type(message) for message in sent] == kinds
    singles = [single for message in sent for single in (message.each() if isinstance(message, Drafts) else [message])]
    assert [single.session_id for single in singles] == [1, 2]


# --- several ----------------------------------------------------------------------------------------------------------


def test_each_broker_hears_of_its_own_sessions(house: House) -> None:
    """And what comes from a broker comes with its name."""
    first, second = house.hub("a"), house.hub("b")
    links = house.link(first.address, second.address)
    house.sessions = {10: "a", 11: "b", 12: "a", 13: "c"}
    house.until(lambda: len(house.registered()) == 2 and first.beats() and second.beats())
    assert [beat.session_ids.tolist() for beat in (first.beats()[-1], second.beats()[-1])] == [[10, 12], [11]]
    assert [beat.epochs.tolist() for beat in (first.beats()[-1], second.beats()[-1])] == [[11, 13], [12]]
    assert first.beats()[-1].lengths.tolist() == [12, 14]
    second.tell(Clock(echo_us=1, clock_us=2))
    house.until(lambda: house.received)
    assert [(name, type(message)) for name, message in house.received] == [("b", Clock)]
    assert links.send("a", GetClock(sent_us=77))
    assert not links.send("c", GetClock(sent_us=77))
    house.until(lambda: any(isinstance(one, GetClock) and one.sent_us == 77 for one in first.heard))


def test_a_broker_that_another_one_lists_is_linked_and_left_when_it_is_gone(house: House) -> None:
    """A configured one is kept. Addresses that are not valid are dropped and counted. A broker that is listed again
    knows the worker by its socket."""
    first, second = house.hub(), house.hub()
    away = free_address()
    links = house.link(first.address, away)
    house.until(lambda: links.registered)
    wrong = ("tcp://*:5750", "http://broker", "tcp://host:*")
    first.tell(Brokers(addresses=(first.address, second.address, *wrong), own=first.name))
    house.until(second.beats)
    assert house.addresses() == {first.address, second.address, away}
    assert second.beats()[-1].metrics["messages_dropped"] == 5 + 3
    first.list(first)
    house.until(lambda: not next(link for link in links if link.endpoint == first.address).listed - {first.address})
    assert house.addresses() == {first.address, second.address, away}, "it still serves this worker"
    house.stop(second)
    house.until(lambda: house.addresses() == {first.address, away})
    back = house.hub(address=second.address)
    first.list(first, back)
    house.until(lambda: back.workers)
    assert back.workers == second.workers
    assert back.workers != first.workers


def test_a_broker_under_two_addresses_has_the_worker_once(house: House) -> None:
    """What registers second leaves. It comes back when the first has lost the broker."""
    hub = house.hub("tcp://hub:1")
    other = hub.address.replace("127.0.0.1", "localhost")
    house.link(hub.address, other)
    house.until(lambda: len(hub.workers) == 2 or len(house.addresses()) == 1)
    house.until(lambda: len(hub.workers) == 1)
    (kept,) = house.addresses()
    num_beats = len(hub.beats())
    hub.list(hub)
    house.until(lambda: len(hub.beats()) >= num_beats + 5)
    assert house.addresses() == {kept}, "neither is it reached under the name that it lists"
    house.stop(hub)
    house.until(lambda: house.addresses() == {hub.address, other})


def test_a_broker_that_refuses_is_left_out_unless_all_do(house: House) -> None:
    first, second = house.hub("a"), house.hub("b")
    second.answers = [Refused(reason="it fits no verifier")]
    house.link(first.address, second.address)
    house.until(lambda: any(link.is_refused for link in house.links))
    for num_beats in (10, 20):  # a `Hello` was perhaps on its way
        num_heard = len(second.heard)
        house.until(lambda: len(first.beats()) > num_beats)  # noqa: B023
    assert (house.registered(), len(second.heard)) == ({first.address}, num_heard), "it is left alone for a while"
    first.tell(Refused(reason="it made no progress"))
    with pytest.raises(ConfigError, match=f"the broker at {first.address} refuses this worker: it made no progress"):
        house.until(lambda: False)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_sessions_of_a_broker_that_others_list_no_more_are_given_up(house: House, is_frozen: bool) -> None:
    """After a time in which they may be opened anew. A frozen broker's connection still stands."""
    first, second = house.hub(), house.hub()
    links = house.link(first.address, second.address)
    names = [first.name, second.name]
    for hub in (first, second):
        hub.list(first, second)
    house.until(lambda: all(link.listed == {*names} for link in links))
    assert links.gone(names, 0.0) == links.gone(names, 2 * GONE_S) == []
    if not is_frozen:
        house.stop(second)
        house.until(lambda: house.registered() == {first.address})
    assert links.gone(names, 0.0) == links.gone(names, 2 * GONE_S) == [], "the others may not know yet"
    first.list(first)
    house.until(lambda: any(link.listed == {first.name} for link in links))
    assert links.gone(names, 100.0) == []
    assert links.gone(names, 99.9 + GONE_S) == []
    assert links.gone(names, 100.0 + GONE_S) == [second.name]
    first.list(first, second)
    house.until(lambda: not any(link.listed == {first.name} for link in links))
    assert links.gone(names, 101.0 + GONE_S) == [], "it is back"


def test_sessions_of_the_only_broker_wait_for_it(house: House) -> None:
    """It finds them again, also if it lists itself. Those of a name that no broker has are given up beside it."""
    hub = house.hub()
    hub.list(hub)
    links = house.link(hub.address)
    house.until(lambda: links.registered)
    house.stop(hub)
    house.until(lambda: not links.registered)
    assert links.gone([hub.address, ""], 0.0) == links.gone([hub.address, ""], 2 * GONE_S) == []
    house.hub(hub.name, hub.address)
    house.until(lambda: links.registered)
    assert links.gone([hub.address, ""], 3 * GONE_S) == []
    assert links.gone([hub.address, ""], 4 * GONE_S) == [""]


@pytest.mark.parametrize("list_themselves", [False, True])
def test_two_brokers_without_a_common_journal_do_not_replace_each_other(house: House, list_themselves: bool) -> None:
    """Whether each lists itself or none. One that lists none waits for its sessions also when it is away."""
    first, second = house.hub(), house.hub()
    for hub in (first, second):
        hub.list(*([hub] if list_themselves else []))
    links = house.link(first.address, second.address)
    house.until(lambda: [len(link.listed) for link in links if link.is_named] == [list_themselves] * 2)
    names = [first.address, second.address]
    assert links.gone(names, 0.0) == links.gone(names, 2 * GONE_S) == []
    if not list_themselves:
        house.stop(second)
        house.until(lambda: house.registered() == {first.address})
        assert links.gone(names, 3 * GONE_S) == links.gone(names, 5 * GONE_S) == []


def test_a_brokers_socket_says_its_name() -> None:
    assert broker_in(broker_identity("tcp://ä:1")) == "tcp://ä:1"
    assert broker_identity("tcp://a:1") != broker_identity("tcp://a:1")
    assert broker_in(b"\x01" + b"8 bytes.") == broker_in(b"") == ""
    with pytest.raises(ConfigError, match="has 300 bytes, but must have at most 240"):
        broker_identity("a" * 300)
