"""Keys over real sockets: who is not on the list gets in nowhere, and who is may do what its role says."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import zmq
from structlog.testing import capture_logs

from specq import Client
from specq.client.detached import JobDesk
from specq.protocol.errors import ConfigError, JobError
from specq.protocol.layout import MAX_ARRAY
from specq.protocol.messages import Cancel, FetchTokenizer, Follow, GetStatus, Hello, ListJobs, Submit
from specq.protocol.params import SamplingParams
from specq.protocol.wire import decode, encode
from specq.testing import wait_until
from specq.testing.secured import Secured, make_all, model, served
from specq.testing.toy import toy_text
from specq.transport.broker_link import BrokerLink
from specq.transport.keys import Curve, curve_to_broker, make_keys, own_keys, read_grants
from specq.transport.sockets import connect_dealer

PATIENCE_S = 60.0
SHORT_S = 0.15  # for what must not happen
FAILURES = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
FAILURES |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_DISCONNECTED
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def up(tmp_path_factory):
    """A broker and a verifier with keys; all tests share them."""
    with served(make_all(tmp_path_factory.mktemp("secured") / "keys")) as running:
        yield running


@pytest.fixture
def alice(up, tmp_path):
    with Client(up.address, keys=f"{up.keys}/alice", timeout_s=PATIENCE_S, cache_dir=tmp_path) as client:
        client.wait_until_ready()
        yield client


def desk(up: Secured, name: str, timeout_s: float = PATIENCE_S) -> JobDesk:
    return JobDesk(up.address, timeout_s, f"{up.keys}/{name}")


def a_job(job_id: int, max_tokens: int = 20) -> Submit:
    return Submit(job_id=job_id, params=SamplingParams(max_tokens=max_tokens), prompt_ids=np.array(PROMPT, np.int32))


def can_connect(endpoint: str, curve: Curve | None) -> bool:
    """Does a connection to the endpoint come to stand, or does the handshake fail?"""
    with zmq.Context() as context, connect_dealer(context, endpoint, curve=curve) as socket:
        with socket.get_monitor_socket(FAILURES) as monitor:
            wait_until(lambda: socket.poll(5, zmq.POLLOUT) or monitor.poll(5))
            stands = bool(socket.poll(0, zmq.POLLOUT))
        socket.disable_monitor()
        return stands


def register(address: str, hello: Hello, curve: Curve) -> None:
    """Send Hello as a worker, and return the answer of the broker."""
    with zmq.Context() as context:
        link = BrokerLink(context, address, hello, curve)
        with link.socket:
            wait_until(lambda: link.send(hello))
            wait_until(lambda: link.socket.poll(50) and list(link.receive()))


def strangers_key(up: Secured, tmp_path: Path) -> Curve:
    """Return a key that is on no list, of someone who knows the broker's public key."""
    make_keys(tmp_path, "stranger", ("broker", "target", "draft", "client"))
    shutil.copy(Path(up.keys) / "hub.pub", tmp_path)
    (tmp_path / "stranger.pub").unlink()
    return curve_to_broker(str(tmp_path), "client")


def test_text_comes_over_encrypted_sockets(alice):
    """Clients, broker and verifier, each with its key, in both directions."""
    assert alice.generate(token_ids=PROMPT, max_tokens=20).token_ids == toy_text(PROMPT, 20)


def test_a_stranger_is_not_let_in(up, tmp_path):
    """No key, an unknown key, the right key for the wrong broker: none gets a connection."""
    known, stranger = curve_to_broker(f"{up.keys}/alice", "client"), strangers_key(up, tmp_path)
    assert can_connect(up.address, known)
    assert not can_connect(up.address, None)
    assert not can_connect(up.address, stranger)
    assert not can_connect(up.address, Curve(known.own, stranger.own.public_key))


def test_a_verifier_lets_only_its_broker_in(up, tmp_path):
    """Any peer that opens sessions there could use its computing time, or read the texts."""
    gpu = next(grant for grant in read_grants(Path(up.keys)) if grant.name == "gpu")
    endpoint = up.target.links.hello.endpoint
    assert can_connect(endpoint, Curve(own_keys(up.keys, "broker"), gpu.public_key))
    assert not can_connect(endpoint, Curve(own_keys(f"{up.keys}/alice", "client"), gpu.public_key))
    assert not can_connect(endpoint, Curve(strangers_key(up, tmp_path).own, gpu.public_key))
    assert not can_connect(endpoint, None)


def test_a_client_without_its_key_receives_no_messages(up, tmp_path):
    with Client(up.address, timeout_s=SHORT_S, cache_dir=tmp_path) as client, pytest.raises(JobError, match="--keys"):
        client.status()


