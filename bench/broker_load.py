"""The maximum rate of verdicts of a broker: `specq bench broker-rate` runs `python -m bench.broker_load ...`.

One process acts as a verifier, the clients and, on request, drafters. The verifier sends some more tokens for all
sessions at once. It continues as soon as the clients have the tokens of earlier steps. A few steps are in flight, so
that the broker never waits.

Rule: this side does as little as possible, but it checks each token that clients receive. A missing, doubled or
misplaced token is an error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import zmq

from bench.deployments import cpu_seconds
from bench.stubs import hello
from specq.protocol import (
    ORIGIN_CODES,
    PLAIN,
    Accepted,
    EngineError,
    Failed,
    Frames,
    JobTokens,
    Message,
    Open,
    SamplingParams,
    Submit,
    Tokens,
    Verdicts,
    array_frame,
    decode,
    encode,
)
from specq.runtime import apply_cpu
from specq.transport import bind_router, connect_dealer, drain

STEPS_UNDER_WAY = 4
FIRST_JOB = 1000
TOKEN = 100
PATIENCE_S = 30.0
MAX_TOKENS = 100_000  # of a job
_BASE_LENS = array_frame(Verdicts, "base_lens")


@dataclass(frozen=True, slots=True)
class Load:
    """The load on a broker.

    seconds   length of each of `repeats` measurements.
    pid       the broker's process.
    cores     the cores of the load itself.
    first_job the id of the first job.
    """

    broker: str
    pid: int
    sessions: int
    tokens: int
    clients: int
    drafters: int
    seconds: float
    repeats: int
    cores: tuple[int, ...]
    first_job: int = FIRST_JOB


class Steps:
    """The verdicts of steps on all sessions: the same frames each time, except for the positions."""

    def __init__(self, opened: Sequence[Open], num_tokens: int) -> None:
        count = len(opened)
        self._base_lens = np.array([len(message.token_ids) for message in opened], np.int32)
        self._num_tokens = num_tokens
        self._frames = encode(
            Verdicts(
                min_accept_prob=200,
                step_us=5000,
                session_ids=np.array([message.session_id for message in opened], np.int64),
                epochs=np.array([message.epoch for message in opened], np.int64),
                base_lens=self._base_lens,
                num_tokens=np.full(count, num_tokens, np.int32),
                num_nodes=np.zeros(count, np.int32),
                num_seen=np.zeros(count, np.int32),
                waited_us=np.zeros(count, np.int32),
                token_ids=np.full(count * num_tokens, TOKEN, np.int32),
                origins=np.full(count * num_tokens, ORIGIN_CODES[PLAIN], np.uint8),
            )
        )

    def take(self) -> Frames:
        """Return the next step's frames."""
        frames = list(self._frames)
        frames[_BASE_LENS] = self._base_lens.tobytes()
        self._base_lens += self._num_tokens
        return frames


class Received:
    """What the clients have of each job; raises EngineError for a token at the wrong position."""

    def __init__(self, num_jobs: int, first_job: int = FIRST_JOB) -> None:
        self.lengths, self._first_job = np.zeros(num_jobs, np.int64), first_job
        self.num_tokens = self.num_messages = 0

    def take(self, frames: Frames) -> None:
        """Count a message."""
        self.num_messages += 1
        match decode(frames):
            case JobTokens() as found:
                self._add(found.job_ids - self._first_job, found.base_lens, found.num_tokens, found.token_ids)
            case Tokens() as found:
                ids, sizes = np.array([found.job_id - self._first_job]), np.array([len(found.token_ids)])
                self._add(ids, np.array([found.base_len]), sizes, found.token_ids)
            case found:
                raise EngineError(f"a client received {found.TYPE}")

    def _add(self, jobs: Any, base_lens: Any, sizes: Any, token_ids: Any) -> None:
        if np.any(self.lengths[jobs] != base_lens) or np.any(token_ids != TOKEN) or sizes.sum() != len(token_ids):
            raise EngineError("a client received tokens that are not the next ones")
        self.lengths[jobs] += sizes
        self.num_tokens += len(token_ids)


