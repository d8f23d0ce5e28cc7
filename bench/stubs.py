"""Workers without a model, to measure the broker alone; run as `python -m bench.stubs verifier|drafter ...`.

The verifier answers each draft at once with a verdict that accepts all its nodes. The drafter measures the round trip
from draft to verdict, directly to the verifier and through the broker. It does this with one outstanding draft, and
with many.

Rule: both sides do as little as possible (frames are made in advance), so that the difference is the broker.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle, islice
from statistics import median

import numpy as np
import zmq

from specq.protocol import (
    CAPABILITIES,
    DRAFT_WORKER,
    ORIGIN_CODES,
    PLAIN,
    Assign,
    Draft,
    Frames,
    Hello,
    Message,
    ModelInfo,
    Open,
    Verdict,
    decode,
    encode,
)
from specq.transport import AllowList, Curve, Zap, bind_router, connect_dealer, curve_to_broker, directory_of, own_keys

CHAIN = 8
NUM_SESSIONS = 64
NUM_VERIFIERS = 4  # at one endpoint: the broker forwards at most 7,600 of these drafts a second to each
DIRECT_SESSIONS = range(1, NUM_SESSIONS + 1)  # ids that the broker does not know
_PATIENCE_MS = 30_000
_MARK = 4_000_000_000_000_000  # placeholder for a number

INFO = ModelInfo(
    name="stub",
    fingerprint="stub",
    dtype="none",
    engine="stub",
    vocab_size=1000,
    num_tokens=1000,
    eos_ids=(),
    max_length=2**31 - 1,
    tokenizer_hash="stub",
)


def draft_frames(session_id: int, epoch: int, lane: int) -> Frames:
    """Return the frames of a draft of a chain of 8."""
    ids = np.arange(CHAIN, dtype=np.int32)
    scores = np.full(CHAIN, -0.5, np.float16)
    return encode(
        Draft(
            session_id=session_id,
            epoch=epoch,
            lane=lane,
            base_len=1000,
            first_id=1000,
            token_ids=ids + 100,
            parent_ids=ids - 1,
            scores=scores,
        )
    )


class VerdictCounter:
    """Verdicts of one session: the same frames each time, except for the position."""

    def __init__(self, session_id: int, epoch: int, length: int) -> None:
        ids = np.arange(CHAIN, dtype=np.int32)
        verdict = Verdict(
            session_id=session_id,
            epoch=epoch,
            base_len=_MARK,
            min_accept_prob=200,
            seen=(0, 1000),
            us=(5000, 100),
            token_ids=np.full(CHAIN + 1, 100, np.int32),
            node_ids=ids + 1000,
            mask=np.ones(CHAIN, np.uint8),
            origins=np.array([ORIGIN_CODES[DRAFT_WORKER]] * CHAIN + [ORIGIN_CODES[PLAIN]], np.uint8),
        )
        self._length = length
        self.epoch = epoch
        self._key, header, *self._arrays = encode(verdict)
        self._before, self._after = header.split(str(_MARK).encode())

    def take(self) -> Frames:
        """Return the next verdict's frames."""
        header = b"%s%d%s" % (self._before, self._length, self._after)
        self._length += CHAIN + 1
        return [self._key, header, *self._arrays]


# --- verifier -----------------------------------------------------------------------------------------------------