def test_a_drafters_key_cannot_submit_jobs(up, alice):
    """It receives an error, also when it asks for others' jobs. Each key on the list may ask for the state."""
    with JobDesk(up.address, PATIENCE_S, f"{up.keys}/alice") as own:
        assert dict(own.submit([a_job(70)])) == {70: None}
    laptop = curve_to_broker(f"{up.keys}/laptop", "draft")
    with zmq.Context() as context, connect_dealer(context, up.address, queue=True, curve=laptop) as socket:
        for message in (a_job(71), Follow(job_id=70), Cancel(job_id=70), ListJobs(), FetchTokenizer(), GetStatus()):
            socket.send_multipart(encode(message))
        heard = []
        while len(heard) < 6 and socket.poll(int(PATIENCE_S * 1e3)):
            heard.append(decode(socket.recv_multipart()))
    told = [(type(m).__name__, getattr(m, "code", "")) for m in heard]
    assert told == [("Failed", "forbidden")] * 5 + [("Status", "")]
    assert "the key laptop has the role draft; expected the role client" in heard[0].reason


def test_a_clients_key_cannot_register_a_worker(up):
    """It is refused for good, with the reason, for any role that it claims."""
    alice = curve_to_broker(f"{up.keys}/alice", "client")
    for role in ("draft", "target"):
        with pytest.raises(ConfigError, match="the key alice has the role client"):
            register(up.address, Hello(role=role, name="x", incarnation=1, model=model()), alice)


def test_jobs_are_their_owners(up, alice):
    """Bob neither lists, reads, stops nor attaches to what Alice submitted; Alice does, over another connection too."""
    with desk(up, "alice") as first:
        assert dict(first.submit([a_job(80)])) == {80: None}
    with desk(up, "bob") as bob:
        assert [line["job_id"] for line in bob.list_jobs()] == []
        assert [found.error.code for found in bob.fetch([80], wait=True)] == ["unknown"]
        assert [found.error.code for found in bob.cancel([80])] == ["unknown"]
        assert dict(bob.submit([a_job(80)]))[80].code == "forbidden"
    with desk(up, "alice") as second:
        assert 80 in [line["job_id"] for line in second.list_jobs()]
        (found,) = second.fetch([80], wait=True)
        assert found.transcript.token_ids == toy_text(PROMPT, 20)


def test_a_frame_that_is_too_large_cuts_its_sender_off(up, alice):
    """It never reaches the broker's memory as a whole, and other peers are not affected."""
    with zmq.Context() as context:
        curve = curve_to_broker(f"{up.keys}/bob", "client")
        with connect_dealer(context, up.address, curve=curve) as socket:
            wait_until(lambda: socket.poll(50, zmq.POLLOUT))
            with socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
                socket.send_multipart([bytes(8), bytes(MAX_ARRAY)])
                socket.send_multipart([bytes(8), bytes(MAX_ARRAY + 1)])
                wait_until(lambda: monitor.poll(50))
            socket.disable_monitor()
    assert alice.generate(token_ids=PROMPT, max_tokens=5).token_ids == toy_text(PROMPT, 5)


def test_keys_are_added_and_taken_away_while_the_broker_runs(up, tmp_path):
    secret, public = make_keys(Path(up.keys), "carol", ("client",))
    carol = Client(up.address, keys=f"{up.keys}/carol", timeout_s=PATIENCE_S, cache_dir=tmp_path)
    with carol:
        assert carol.status()["models"] == ["toy"]
        public.unlink()
        secret.unlink()
        wait_until(lambda: "carol" not in up.broker.front.grants)
        with pytest.raises(JobError, match="no longer allowed"):
            carol.generate(token_ids=PROMPT, max_tokens=1)


def test_who_came_before_its_key_was_known_is_let_in_later(up, tmp_path, monkeypatch):
    """Libzmq does not connect again by itself after a refusal."""
    monkeypatch.setattr("specq.client.link.AGAIN_S", 0.2)
    keys = {name: make_keys(Path(up.keys), name, (role,))[1] for name, role in (("erin", "client"), ("tpu", "draft"))}
    known = {public: public.read_bytes() for public in keys.values()}
    for public in known:
        public.unlink()
    wait_until(lambda: not up.broker.front.grants.keys() & keys.keys())
    hello = Hello(name="tpu", role="draft", incarnation=1, model=model())
    with (
        capture_logs() as logs,
        Client(up.address, keys=f"{up.keys}/erin", timeout_s=PATIENCE_S, cache_dir=tmp_path) as erin,
        zmq.Context() as context,
        ThreadPoolExecutor() as pool,
    ):
        link = BrokerLink(context, up.address, hello, curve_to_broker(f"{up.keys}/tpu", "draft"))
        with link.socket:
            status = pool.submit(erin.status)
            wait_until(lambda: sum(log["event"] == "key_refused" for log in logs) >= 2)
            for public, content in known.items():
                public.write_bytes(content)
            wait_until(lambda: up.broker.front.grants.keys() > keys.keys())
            assert status.result(PATIENCE_S)["models"] == ["toy"]
            wait_until(lambda: link.say_hello(warn_s=0.5) or ([*link.receive()] and link.registered))


