"""A verifier and a draft worker behind two brokers, each with a client. All loops are real, in threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from specq.client import Client
from specq.config import BrokerConfig, DraftConfig, TargetConfig, free_address
from specq.drafting.worker import DraftWorker
from specq.processes.broker import BrokerLoop
from specq.processes.draft import DrafterLoop
from specq.processes.target import VerifierLoop
from specq.testing.secured import model
from specq.testing.tokenizer import tokenizer_files
from specq.testing.toy import ToyEngine, toy_text
from specq.testing.toy_drafters import ToyProposer
from specq.testing.waiting import wait_until
from specq.verifier import StepCurve, Verifier

PROMPTS = [[5, 6, number] for number in range(7, 13)]


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


def test_two_brokers_share_a_verifier_and_a_draft_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both at the same time. When one stops, the other goes on."""
    section = BrokerConfig(journal="none", heartbeat_ms=50, liveness_ms=2000)
    brokers = [BrokerLoop(replace(section, bind=free_address())) for _ in range(2)]
    addresses = ",".join(broker.address for broker in brokers)
    curve = StepCurve([1, 64], [0.001, 0.002])
    verifier = Verifier(
        ToyEngine(model()), curve, incarnation=1, tokenizer_files=tokenizer_files(), measures_drafts=False
    )
    worker = DraftWorker(ToyProposer(model()), incarnation=2)
    target = VerifierLoop(TargetConfig(broker=addresses), verifier, "toy")
    refused: list[Exception] = []  # beside drafts that came later than their time allows
    monkeypatch.setattr(target, "_drop", refused.append)
    drafter = DrafterLoop(DraftConfig(broker=addresses), worker, "draft")

    def ask(broker: BrokerLoop) -> list[list[int]]:
        with Client(broker.address, cache_dir=tmp_path) as client:
            client.wait_until_ready()
            return [client.generate(token_ids=prompt, max_tokens=40).token_ids for prompt in PROMPTS]

    expected = [toy_text(prompt, 40) for prompt in PROMPTS]
    with running(target), running(drafter), running(brokers[0]):
        with running(brokers[1]), ThreadPoolExecutor(2) as pool:
            wait_until(lambda: all(len(broker.broker.state.workers.all()) == 2 for broker in brokers))
            assert list(pool.map(ask, brokers)) == [expected, expected]
            drafts = [one.num_drafts for broker in brokers for one in broker.broker.state.workers.drafters()]
            assert all(drafts), drafts
            assert (refused, drafter.num_dropped) == ([], 0)
        wait_until(lambda: [link.registered for link in target.links] == [True, False])
        assert ask(brokers[0]) == expected