class Peers:
    """The sockets of a verifier, of clients and of drafters, with all sessions opened."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], load: Load) -> None:
        self._context, self.received = context, Received(load.sessions, load.first_job)
        self.router, endpoint = bind_router(context, "tcp://127.0.0.1:*")
        self._control = self._connect(load.broker)
        self._control.send_multipart(encode(hello("target", endpoint)))
        self.drafters = [self._drafter(load.broker, number) for number in range(load.drafters)]
        self.clients = [self._connect(load.broker) for _ in range(load.clients)]
        self._submit_all(load)
        self.broker, opened = self._opened(load.sessions)
        self.steps = Steps(opened, load.tokens)
        self.poller = zmq.Poller()
        for socket in (*self.clients, *self.drafters):
            self.poller.register(socket, zmq.POLLIN)

    def _connect(self, address: str) -> zmq.Socket[bytes]:
        socket = connect_dealer(self._context, address, queue=True)
        socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1e3))
        return socket

    def _drafter(self, address: str, number: int) -> zmq.Socket[bytes]:
        socket = self._connect(address)
        socket.send_multipart(encode(hello("draft", fingerprint=f"stub {number}")))
        socket.recv_multipart()  # Welcome
        return socket

    def _submit_all(self, load: Load) -> None:
        for i in range(load.sessions):
            params = SamplingParams(max_tokens=MAX_TOKENS)
            job = encode(Submit(job_id=load.first_job + i, params=params, prompt_ids=np.ones(1, np.int32)))
            client = self.clients[i % len(self.clients)]
            client.send_multipart(job)
            while not isinstance(answer := decode(client.recv_multipart()), Accepted):
                if not isinstance(answer, Failed) or answer.code != "no_verifier":
                    raise EngineError(f"a job was answered by {answer}")
                client.send_multipart(job)

    def _opened(self, count: int) -> tuple[bytes, list[Open]]:
        """Return the broker's identity, and the sessions as it opened them."""
        self.router.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1e3))
        found: dict[int, Open] = {}
        broker = b""
        while len(found) < count:
            broker, *frames = self.router.recv_multipart()
            message: Message = decode(frames)
            if isinstance(message, Open):
                found[message.session_id] = message
        return broker, list(found.values())

    def receive(self, timeout_s: float) -> None:
        """Receive messages for clients and drafters; raises EngineError if none arrives within `timeout_s`."""
        ready = self.poller.poll(int(timeout_s * 1e3))
        if not ready:
            raise EngineError(f"no client received anything for {timeout_s:g} s")
        for socket, _ in ready:
            for frames in drain(socket):
                if socket in self.clients:
                    self.received.take(frames)


def measure(peers: Peers, load: Load) -> dict[str, float]:
    """Keep the broker busy for some seconds; return tokens and messages a second, and the broker's processor time."""
    received, in_step = peers.received, load.sessions * load.tokens
    num_tokens, num_messages, cpu = received.num_tokens, received.num_messages, cpu_seconds(load.pid)
    num_sent, started = num_tokens, time.perf_counter()
    while time.perf_counter() - started < load.seconds:
        while num_sent - received.num_tokens < STEPS_UNDER_WAY * in_step:
            peers.router.send_multipart([peers.broker, *peers.steps.take()])
            num_sent += in_step
        peers.receive(PATIENCE_S)
    seconds, got = time.perf_counter() - started, received.num_tokens - num_tokens
    after, messages = cpu_seconds(load.pid), received.num_messages - num_messages
    while received.num_tokens < num_sent:
        peers.receive(PATIENCE_S)
    used = (after - cpu) / seconds if after is not None and cpu is not None else 0.0
    return {"tokens": got / seconds, "messages": messages / seconds, "busy": used, "us": 1e6 * used * seconds / got}


def run(load: Load) -> Iterator[dict[str, float]]:
    """Open the sessions, run once unmeasured, then measure."""
    apply_cpu(load.cores)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        peers = Peers(context, load)
        measure(peers, load)
        yield from (measure(peers, load) for _ in range(load.repeats))
    finally:
        context.destroy(linger=0)


def arguments(load: Load) -> str:
    """Return the command-line argument for this module."""
    return json.dumps(asdict(load))


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps(list(run(Load(**asked | {"cores": tuple(asked["cores"])})))), flush=True)  # noqa: T201 - output
    os._exit(0)
