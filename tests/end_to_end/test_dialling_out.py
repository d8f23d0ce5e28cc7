"""A verifier without an address, with keys: all its messages pass over the connection that it opened."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zmq

from specq.broker import Front
from specq.broker.links import AT_ONCE
from specq.client import Client
from specq.config import BrokerConfig, DraftConfig, TargetConfig, free_address
from specq.drafting.worker import DraftWorker
from specq.processes.broker import BrokerLoop
from specq.processes.draft import DrafterLoop
from specq.processes.target import VerifierLoop
from specq.protocol import (
    DIALS_OUT,
    ConfigError,
    Draft,
    GetStatus,
    Heartbeat,
    Hello,
    Open,
    SamplingParams,
    Verdict,
    Welcome,
    decode,
    encode,
)
from specq.testing.secured import make_all, model
from specq.testing.tokenizer import tokenizer_files
from specq.testing.toy import toy_text
from specq.testing.toy_drafters import ToyProposer
from specq.testing.waiting import wait_until
from specq.verifier import StepCurve, Verifier
from tests.journal.toy_target import SlowEngine

PROMPT = [5, 6, 7]
MOST_RUNS = 20  # until drafts came in time: the machine may be busy
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
        thread.join(60)
    assert not thread.is_alive()


def test_jobs_are_served_without_a_connection_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Session, drafts, verdicts and the tokenizer. The broker connects to nobody, and the drafts reach the verifier."""
    keys = make_all(tmp_path / "keys")
    broker = BrokerLoop(BrokerConfig(bind=free_address(), keys=keys, journal="none", heartbeat_ms=50))
    target = a_verifier(replace(DIALS, broker=broker.address, keys=keys))
    refused: list[Exception] = []  # beside drafts that came later than their time allows
    monkeypatch.setattr(target, "_drop", refused.append)
    worker = DraftWorker(ToyProposer(model()), incarnation=2)
    drafter = DrafterLoop(DraftConfig(broker=broker.address, keys=keys), worker, "draft")
    with running(broker), running(target), running(drafter):
        with Client(broker.address, keys=f"{keys}/alice", cache_dir=tmp_path) as client:
            client.wait_until_ready()
            assert client.generate("eggs", max_tokens=5).text
            for number in range(MOST_RUNS):
                done = client.generate(token_ids=[5, 6, number], max_tokens=60)
                assert done.token_ids == toy_text([5, 6, number], 60)
                if done.stats["accepted_tokens"]:
                    break
            workers = {one["role"]: one for one in client.status()["workers"]}
        assert done.stats["accepted_tokens"] > 0, "drafts have reached the verifier"
        assert (broker.backs, refused) == ({}, [])
        wait_until(lambda: not target.verifier.sessions)  # closed by the broker
    for one in workers.values():
        assert min(one["sent_bytes"], one["received_bytes"]) > 200, one


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
        hub.setsockopt(zmq.RCVTIMEO, 10_000)
        hub.bind("tcp://127.0.0.1:*")
        target = a_verifier(replace(DIALS, broker=hub.getsockopt_string(zmq.LAST_ENDPOINT)))
        wait_until(lambda: target.turn() or hub.poll(0))
        identity, *frames = hub.recv_multipart()
        hello = decode(frames)
        assert isinstance(hello, Hello)
        assert hello.endpoint == ""
        hub.send_multipart([identity, *encode(Welcome(heartbeat_ms=50, capabilities=("owners",)))])
        with pytest.raises(ConfigError, match="has no address: update it"):
            wait_until(target.turn)
        target.close()
        while not isinstance(last := decode(hub.recv_multipart()[1:]), Heartbeat):  # it may have said hello twice
            assert isinstance(last, Hello)
        assert last.state == "leaving"


@pytest.mark.parametrize("budget_s", [-1.0, 60.0])
def test_drafts_have_a_time_budget_on_a_link_too(monkeypatch: pytest.MonkeyPatch, budget_s: float) -> None:
    """When it is used up, drafts are dropped unread. Other messages are not."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as hub:
        hub.setsockopt(zmq.LINGER, 0)
        hub.bind("tcp://127.0.0.1:*")
        target = a_verifier(replace(DIALS, broker=hub.getsockopt_string(zmq.LAST_ENDPOINT)))
        monkeypatch.setattr(type(target.verifier.sources), "mail_s", budget_s)
        wait_until(lambda: target.turn() or hub.poll(0))
        identity = hub.recv_multipart()[0]
        draft = Draft(
            session_id=1, epoch=1, lane=0, base_len=2, first_id=0,
            token_ids=np.array([7]), parent_ids=np.array([-1]), scores=np.array([0.0]),
        )  # fmt: skip
        opened = Open(
            session_id=1, epoch=1, prompt_len=2, tokens_left=5, params=SamplingParams(), token_ids=np.array([5, 6])
        )
        for message in (Welcome(heartbeat_ms=50, capabilities=(DIALS_OUT,)), draft, opened):
            hub.send_multipart([identity, *encode(message)])
        wait_until(lambda: target.turn() or target.verifier.sessions)
        assert target.num_dropped == (budget_s < 0)
        target.close()


def test_many_requests_of_a_client_do_not_delay_a_verdict() -> None:
    """The broker's socket takes a message of each peer in turn, however many of one wait."""
    with zmq.Context() as context:
        front = Front(BrokerConfig(bind=free_address(), journal="none"))
        front.bind(context, zmq.Poller())
        front.router.bind("inproc://front")  # so that messages are there as soon as they are sent
        busy, verifier = (context.socket(zmq.DEALER) for _ in range(2))
        for socket, name in ((busy, b"busy"), (verifier, b"verifier")):
            socket.setsockopt(zmq.IDENTITY, name)
            socket.connect("inproc://front")
        for _ in range(500):
            busy.send_multipart(encode(GetStatus()))
        verifier.send_multipart(encode(Verdict(session_id=1, epoch=1, base_len=2, token_ids=np.array([7], np.int32))))
        order = [identity for identity, _, _ in front.messages({front.router: zmq.POLLIN})]
        for socket in (busy, verifier, front.router):
            socket.close(0)
    assert len(order) == AT_ONCE
    assert order.index(b"verifier") < 3
