"""A verifier without an address, with keys: all its messages pass over the connection that it opened."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from specq.client import Client
from specq.config import BrokerConfig, DraftConfig, TargetConfig, free_address
from specq.drafting.worker import DraftWorker
from specq.processes.broker import BrokerLoop
from specq.processes.draft import DrafterLoop
from specq.processes.target import VerifierLoop
from specq.protocol import ConfigError, Heartbeat, Hello, Welcome, decode, encode
from specq.testing.secured import make_all, model
from specq.testing.tokenizer import tokenizer_files
from specq.testing.toy import toy_text
from specq.testing.toy_drafters import ToyProposer
from specq.testing.waiting import wait_until
from specq.transport import Stop
from specq.verifier import StepCurve, Verifier
from tests.journal.toy_target import SlowEngine

PROMPT = [5, 6, 7]
DIALS = TargetConfig(bind="none")


def a_verifier(config: TargetConfig) -> VerifierLoop:
    engine, curve = SlowEngine(model(), 0.005), StepCurve([1, 64], [0.005, 0.006])
    verifier = Verifier(engine, curve, incarnation=1, tokenizer_files=tokenizer_files(), measures_drafts=False)
    return VerifierLoop(config, verifier, "toy")


@contextmanager
def running(loop: BrokerLoop | VerifierLoop | DrafterLoop) -> Iterator[None]:
    stopped = threading.Event()

    def run() -> None:
        while not stopped.is_set():
            loop.turn()
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(10)
    assert not thread.is_alive()


def test_jobs_are_served_without_a_connection_to_the_verifier(tmp_path: Path) -> None:
    """Session, drafts, verdicts and the tokenizer. The broker connects to nobody, and the drafts reach the verifier."""
    keys = make_all(tmp_path / "keys")
    broker = BrokerLoop(BrokerConfig(bind=free_address(), keys=keys, journal="none", heartbeat_ms=50))
    target = a_verifier(replace(DIALS, broker=broker.address, keys=keys))
    worker = DraftWorker(ToyProposer(model()), incarnation=2)
    drafter = DrafterLoop(DraftConfig(broker=broker.address, keys=keys), worker, "draft")
    with running(broker), running(target), running(drafter):
        with Client(broker.address, keys=f"{keys}/alice", cache_dir=tmp_path) as client:
            client.wait_until_ready()
            assert client.generate("eggs", max_tokens=5).text
            done = client.generate(token_ids=PROMPT, max_tokens=60)
            workers = {one["role"]: one for one in client.status()["workers"]}
        assert done.token_ids == toy_text(PROMPT, 60)
        assert done.stats["accepted_tokens"] > 0, "drafts have reached the verifier"
        assert (broker.backs, target.num_dropped) == ({}, 0)
        wait_until(lambda: not target.verifier.sessions)  # closed by the broker
    for one in workers.values():
        assert min(one["sent_bytes"], one["received_bytes"]) > 1000, one


def test_a_restarted_broker_continues_the_sessions(tmp_path: Path) -> None:
    """The verifier connects again by itself, and goes on with the job of the journal."""
    section = BrokerConfig(bind=free_address(), journal=str(tmp_path / "journal"), heartbeat_ms=50)
    broker = BrokerLoop(section)
    target = a_verifier(replace(DIALS, broker=broker.address))
    with running(target), Client(section.bind, cache_dir=tmp_path, timeout_s=20) as client:
        with running(broker):
            client.wait_until_ready()
            job = client.stream(token_ids=PROMPT, max_tokens=200)
            pieces = [next(job)]
        with running(BrokerLoop(section)):
            pieces += job
    tokens = [token for piece in pieces for token in piece.token_ids]
    assert tokens == toy_text(PROMPT, 200)


def test_a_broker_that_must_connect_to_verifiers_is_left() -> None:
    """An older one registers the verifier and would place jobs there. The verifier leaves it and says what to do."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as hub:
        hub.setsockopt(zmq.LINGER, 0)
        hub.bind("tcp://127.0.0.1:*")
        target = a_verifier(replace(DIALS, broker=hub.getsockopt_string(zmq.LAST_ENDPOINT)))
        target.turn()
        identity, *frames = hub.recv_multipart()
        hello = decode(frames)
        assert isinstance(hello, Hello)
        assert hello.endpoint == ""
        hub.send_multipart([identity, *encode(Welcome(heartbeat_ms=50, capabilities=("owners",)))])
        with pytest.raises(ConfigError, match="has no address: update it"):
            target.serve(Stop())
        _, *frames = hub.recv_multipart()
        left = decode(frames)
        assert isinstance(left, Heartbeat)
        assert left.state == "leaving"
