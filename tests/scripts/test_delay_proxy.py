"""scripts/delay_proxy.py: what goes in comes out unchanged, in order, and not before its time."""

from __future__ import annotations

import importlib.util
import re
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import zmq

from specq import Client
from specq.client.base import count_ready
from specq.client.detached import JobDesk
from specq.config.addresses import free_address
from specq.protocol.errors import ConfigError, JobError
from specq.protocol.messages import Submit
from specq.protocol.params import SamplingParams
from specq.protocol.wire import decode, encode
from specq.simulate.network import LineSettings
from specq.transport.keys import curve_to_broker, make_keys
from specq.transport.sockets import bind_router, connect_dealer, drain
from tests.secured import make_all, served
from tests.toy import toy_text

SCRIPT = Path(__file__).parents[2] / "scripts" / "delay_proxy.py"
PATIENCE_S = 20.0


def load_script():
    spec = importlib.util.spec_from_file_location("delay_proxy", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["delay_proxy"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


delay_proxy = load_script()


class Clock:
    """A clock that stands still until it is set forward."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Stage:
    """A broker's ROUTER, the proxy under a clock of ours, and peers; everything is turned by hand."""

    def __init__(self, line: LineSettings, **options: object) -> None:
        self.clock = Clock()
        self.context = zmq.Context()
        self.peers: list[zmq.Socket[bytes]] = []  # kept until the context closes them
        self.broker, address = bind_router(self.context, "tcp://127.0.0.1:*")
        self.proxy = delay_proxy.DelayProxy("tcp://127.0.0.1:*", address, line, clock=self.clock, **options)

    def peer(self) -> zmq.Socket[bytes]:
        self.peers.append(connect_dealer(self.context, self.proxy.address, queue=True))
        return self.peers[-1]

    def until(self, condition: Callable[[], object]) -> None:
        """Turn the proxy until the condition holds; the clock stands."""
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end, "what was waited for did not happen"
            self.proxy.turn(0.005)

    def in_flight(self) -> int:
        return len(self.proxy._due)

    def turn_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.proxy.turn(0.005)

    def receive(self, socket: zmq.Socket[bytes], count: int) -> list[list[bytes]]:
        found: list[list[bytes]] = []
        self.until(lambda: found.extend(drain(socket)) or len(found) >= count)
        return found


@pytest.fixture
def stage() -> Iterator[Callable[..., Stage]]:
    stages = []

    def build(*arguments, **options):
        stages.append(Stage(*arguments, **options))
        return stages[-1]

    yield build
    for one in stages:
        one.proxy.close()
        one.context.destroy(0)


MESSAGES = [[b"key", b"{}", bytes(range(256)) * 40], [b""], [b"a", b"", b"c"], *([b"%d" % i] for i in range(200))]


def test_messages_are_intact_in_order_and_under_the_peers_identity(stage):
    """Jitter may not reorder what one connection carries; the broker sees the peer's own identity."""
    world = stage(LineSettings(delay_s=0.01, jitter_s=0.05))
    peer = world.peer()
    for message in MESSAGES:
        peer.send_multipart(message)
    world.until(lambda: world.in_flight() == len(MESSAGES))
    world.clock.now += 10
    received = world.receive(world.broker, len(MESSAGES))
    assert [frames[1:] for frames in received] == MESSAGES
    identity = peer.getsockopt(zmq.IDENTITY)
    assert {frames[0] for frames in received} == {identity}
    for message in MESSAGES:
        world.broker.send_multipart([identity, *message])
    world.until(lambda: world.in_flight() == len(MESSAGES))
    world.clock.now += 10
    assert world.receive(peer, len(MESSAGES)) == MESSAGES


def test_nothing_arrives_before_its_time(stage):
    """Each way takes half of the round trip, by the proxy's clock."""
    world = stage(delay_proxy.line_settings(rtt_ms=100, jitter_ms=0, bandwidth_mbit=0, loss=0))
    peer = world.peer()
    peer.send(b"early")
    world.until(world.in_flight)
    world.clock.now += 0.0499
    world.turn_for(0.1)
    assert list(drain(world.broker)) == []
    world.clock.now += 0.0002
    assert world.receive(world.broker, 1)[0][1:] == [b"early"]


def test_bandwidth_spaces_messages_out(stage):
    """1 Mbit/s: 10,000 bytes leave in 80 ms, and the next message after them."""
    world = stage(delay_proxy.line_settings(rtt_ms=0, jitter_ms=0, bandwidth_mbit=1, loss=0))
    peer = world.peer()
    for _ in range(3):
        peer.send(bytes(10_000))
    world.until(lambda: world.in_flight() == 3)
    arrived = []
    for _ in range(3):
        world.clock.now += 0.0801
        arrived += world.receive(world.broker, 1)
        world.turn_for(0.05)
        assert list(drain(world.broker)) == []
    assert len(arrived) == 3


def test_lost_messages_are_counted(stage):
    """A line with loss 1 carries nothing; one with loss 0.3 most of it."""
    for loss, low, high in ((1.0, 0, 0), (0.3, 40, 95)):
        world = stage(LineSettings(loss=loss))
        peer = world.peer()
        for i in range(100):
            peer.send(b"%d" % i)
        world.until(lambda w=world: w.proxy.num_carried + w.proxy.num_dropped == 100)
        assert low <= world.proxy.num_carried <= high


def test_peers_do_not_hear_each_other(stage):
    world = stage(LineSettings(delay_s=0.001))
    peers = [world.peer() for _ in range(5)]
    for i, peer in enumerate(peers):
        peer.send(b"%d" % i)
    world.until(lambda: world.in_flight() == 5)
    world.clock.now += 1
    for identity, number in world.receive(world.broker, 5):
        world.broker.send_multipart([identity, b"to " + number])
    world.until(lambda: world.in_flight() == 5)
    world.clock.now += 1
    for i, peer in enumerate(peers):
        assert world.receive(peer, 1) == [[b"to %d" % i]]


def test_a_cut_connection_loses_what_is_in_flight_and_comes_back(stage):
    """The peer does not notice; the broker sees its connection end, and later a new one of the same identity."""
    world = stage(LineSettings(delay_s=1.0))
    peer = world.peer()
    peer.send(b"lost")
    world.until(world.in_flight)
    (known,) = world.proxy.peers.values()
    world.proxy._cut(known, world.clock.now)
    world.clock.now += 0.1  # within the 0.2 s of a cut
    peer.send(b"lost too")
    world.until(lambda: world.proxy.num_dropped == 1)
    world.clock.now += 0.2
    peer.send(b"carried")
    world.until(lambda: world.in_flight() == 2)  # the first one is not due yet
    world.clock.now += 2
    assert world.receive(world.broker, 1) == [[peer.getsockopt(zmq.IDENTITY), b"carried"]]
    assert (world.proxy.num_cut, world.proxy.num_dropped, world.proxy.num_carried) == (1, 2, 1)


def test_a_cut_may_come_with_what_the_broker_sends(stage):
    """With more messages behind the one at which the connection is lost: they are lost too."""
    world = stage(LineSettings())
    peer = world.peer()
    peer.send(b"x")
    identity = world.receive(world.broker, 1)[0][0]
    world.proxy.cuts.chance = 1.0
    for _ in range(20):
        world.broker.send_multipart([identity, b"y"])
    world.until(lambda: world.proxy.num_cut)
    world.turn_for(0.1)
    assert list(drain(peer)) == []


def test_cuts_happen_by_chance(stage):
    """With a cut at each message the broker hears nothing."""
    cuts = delay_proxy.Cuts(1.0, 0.0)
    world = stage(LineSettings(), cuts=cuts)
    peer = world.peer()
    for _ in range(5):
        peer.send(b"x")
    world.until(lambda: world.proxy.num_dropped == 5)
    assert (world.proxy.num_cut, world.proxy.num_carried) == (5, 0)


def test_silent_peers_are_forgotten(stage):
    """Their connection to the broker ends; whoever comes back is met again."""
    world = stage(LineSettings(), idle_s=5.0)
    peer = world.peer()
    peer.send(b"x")
    identity = world.receive(world.broker, 1)[0][0]
    world.clock.now += 4.9
    world.proxy.turn(0)
    assert len(world.proxy.peers) == 1
    world.clock.now += 0.2
    world.proxy.turn(0)
    assert world.proxy.peers == {}
    world.until(lambda: unreachable(world.broker, identity))
    peer.send(b"again")
    assert world.receive(world.broker, 1) == [[identity, b"again"]]


def test_gone_peers_are_forgotten(stage):
    """What the broker sends to a peer that has closed ends its connection."""
    world = stage(LineSettings())
    peer = world.peer()
    peer.send(b"x")
    identity = world.receive(world.broker, 1)[0][0]
    peer.close(0)

    def told() -> bool:
        unreachable(world.broker, identity)
        return not world.proxy.peers

    world.until(told)


def unreachable(router: zmq.Socket[bytes], identity: bytes) -> bool:
    try:
        router.send_multipart([identity, b"?"], zmq.NOBLOCK)
    except zmq.ZMQError as error:
        return error.errno == zmq.EHOSTUNREACH
    return False


def test_a_wait_is_no_busy_wait(stage):
    """With a message on its way for half a second, the proxy sleeps until it is due."""
    world = stage(LineSettings(delay_s=0.5))
    world.proxy.clock = time.monotonic
    peer = world.peer()
    peer.send(b"x")
    turns = 0
    arrived: list[list[bytes]] = []
    end = time.monotonic() + PATIENCE_S
    while not arrived and time.monotonic() < end:
        world.proxy.turn()
        arrived += drain(world.broker)
        turns += 1
    assert arrived
    assert turns < 50


# --- with keys ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def secured(tmp_path_factory):
    """A broker and a verifier with keys, and the proxy before them, turned in a thread; `keys`, and the proxy's address."""
    keys = make_all(tmp_path_factory.mktemp("proxied") / "keys")
    with served(keys) as up:
        proxy = delay_proxy.DelayProxy("tcp://127.0.0.1:*", up.address, LineSettings(delay_s=0.005), keys=keys)
        stop = threading.Event()
        thread = threading.Thread(target=lambda: [proxy.turn(0.05) for _ in iter(stop.is_set, True)])
        thread.start()
        with Client(up.address, keys=f"{keys}/alice") as client:
            client.wait_until_ready()
        yield keys, proxy.address
        stop.set()
        thread.join()
        proxy.close()


def test_to_the_broker_each_peer_has_its_own_key(secured):
    """Through the proxy, too, Bob knows nothing of Alice's job, and a drafter submits none."""
    keys, address = secured
    params = SamplingParams(max_tokens=20)
    job = Submit(job_id=80, params=params, prompt_ids=np.array([5, 6, 7], np.int32))
    with JobDesk(address, PATIENCE_S, f"{keys}/alice") as alice, JobDesk(address, PATIENCE_S, f"{keys}/bob") as bob:
        assert dict(alice.submit([job])) == {80: None}
        (found,) = alice.fetch([80], wait=True)
        assert found.transcript.token_ids == toy_text([5, 6, 7], 20)
        assert [found.error.code for found in bob.fetch([80], wait=True)] == ["unknown"]
    laptop = curve_to_broker(f"{keys}/laptop", "draft")
    with zmq.Context() as context, connect_dealer(context, address, queue=True, curve=laptop) as socket:
        socket.send_multipart(encode(job))
        assert socket.poll(PATIENCE_S * 1000)
        assert decode(socket.recv_multipart()).code == "forbidden"


def test_without_a_key_nobody_gets_through(secured, tmp_path):
    """Neither who has none, nor who has one that is on no list."""
    keys, address = secured
    make_keys(tmp_path, "stranger", ("client",))
    shutil.copy(Path(keys) / "hub.pub", tmp_path)
    for own in ("", str(tmp_path)):
        with (
            Client(address, keys=own, timeout_s=0.3, cache_dir=tmp_path) as client,
            pytest.raises(JobError, match="no b"),
        ):
            client.status()


def test_an_identity_under_another_key_is_somebody_else(stage):
    """What it sends does not go to the broker under the key of who had the identity before."""
    proxy = stage(LineSettings()).proxy
    alice = proxy._peer(b"x", "alice")
    assert proxy._peer(b"x", "alice") is alice
    assert proxy._peer(b"x", "bob").key == "bob"


def test_it_needs_the_secrets_of_all(tmp_path):
    """The message says why, and whose are missing."""
    keys = make_all(tmp_path / "keys")
    for name in ("alice", "laptop"):
        (tmp_path / "keys" / f"{name}.secret").unlink()
    with pytest.raises(ConfigError, match=r"needs their secret keys; .* has none of alice, laptop"):
        delay_proxy.Keyring(keys)
    (tmp_path / "keys" / "hub.secret").unlink()
    with pytest.raises(ConfigError, match="no secret key of the role broker"):
        delay_proxy.Keyring(keys)


# --- as a process -------------------------------------------------------------------------------------------------


@contextmanager
def echo() -> Iterator[str]:
    """A ROUTER that sends everything back, in a thread."""
    stop = threading.Event()
    with zmq.Context() as context:
        router, address = bind_router(context, "tcp://127.0.0.1:*")
        thread = threading.Thread(target=_echo, args=(router, stop))
        thread.start()
        try:
            yield address
        finally:
            stop.set()
            thread.join()


def _echo(router: zmq.Socket[bytes], stop: threading.Event) -> None:
    with router:
        while not stop.is_set():
            if router.poll(50):
                for frames in drain(router):
                    router.send_multipart(frames)


def start(spawn, upstream: str, *options: str) -> str:
    """Start the script; return the address that it prints."""
    process = spawn("--upstream", upstream, *options, program=(sys.executable, str(SCRIPT)))
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end and process.poll() is None:
        found = re.match(r"tcp://\S+\n", process.output.read_text())
        if found:
            return found.group().strip()
        time.sleep(0.02)
    raise AssertionError(process.output.read_text())


def test_a_round_trip_takes_the_set_time(spawn):
    """Never less than what was set, and at best little more, on a machine as busy as it is."""
    with echo() as upstream, zmq.Context() as context:
        address = start(spawn, upstream, "--rtt-ms", "30")
        with connect_dealer(context, address, queue=True) as peer:
            times = [round_trip(peer, b"%d" % i) for i in range(30)]
            peer.close(0)
    assert min(times) >= 0.03
    assert min(times) < 0.04
    assert statistics.median(times) < 0.08


def round_trip(peer: zmq.Socket[bytes], payload: bytes) -> float:
    started = time.monotonic()
    peer.send(payload)
    assert peer.poll(PATIENCE_S * 1000), "no answer"
    assert peer.recv() == payload
    return time.monotonic() - started


def test_it_listens_on_this_machine_only_unless_asked(spawn):
    process = spawn("--listen", "tcp://0.0.0.0:*", program=(sys.executable, str(SCRIPT)))
    assert process.wait(PATIENCE_S) == 2
    assert "insecure" in process.output.read_text()


def test_it_ends_when_asked(spawn):
    """SIGTERM: exit status 0, and a word on what was carried."""
    process = spawn("--upstream", free_address(), program=(sys.executable, str(SCRIPT)))
    end = time.monotonic() + PATIENCE_S
    while "tcp://" not in process.output.read_text() and time.monotonic() < end:
        time.sleep(0.02)
    process.terminate()
    assert process.wait(PATIENCE_S) == 0
    assert "carried 0, dropped 0, cut 0" in process.output.read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_pipeline_over_it_says_the_same(spawn, free_address):
    """The bundled pair, the drafter 20 ms away: drafts arrive and are accepted, and the greedy text is plain decoding's."""
    spawn("broker", "--bind", free_address)
    spawn("worker", "--role", "target", "--broker", free_address)
    far = start(spawn, free_address, "--rtt-ms", "20", "--jitter-ms", "2")
    spawn("worker", "--role", "draft", "--broker", far, "--nice", "0")
    with Client(free_address, timeout_s=5) as client:
        wait_ready(client)
        prompts = ["def add(a, b):", "Tom has 3 boxes with 12 pencils each."]
        drafted, plain = (
            [client.generate(prompt, max_tokens=80, ignore_eos=True, mode=mode) for prompt in prompts]
            for mode in ("async", "plain")
        )
    assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
    assert sum(result.stats["accepted_tokens"] for result in drafted) > 0
    assert sum(result.stats["draft_tokens"] for result in plain) == 0


def wait_ready(client: Client, patience_s: float = 120) -> None:
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        try:
            if min(count_ready(client.status())) >= 1:
                return
        except JobError:
            pass
        time.sleep(0.1)
    raise AssertionError("not all were ready")
