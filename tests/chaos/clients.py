"""A process of clients that write down what they do and what they see: python -m tests.chaos.clients BROKERS DIRECTORY
NAME [GATEWAY]

Some submit jobs, receive them, and cancel a few. Others look at the jobs of all such processes, through any broker.
One repeats requests with an Idempotency-Key at the gateway. Each operation becomes a line of a file of this process in
the directory (`tests.chaos.history`). It runs until it is killed.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from math import inf
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import zmq

from specq import Client
from specq.client.detached import JobDesk
from specq.client.events import Event, JobDone, NewTokens
from specq.client.request import Request, read_request
from specq.protocol import (
    Failed,
    Follow,
    JobError,
    JobInfo,
    Message,
    Moved,
    ProtocolError,
    Tokens,
    decode,
    encode,
    split_addresses,
)
from specq.transport import connect_dealer
from tests.chaos.history import Operation

NUM_WRITERS, NUM_READERS = 3, 2
TIMEOUT_S = 180.0  # no client gives up: on a busy machine, a failover of the database alone took more than a minute
LOOK_S = 2.0  # for one look at a job
TOKENS_S = 0.1  # for the tokens behind a job's description: both are sent at once
HOPS = 4
RECENT = 12  # jobs; most looks are at these
REST_S = 0.1
HTTP_S = 60.0
UNSURE = ("busy", "no_verifier", "no_broker")  # refusals that say nothing of the job


class Scribe:
    """Writes operations down, and knows the jobs of all processes of clients from their files."""

    def __init__(self, directory: Path, name: str) -> None:
        self.name, self._directory = name, directory
        self.path = directory / f"{name}-{time.monotonic_ns()}.jsonl"
        self._file = self.path.open("a", buffering=1, encoding="ascii")
        self._read: dict[Path, int] = {}
        self._jobs = list[int]()
        self._lock = threading.Lock()

    def write(self, kind: str, start: float, end: float, **what: Any) -> None:
        """Write an operation down."""
        line = Operation(kind, start, end, who=self.name, **what).line() + "\n"
        with self._lock:
            self._file.write(line)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def jobs(self) -> list[int]:
        """Return all jobs that were submitted so far, by anybody."""
        with self._lock:
            for path in self._directory.glob("*.jsonl"):
                with path.open("rb") as file:
                    file.seek(self._read.get(path, 0))
                    new = file.read()
                whole = new[: new.rfind(b"\n") + 1]
                self._read[path] = self._read.get(path, 0) + len(whole)
                self._jobs += [json.loads(one)["job"] for one in whole.splitlines() if b'"kind": "begin"' in one]
            return list(self._jobs)


def submit_for_ever(brokers: str, scribe: Scribe, rng: random.Random) -> None:
    """Submit one job after the other, receive its tokens, and cancel some."""
    with Client(brokers, timeout_s=TIMEOUT_S) as client:
        served = client.served
        for number in count():
            prompt, num = [rng.randrange(5, 45) for _ in range(3)], rng.randrange(20, 500)
            seed, most = rng.randrange(1, 1000), rng.choice([inf, inf, inf, rng.randrange(num)])
            name = f"{scribe.path.name} {threading.get_ident()} {number}"
            arguments = {"token_ids": prompt, "id": name, "max_tokens": num, "seed": seed, "ignore_eos": True}
            request = read_request(arguments | {"keep_running": True}, served)
            (submit,) = request.submits
            start, inbox = time.monotonic(), SimpleQueue[Event]()
            scribe.write("begin", start, inf, job=submit.job_id, prompt=prompt, num=num, seed=seed)
            client._connection.submit(request, inbox.put)
            _receive(client, request, inbox, scribe, start, most)


def _receive(
    client: Client, request: Request, inbox: SimpleQueue[Event], scribe: Scribe, start: float, most: float
) -> None:
    """Write down what comes of a job. Cancel it when it has more than `most` tokens."""
    job_id, known = request.submits[0].job_id, 0
    while True:
        event, now = inbox.get(), time.monotonic()
        broker = client._connection.link._core.brokers.place(job_id)
        if isinstance(event, NewTokens):
            scribe.write("tokens", now, now, job=job_id, broker=broker, base=known, tokens=event.token_ids)
            known += len(event.token_ids)
            if known > most:
                scribe.write("cancel", now, inf, job=job_id)
                client._connection.cancel(request)
                most = inf
            continue
        if isinstance(event, JobDone):
            end = {"tokens": event.transcript.token_ids, "finish": event.transcript.finish}
        else:
            end = {"error": str(getattr(event, "error", event))}
        scribe.write("tokens", start, now, job=job_id, broker=broker, **end)
        return


def look_for_ever(brokers: str, scribe: Scribe, rng: random.Random) -> None:
    """Look at jobs, mostly new ones, through each broker; now and then wait for the end of one."""
    addresses, context = split_addresses(brokers), zmq.Context()
    with JobDesk(brokers, timeout_s=TIMEOUT_S) as desk:
        while True:
            jobs = scribe.jobs()
            time.sleep(rng.uniform(0.0, REST_S))
            if not jobs:
                continue
            job_id = rng.choice(jobs[-RECENT:] if rng.random() < 0.9 else jobs)
            if rng.random() < 0.03:
                fetch(desk, job_id, scribe)
            else:
                for address in rng.sample(addresses, len(addresses)):
                    look(context, address, job_id, scribe)


def fetch(desk: JobDesk, job_id: int, scribe: Scribe) -> None:
    """Follow a job to its end, as `specq fetch --wait` does."""
    start = time.monotonic()
    try:
        (found,) = desk.fetch([job_id], wait=True)
    except JobError as error:
        if error.code not in UNSURE:
            scribe.write("read", start, time.monotonic(), job=job_id, error=f"{error.code}: {error}")
        return
    if found.error is not None:
        scribe.write("read", start, time.monotonic(), job=job_id, error=f"{found.error.code}: {found.error}")
        return
    text = found.transcript
    scribe.write("read", start, time.monotonic(), job=job_id, tokens=text.token_ids, finish=text.finish)


def look(
    context: zmq.Context[zmq.Socket[bytes]],
    broker: str,
    job_id: int,
    scribe: Scribe,
    socket: zmq.Socket[bytes] | None = None,
) -> None:
    """Ask one broker for all tokens of a job, and follow the job if it has moved. Write down the first answer.

    `socket`: connected to the broker already.
    """
    start = time.monotonic()
    for _ in range(HOPS):
        answer = Operation("read", start, inf)
        found: dict[str, Any] = {}
        for message in _answers(context, broker, Follow(job_id=job_id, have=0), socket):
            if isinstance(message, Moved):
                found = {"moved": message.address}
            elif isinstance(message, Failed) and message.code not in UNSURE:
                found = {"error": f"{message.code}: {message.reason}"}
            elif isinstance(message, Tokens) and not message.base_len:
                found = {"tokens": message.token_ids.tolist(), "finish": message.finish}
            if found:
                break
        if "moved" not in found:
            if found:
                scribe.write("read", answer.start, time.monotonic(), job=job_id, broker=broker, **found)
            return
        broker, socket = found["moved"], None


def _answers(
    context: zmq.Context[zmq.Socket[bytes]], broker: str, asked: Message, connected: zmq.Socket[bytes] | None
) -> Iterator[Message]:
    """Yield what a broker answers within LOOK_S."""
    socket, until = connected or connect_dealer(context, broker, queue=True), time.monotonic() + LOOK_S
    try:
        while socket.poll(0):  # answers to an earlier question
            socket.recv_multipart()
        socket.send_multipart(encode(asked))
        while socket.poll(max(0.0, until - time.monotonic()) * 1e3):
            with suppress(ProtocolError):
                message = decode(socket.recv_multipart())
                if isinstance(message, JobInfo):
                    until = min(until, time.monotonic() + TOKENS_S)
                yield message
    finally:
        if connected is None:
            socket.close(0)


def repeat_for_ever(gateway: str, scribe: Scribe, rng: random.Random) -> None:
    """Send each request under a key until it is answered, and then once more."""
    for number in count():
        key = f"{scribe.path.name} {number}"
        body = {"model": "toy", "prompt": [5, 6, rng.randrange(7, 45)], "max_tokens": 40}
        request = urllib.request.Request(
            f"{gateway}/v1/completions", json.dumps(body | {"seed": number + 1}).encode(),
            {"Content-Type": "application/json", "Idempotency-Key": key},
        )  # fmt: skip
        until, texts = time.monotonic() + HTTP_S, 0
        while texts < 2 and time.monotonic() < until:
            start = time.monotonic()
            try:
                with urllib.request.urlopen(request, timeout=HTTP_S) as answer:
                    text = json.load(answer)["choices"][0]["text"]
            except (OSError, ValueError, KeyError):
                time.sleep(REST_S * 3)
                continue
            scribe.write("http", start, time.monotonic(), key=key, text=text)
            texts += 1
        if texts < 2:
            scribe.write("http", start, time.monotonic(), key=key, error=f"{texts} answers within {HTTP_S} s")


def main(brokers: str, directory: str, name: str, gateway: str = "") -> None:
    """Run until the process is killed."""
    scribe, seed = Scribe(Path(directory), name), time.monotonic_ns()
    parts = [(submit_for_ever, brokers)] * NUM_WRITERS + [(look_for_ever, brokers)] * NUM_READERS
    parts += [(repeat_for_ever, gateway)] if gateway else []
    threads = [
        threading.Thread(target=part, args=(where, scribe, random.Random(seed + number)), daemon=True)
        for number, (part, where) in enumerate(parts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