def run_verifier(broker: str, keys: str) -> None:
    """Answer drafts until killed; with keys, those of the broker and of the measuring drafter."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    curve = curve_to_broker(keys, "target")
    if curve is not None:
        _admit(context, keys)
    router, endpoint = bind_router(context, "tcp://127.0.0.1:*", curve.own if curve else None)
    controls = [connect_dealer(context, broker, queue=True, curve=curve) for _ in range(NUM_VERIFIERS)]
    for control in controls:
        control.send_multipart(encode(hello("target", endpoint)))
    sessions = {encode_key(i): VerdictCounter(i, 0, 1) for i in DIRECT_SESSIONS}
    print(endpoint, flush=True)  # noqa: T201 - read by the process that started this one
    while True:
        identity, *frames = router.recv_multipart()
        if b'"draft"' in frames[1]:
            router.send_multipart([identity, *sessions[frames[0]].take()])
            continue
        message = decode(frames)
        if isinstance(message, Open):
            open_session(sessions, message)


def open_session(sessions: dict[bytes, VerdictCounter], message: Open) -> None:
    """Open a session, unless a newer epoch is open.

    When the broker moves a session, its messages over several connections may arrive in any order. Here one process
    receives them all.
    """
    key = encode_key(message.session_id)
    known = sessions.get(key)
    if known is None or known.epoch < message.epoch:
        sessions[key] = VerdictCounter(message.session_id, message.epoch, len(message.token_ids))


def _admit(context: zmq.Context[zmq.Socket[bytes]], keys: str) -> None:
    """Admit all keys of the directory, from a thread, so that the measurement does not wait for it."""
    zap = Zap(context, AllowList(directory_of(keys)))

    def answer() -> None:
        while zap.socket.poll():
            zap.answer()

    threading.Thread(target=answer, daemon=True).start()


def encode_key(session_id: int) -> bytes:
    """Return the first frame of a message of this session."""
    return session_id.to_bytes(8, "little")


def hello(role: str, endpoint: str = "", fingerprint: str = "stub") -> Message:
    """Return the registration message of a stub."""
    model = replace(INFO, fingerprint=fingerprint)
    name, known = f"stub-{role}", CAPABILITIES
    return Hello(role=role, name=name, incarnation=1, model=model, endpoint=endpoint, capabilities=known)


# --- drafter ------------------------------------------------------------------------------------------------------


class Path:
    """A way to the verifier: a socket, and the drafts of the sessions that it serves."""

    def __init__(self, socket: zmq.Socket[bytes], drafts: dict[bytes, Frames]) -> None:
        self.socket, self.drafts = socket, drafts

    def one_by_one(self, count: int) -> list[float]:
        """Send drafts with one outstanding, for each session in turn; return each round trip in microseconds."""
        times = []
        for draft in islice(cycle(self.drafts.values()), count):
            started = time.perf_counter()
            self.socket.send_multipart(draft)
            self.socket.recv_multipart()
            times.append((time.perf_counter() - started) * 1e6)
        return times

    def all_at_once(self, seconds: float) -> float:
        """Keep one draft of each session outstanding; return round trips a second."""
        for draft in self.drafts.values():
            self.socket.send_multipart(draft)
        started, count = time.perf_counter(), 0
        while time.perf_counter() - started < seconds:
            self.socket.send_multipart(self.drafts[self.socket.recv_multipart()[0]])
            count += 1
        elapsed = time.perf_counter() - started
        for _ in self.drafts:
            self.socket.recv_multipart()
        return count / elapsed


def run_drafter(broker: str, verifier: str, repeats: int, count: int, seconds: float, keys: str) -> None:
    """Measure both ways in turn; print the figures of each repetition as JSON."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    curve = curve_to_broker(keys, "draft")
    to_verifier = Curve(curve.own, own_keys(keys, "target").public_key) if curve else None
    ways = {"direct": _direct(context, verifier, to_verifier), "broker": _through(context, broker, curve)}
    for way in ways.values():
        way.one_by_one(count // 10)
    figures = [_measure(ways, count, seconds, turned=bool(i % 2)) for i in range(repeats)]
    print(json.dumps(figures), flush=True)  # noqa: T201 - read by the process that started this one
    context.destroy(linger=0)


def _direct(context: zmq.Context[zmq.Socket[bytes]], verifier: str, curve: Curve | None) -> Path:
    drafts = {encode_key(i): draft_frames(i, 0, 0) for i in DIRECT_SESSIONS}
    return Path(_connect(context, verifier, curve), drafts)


def _through(context: zmq.Context[zmq.Socket[bytes]], broker: str, curve: Curve | None) -> Path:
    """Register as a drafter and wait until all sessions are assigned."""
    socket = _connect(context, broker, curve)
    socket.send_multipart(encode(hello("draft")))
    drafts = {}
    for message in _messages(socket):
        if isinstance(message, Assign):
            drafts[encode_key(message.session_id)] = draft_frames(message.session_id, message.epoch, message.lane)
        if len(drafts) == NUM_SESSIONS:
            break
    return Path(socket, drafts)


def _connect(context: zmq.Context[zmq.Socket[bytes]], address: str, curve: Curve | None) -> zmq.Socket[bytes]:
    socket = connect_dealer(context, address, queue=True, curve=curve)
    socket.setsockopt(zmq.RCVTIMEO, _PATIENCE_MS)
    return socket


def _messages(socket: zmq.Socket[bytes]) -> Iterator[Message]:
    while True:
        yield decode(socket.recv_multipart())


def _measure(ways: dict[str, Path], count: int, seconds: float, *, turned: bool) -> dict[str, dict[str, float]]:
    """Return both ways' figures; `turned`: in reverse order."""
    order = sorted(ways, reverse=turned)
    times = {name: ways[name].one_by_one(count) for name in order}
    rates = {name: ways[name].all_at_once(seconds) for name in order}
    return {
        name: {"p50_us": median(times[name]), "p99_us": float(np.quantile(times[name], 0.99)), "rate": rates[name]}
        for name in ways
    }


_ROLES: dict[str, Callable[[list[str]], None]] = {
    "verifier": lambda rest: run_verifier(rest[0], rest[1]),
    "drafter": lambda rest: run_drafter(rest[0], rest[1], int(rest[2]), int(rest[3]), float(rest[4]), rest[5]),
}

if __name__ == "__main__":
    _ROLES[sys.argv[1]](sys.argv[2:])
    sys.stdout.flush()
    os._exit(0)
