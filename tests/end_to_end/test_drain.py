"""SIGTERM in each role, as processes: work ends or goes elsewhere, within a set time, and the status is 0."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from specq import Client
from specq.protocol.errors import JobError
from specq.testing import toy_text, wait_until
from specq.transport.sockets import Stop
from tests.journal.test_processes import BEATS, PATIENCE_S, TOY, Process, said

PROMPT = [5, 6, 7]
ENDLESS = 1900
DRAIN_S = 5.0  # a verifier's default


@pytest.fixture
def client(spawn: Callable[..., Process], free_address: str, tmp_path: Path):
    """A client of a broker that keeps its jobs in memory; `client.broker` is the broker's process."""
    broker = spawn("broker", "--bind", free_address, "--journal", "none", "--drain-seconds", "1", *BEATS)
    with Client(free_address, timeout_s=PATIENCE_S, cache_dir=tmp_path / "cache") as connected:
        connected.broker = broker
        yield connected


def running(client: Client) -> int:
    return client.status()["jobs"]["running"]


@pytest.mark.slow
def test_a_verifier_hands_over_what_it_has(client: Client, spawn: Callable[..., Process], free_address: str) -> None:
    """To the other one, at once; and ends with status 0 before its time is over."""
    first = spawn(free_address, "4", program=TOY)
    client.wait_until_ready()
    jobs = [client.submit(token_ids=[*PROMPT, i], max_tokens=900) for i in range(3)]
    wait_until(lambda: running(client) == 3)
    spawn(free_address, "0", program=TOY)
    client.wait_until_ready(num_targets=2)
    asked = time.monotonic()
    first.terminate()
    assert first.wait(PATIENCE_S) == 0
    assert time.monotonic() - asked < DRAIN_S
    assert [job.result(PATIENCE_S).token_ids for job in jobs] == [toy_text([*PROMPT, i], 900) for i in range(3)]
    assert "event=worker_left name=toy role=target" in said(client.broker)


@pytest.mark.slow
def test_the_only_verifier_ends_what_it_has(client: Client, spawn: Callable[..., Process], free_address: str) -> None:
    """Within its time; what would take longer waits for another."""
    only = spawn(free_address, "4", program=TOY)
    client.wait_until_ready()
    short = client.submit(token_ids=PROMPT, max_tokens=400)
    wait_until(lambda: running(client))
    only.terminate()
    assert short.result(PATIENCE_S).token_ids == toy_text(PROMPT, 400)
    assert only.wait(PATIENCE_S) == 0


def test_a_broker_without_a_journal_ends_what_runs(
    client: Client, spawn: Callable[..., Process], free_address: str
) -> None:
    """New jobs are refused meanwhile. Jobs that do not end in time receive an error. The status is 0."""
    spawn(free_address, "5", program=TOY)
    client.wait_until_ready()
    endless = client.submit(token_ids=PROMPT, max_tokens=ENDLESS)
    wait_until(lambda: running(client))
    short = client.submit(token_ids=PROMPT, max_tokens=20)
    wait_until(lambda: running(client) == 2)
    client.broker.terminate()

    def refusal() -> str:
        try:
            client.generate(token_ids=[9], max_tokens=1)
        except JobError as error:
            return str(error)
        return ""

    wait_until(lambda: "is stopping" in refusal())
    assert short.result(PATIENCE_S).token_ids == toy_text(PROMPT, 20)
    with pytest.raises(JobError, match="it keeps no journal"):
        endless.result(PATIENCE_S)
    assert client.broker.wait(PATIENCE_S) == 0


@pytest.mark.slow
def test_a_drafter_takes_leave(client: Client, spawn: Callable[..., Process], free_address: str) -> None:
    """Its sessions go to another drafter at once; the status is 0."""
    spawn(free_address, "5", program=TOY)
    client.wait_until_ready()
    worker = (sys.executable, "-m", "specq", "worker", "--role", "draft", "--proposer", "ngram")
    drafter, _ = (spawn("--broker", free_address, "--name", name, program=worker) for name in ("first", "second"))
    client.wait_until_ready(num_drafters=2)
    job = client.submit(token_ids=PROMPT, max_tokens=600)
    wait_until(lambda: running(client))
    drafter.terminate()
    assert drafter.wait(PATIENCE_S) == 0
    assert job.result(PATIENCE_S).token_ids == toy_text(PROMPT, 600)
    assert "event=worker_left name=first role=draft" in said(client.broker)


def test_signals_while_loading_and_later() -> None:
    """Nothing could be lost yet: the process ends there with status 0. Later the first asks, the second insists."""
    before = {name: signal.getsignal(name) for name in (signal.SIGTERM, signal.SIGINT)}
    try:
        stop = Stop(at_once=True)
        with pytest.raises(SystemExit) as raised:
            signal.raise_signal(signal.SIGTERM)
        assert (raised.value.code, stop.asked) == (0, False)
        stop.at_once = False
        signal.raise_signal(signal.SIGTERM)
        assert (bool(stop), stop.asked_again) == (True, False)
        signal.raise_signal(signal.SIGINT)
        assert stop.asked_again
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
