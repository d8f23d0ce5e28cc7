"""Keys and floods with real processes: a broker, a verifier and a draft worker, each with its key, and peers that
flood."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import zmq

from specq import Client
from specq.protocol.messages import Assign, Draft, FetchTokenizer, GetStatus, Heartbeat, Hello, Verdict
from specq.protocol.versions import CAPABILITIES
from specq.protocol.wire import decode, encode
from specq.testing.secured import make_all, model
from specq.testing.toy import toy_text
from specq.transport.keys import SECRET, curve_to_broker
from specq.transport.sockets import connect_dealer, try_send

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
READY_S = 60
FLOOD_S = 6.0
MOST_GROWTH = 64 << 20  # bytes; what a flooding peer may leave in queues
PROMPT = "the magic word is xyzzy"
STATM = Path("/proc/self/statm")


Deployment = tuple[str, str, dict[str, Any]]


@pytest.fixture
def deployment(request, spawn, free_address, tmp_path) -> Deployment:
    """Start all three with keys, at the log level that is asked for; return address, keys and processes."""
    keys = make_all(tmp_path / "keys")
    target = (free_address, "2", "tcp://127.0.0.1:*", "", "64", keys)
    common = ("--keys", keys, "--log-level", request.param)
    processes = {
        "broker": spawn("broker", "--bind", free_address, "--journal", "none", *common),
        "target": spawn(*target, program=(sys.executable, "-m", "tests.journal.toy_target")),
        "draft": spawn("worker", "--role", "draft", "--proposer", "ngram", "--broker", free_address, *common),
    }
    return free_address, keys, processes


@contextmanager
def connected(address: str, keys: str, drafters: int = 1) -> Iterator[Client]:
    """Connect as Alice, when all are ready."""
    with Client(address, keys=f"{keys}/alice", timeout_s=READY_S) as client:
        client.wait_until_ready(num_drafters=drafters, timeout_s=READY_S)
        yield client


@pytest.mark.parametrize("deployment", ["debug"], indirect=True)
def test_no_secret_is_logged(deployment):
    """No process logs keys, prompts or answers, at any level."""
    address, keys, processes = deployment
    with connected(address, keys) as client:
        result = client.generate(PROMPT, max_tokens=60)
        ids = client.served.codec.encode(PROMPT)
    assert result.token_ids == toy_text(ids, 60)
    secrets = [
        line for path in Path(keys).glob("*" + SECRET) for line in path.read_text().splitlines() if "secret_key" in line
    ]
    hidden = [line.split('"')[1] for line in secrets] + ["xyzzy", str(ids)[1:-1], str(result.token_ids[:8])[1:-1]]
    said = {name: process.output.read_text() for name, process in processes.items()}
    assert "worker_registered" in said["broker"]
    assert "worker_welcomed" in said["draft"]
    assert len(secrets) == 5
    assert [(name, text) for name, text in said.items() for word in hidden if word in text] == []


# --- floods -----------------------------------------------------------------------------------------------------------


class Flood:
    """A peer that connects with a key and sends what it likes as fast as it can, until the block is left."""

    def __init__(self, address: str, keys: str, role: str, run: Callable[[Flood], None]) -> None:
        self.address, self.curve, self.num_sent = address, curve_to_broker(keys, role), 0
        self._run, self.stopped = run, threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self._thread.join(60)

    def _serve(self) -> None:
        with (
            zmq.Context() as context,
            connect_dealer(context, self.address, queue=True, curve=self.curve) as self.socket,
        ):
            self.socket.setsockopt(zmq.LINGER, 0)
            self._run(self)

    def send(self, frames: list[bytes]) -> None:
        self.num_sent += try_send(self.socket, frames)


def drafting(flood: Flood) -> None:
    """Register as a drafter; send forged, huge or malformed drafts for the last session that was given to it, whether
    they are asked for or not, also after it has ended."""
    hello = Hello(role="draft", name="flood", incarnation=1, model=model(), capabilities=CAPABILITIES)
    flood.send(encode(hello))
    last: Assign | None = None
    base_len, beaten = 0, 0.0
    while not flood.stopped.is_set():
        if time.monotonic() > beaten + 0.1:
            beaten = time.monotonic()
            flood.send(encode(Heartbeat(incarnation=1, state="ready", steps=flood.num_sent)))
        while flood.socket.poll(1):
            message = decode(flood.socket.recv_multipart())
            if isinstance(message, Assign):
                last, base_len = message, len(message.token_ids)
            elif isinstance(message, Verdict) and last is not None and message.session_id == last.session_id:
                base_len = message.base_len
        if last is not None:
            send_drafts(flood, last, base_len)


def send_drafts(flood: Flood, to: Assign, base_len: int) -> None:
    for number in range(200):
        first, size = 600 * (flood.num_sent + number), 500 if number % 10 == 0 else 8
        parents = np.arange(first - 1, first + size - 1)
        parents[0] = -1
        tokens = np.random.default_rng(number).integers(1, 50, size)
        draft = Draft(
            session_id=to.session_id, epoch=to.epoch, lane=to.lane ^ (number % 5 == 1), base_len=base_len,
            first_id=first,
            token_ids=tokens, parent_ids=parents, scores=np.zeros(size),
        )  # fmt: skip
        key, header, *arrays = encode(draft)
        flood.send([key, header[: -(number % 3)] if number % 3 else header, *arrays])


def asking(flood: Flood) -> None:
    """Request all large answers, and read none of them."""
    while not flood.stopped.is_set():
        flood.send(encode(FetchTokenizer()))
        flood.send(encode(GetStatus()))
        flood.send([bytes(8), b"\xff" * 60_000])


def resident(pid: int) -> int:
    """Return the bytes that a process has in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("deployment", ["info"], indirect=True)
@pytest.mark.skipif(not STATM.exists(), reason="memory is read from /proc")
def test_floods_change_no_text_and_fill_no_memory(deployment):
    """While one peer floods with drafts, and one with requests whose answers it does not read, others are served, and
    the broker's and the verifier's memory stay as they are."""
    address, keys, processes = deployment
    with connected(address, keys) as client, Flood(address, f"{keys}/laptop", "draft", drafting) as drafts:
        client.wait_until_ready(num_drafters=2, timeout_s=READY_S)
        with Flood(address, f"{keys}/bob", "client", asking) as requests:
            assert client.generate(token_ids=[5, 6], max_tokens=200).token_ids == toy_text([5, 6], 200)
            before = {name: resident(processes[name].pid) for name in ("broker", "target")}
            end, num_jobs = time.monotonic() + FLOOD_S, 0
            while time.monotonic() < end:
                num_jobs += 1
                text = client.generate(token_ids=[5, num_jobs % 40], max_tokens=100).token_ids
                assert text == toy_text([5, num_jobs % 40], 100)
            after = {name: resident(processes[name].pid) for name in before}
        counts = client.status()["counts"]
    growth = {name: after[name] - before[name] for name in before}
    assert max(growth.values()) < MOST_GROWTH, f"{growth} after {drafts.num_sent} drafts, {requests.num_sent} requests"
    assert num_jobs >= 3, counts
    refused_drafts = counts.get("late_drafts", 0) + counts.get("limited_drafts", 0)
    assert min(counts["limited_requests"], counts["dropped_front"], refused_drafts) > 100, counts