def broker_job(up: Secured, job_id: int):
    return up.broker.broker.state.jobs.active[job_id]


def slow_down(up: Secured) -> None:
    """Let each step take a while, so that a long text is under way when something happens."""
    step, never = up.verifier.engine.step, threading.Event()
    up.verifier.engine.step = lambda *asked: (never.wait(0.005), step(*asked))[1]


def test_a_reader_is_cut_off_with_its_key(tmp_path):
    """Its job fails at once in mid-text, and no more tokens are sent."""
    with served(make_all(tmp_path / "keys")) as up:
        slow_down(up)
        wait_until(lambda: up.broker.backs)
        secret, public = make_keys(Path(up.keys), "dave", ("client",))
        with desk(up, "dave") as dave:
            assert dict(dave.submit([a_job(90, max_tokens=1900)])) == {90: None}
        job = broker_job(up, 90)
        wait_until(lambda: job.transcript.token_ids)
        public.unlink()
        secret.unlink()
        wait_until(lambda: job.transcript.finish)
        assert (job.transcript.finish, job.transcript.failure.code, job.readers.by_client) == ("error", "forbidden", {})


def test_a_verifier_is_cut_off_with_its_key(tmp_path):
    """Its DEALER is closed, the job waits, what it still says of it has no effect; it comes back with its key, and goes
    on."""
    with served(make_all(tmp_path / "keys")) as up:
        slow_down(up)
        broker, public = up.broker.broker, Path(up.keys) / "gpu.pub"
        with desk(up, "alice") as alice:
            wait_until(lambda: up.broker.backs)
            assert dict(alice.submit([a_job(91, max_tokens=1900)])) == {91: None}
            job = broker_job(up, 91)
            wait_until(lambda: job.transcript.token_ids)
            key = public.read_bytes()
            public.unlink()
            wait_until(lambda: not up.broker.backs)
            assert (job.session.verifier, broker.state.workers.verifiers()) == (b"", [])
            length = len(job.transcript.token_ids)
            wait_until(lambda: not up.target.links.registered)
            assert (len(job.transcript.token_ids), up.refusals) == (length, [])
            public.write_bytes(key)
            wait_until(lambda: len(job.transcript.token_ids) > length)


def test_a_broker_is_cut_off_with_its_key(tmp_path):
    """A verifier whose list no longer has its key ignores it, also over the open connection."""
    keys = make_all(tmp_path / "keys")
    shutil.copytree(keys, tmp_path / "gpu")
    with served(keys, target_keys=str(tmp_path / "gpu")) as up, desk(up, "alice") as alice:
        wait_until(lambda: up.broker.backs)
        assert dict(alice.submit([a_job(92, max_tokens=5)])) == {92: None}
        (found,) = alice.fetch([92], wait=True)
        assert found.transcript.token_ids == toy_text(PROMPT, 5)
        (tmp_path / "gpu" / "hub.pub").unlink()
        wait_until(lambda: not up.target.zap.allowed.grants)
        assert dict(alice.submit([a_job(93, max_tokens=5)])) == {93: None}
        job = broker_job(up, 93)
        wait_until(lambda: job.session.unconfirmed.num_opens > 1)
        assert (up.verifier.sessions, job.transcript.token_ids) == ({}, [])


def test_messages_of_a_replaced_key_are_dropped(tmp_path):
    """After another key takes its name, the connection of the old key has no permissions."""
    with served(make_all(tmp_path / "keys")) as up:
        curve = curve_to_broker(f"{up.keys}/bob", "client")
        with zmq.Context() as context, connect_dealer(context, up.address, queue=True, curve=curve) as socket:
            socket.send_multipart(encode(GetStatus()))
            assert socket.poll(int(PATIENCE_S * 1e3))
            assert type(decode(socket.recv_multipart())).__name__ == "Status"
            make_keys(tmp_path / "new", "bob", ("client",))
            (tmp_path / "new" / "bob.pub").replace(Path(up.keys) / "bob.pub")
            new = own_keys(str(tmp_path / "new" / "bob"), "client").public_key
            wait_until(lambda: up.broker.front.grants["bob"].public_key == new)
            socket.send_multipart(encode(Follow(job_id=1)))
            assert socket.poll(int(PATIENCE_S * 1e3))
            heard = decode(socket.recv_multipart())
    assert (heard.code, heard.reason) == ("forbidden", "this key is no longer allowed")
