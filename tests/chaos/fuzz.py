"""Malformed and half-right frames for every party. They are dropped, and no party stops.

Each frame list begins as a real message; then bits are turned, frames cut, doubled, swapped, and header values replaced
by what they must not be. A ProtocolError is the only error that a party may raise.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import orjson

from specq.broker import Broker
from specq.client.core import ClientCore
from specq.drafting.worker.worker import DraftWorker
from specq.protocol import Frames, ProtocolError, SamplingParams, decode, encode
from specq.protocol.messages import (
    MESSAGES,
    Ack,
    Assign,
    Cancel,
    Close,
    Draft,
    Heartbeat,
    Hello,
    JobTokens,
    Message,
    Open,
    SessionFailed,
    Submit,
    Tokens,
    Verdict,
    Verdicts,
)
from specq.protocol.versions import CAPABILITIES, OLDEST_VERSION, PROTOCOL_VERSION
from specq.testing.toy import ToyEngine, toy_info
from specq.testing.toy_drafters import ToyProposer
from specq.verifier import StepCurve, Verifier
from specq.verifier.validation import validate

JOB, EPOCH = 1, 1
PROMPT = np.array([5, 6, 7], np.int32)
WRONG = (None, True, -1, 2**70, 1e300, "", "x" * 5000, [], [1, "a"], {}, {"a": {}}, "deterministic", 0, 3)
# The messages that each party expects. Now and then it receives another one.
SUITED: dict[str, tuple[type[Message], ...]] = {
    "broker front": (Hello, Heartbeat, Submit, Cancel, Draft),
    "broker back": (Verdict, Verdicts, SessionFailed),
    "verifier": (Open, Close, Ack, Draft),
    "drafter": (Assign, Verdict, Verdicts),
    "client": (Tokens, JobTokens),
}
PARTIES = tuple(SUITED)


def real_messages() -> list[Message]:
    """Return messages of a session that there is."""
    worker = {"role": "target", "name": "v", "model": toy_info(), "endpoint": "toy", "max_sessions": 8}
    held = {"session_ids": np.array([JOB]), "epochs": np.array([EPOCH])}
    tree = {"token_ids": np.array([3, 4], np.int32), "parent_ids": np.array([-1, 0], np.int32)}
    params = SamplingParams(max_tokens=50)
    key = {"session_id": JOB, "epoch": EPOCH}
    return [
        Hello(incarnation=1, capabilities=CAPABILITIES, **worker),
        Heartbeat(incarnation=1, state="ready", lengths=np.array([3]), **held),
        Submit(job_id=JOB, params=params, prompt_ids=PROMPT),
        Cancel(job_id=2),
        Open(**key, prompt_len=3, tokens_left=50, params=params, owner="ann", by_owner=True, token_ids=PROMPT),
        Close(**key),
        Ack(**key, length=3, resend=True),
        Assign(**key, lane=0, prompt_len=3, params=params, token_ids=PROMPT),
        Draft(**key, lane=0, base_len=3, first_id=0, scores=np.zeros(2, np.float16), **tree),
        Verdict(**key, base_len=3, token_ids=np.array([9], np.int32), us=(1, 2), seen=(0, 1)),
        Verdicts(
            **held,
            base_lens=np.array([3]),
            num_tokens=np.array([1]),
            num_nodes=np.array([1]),
            num_seen=np.array([2]),
            waited_us=np.array([2]),
            token_ids=np.array([9]),
            step_us=1,
            origins=np.array([3]),
            node_ids=np.array([0]),
            mask=np.array([0]),
            node_lanes=np.array([0]),
            seen=np.array([0, 1]),
        ),
        SessionFailed(**key, reason="x", retry=True),
        Tokens(job_id=JOB, base_len=0, token_ids=np.array([9], np.int32), origins=np.zeros(1, np.uint8)),
        JobTokens(
            job_ids=np.array([JOB, JOB]),
            base_lens=np.array([0, 1]),
            num_tokens=np.array([1, 2]),
            token_ids=np.array([9, 8, 7]),
            origins=np.array([2, 3, 4]),
        ),
    ]


def mutated(frames: Frames, rng: random.Random) -> Frames:
    """Return frames with something wrong, most of the time."""
    frames = list(frames)
    change = rng.choice([_flip, _cut, _replace_value, _rename, _swap, _double, _noise, _skew, _resize])
    change(frames, rng)
    return frames


def _flip(frames: Frames, rng: random.Random) -> None:
    i = rng.randrange(len(frames))
    if frames[i]:
        at = rng.randrange(len(frames[i]))
        frames[i] = frames[i][:at] + bytes([frames[i][at] ^ (1 << rng.randrange(8))]) + frames[i][at + 1 :]


def _cut(frames: Frames, rng: random.Random) -> None:
    i = rng.randrange(len(frames))
    frames[i] = frames[i][: rng.randrange(len(frames[i]) + 1)]


def _replace_value(frames: Frames, rng: random.Random) -> None:
    header = orjson.loads(frames[1])
    header[rng.choice(list(header))] = rng.choice([value for value in WRONG if value != 2**70])
    frames[1] = orjson.dumps(header)


def _rename(frames: Frames, rng: random.Random) -> None:
    header = orjson.loads(frames[1])
    header["type"] = rng.choice([*MESSAGES, "nothing"])
    frames[1] = orjson.dumps(header)


def _swap(frames: Frames, rng: random.Random) -> None:
    i, j = rng.randrange(len(frames)), rng.randrange(len(frames))
    frames[i], frames[j] = frames[j], frames[i]


def _double(frames: Frames, rng: random.Random) -> None:
    frames += frames[: rng.randrange(len(frames) + 1)]


def _noise(frames: Frames, rng: random.Random) -> None:
    frames[rng.randrange(len(frames))] = rng.randbytes(rng.choice([0, 1, 8, 100, 70_000]))


def _skew(frames: Frames, rng: random.Random) -> None:
    """Say another version: one that is read, or the next on either side."""
    header = orjson.loads(frames[1])
    frames[1] = orjson.dumps(header | {"v": rng.randint(OLDEST_VERSION - 1, PROTOCOL_VERSION + 1)})


def _resize(frames: Frames, rng: random.Random) -> None:
    if len(frames) > 2:
        i = rng.randrange(2, len(frames))
        frames[i] = frames[i] * rng.choice([0, 2, 1000])


@dataclass
class Parties:
    """One of each, with a session that goes on."""

    counts: Counter[str] = field(default_factory=Counter)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Reset all parties to the start of a session."""
        messages = {type(message): message for message in real_messages()}
        self.broker = Broker(incarnation=0)
        self.broker.from_front(b"v", encode(messages[Hello]), self.now)
        self.broker.from_front(b"c", encode(messages[Submit]), self.now)
        self.verifier = Verifier(ToyEngine(), StepCurve([1, 64], [0.001, 0.002]), incarnation=1)
        self.drafter = DraftWorker(ToyProposer(), incarnation=1)
        self.client = ClientCore("nowhere", 10.0)
        self.verifier.handle(messages[Open], self.now)
        self.drafter.handle(messages[Assign])
        self.client.submit(messages[Submit], self.now)

    def takers(self) -> dict[str, Callable[[Frames], object]]:
        """Return how each takes frames."""
        return {
            "broker front": lambda frames: self.broker.from_front(b"c", frames, self.now),
            "broker back": lambda frames: self.broker.from_back(b"v", frames, self.now),
            "verifier": lambda frames: self.verifier.handle(decode(frames), self.now),
            "drafter": lambda frames: self.drafter.handle(decode(frames)),
            "client": lambda frames: self.client.receive(decode(frames), self.now),
        }

    def work(self) -> None:
        """Let all parties process their received messages."""
        self.verifier.step(lambda: self.now)
        validate(self.verifier)
        self.drafter.step()
        self.broker.tick(self.now)
        self.client.tick(self.now)


def fuzz(num_frames: int, seed: int = 0) -> Counter[str]:
    """Send `num_frames` mutated messages to each party in turn. Return how many each dropped or took."""
    rng = random.Random(seed)
    real = {type(message): encode(message) for message in real_messages()}
    return send_all(num_frames, rng, tuple(real), lambda name, kind, parties: mutated(real[kind], rng))


def send_all(
    num: int,
    rng: random.Random,
    kinds: Sequence[type[Message]],
    frames_of: Callable[[str, type[Message], Parties], Frames],
) -> Counter[str]:
    """Send so many messages, mostly of the kinds that a party expects, to each party in turn. Return how many
    each took or refused. All else is raised."""
    parties = Parties()
    for number in range(num):
        name = PARTIES[number % len(PARTIES)]
        kind = rng.choice(SUITED[name] if rng.random() < 0.8 else kinds)
        try:
            parties.takers()[name](frames_of(name, kind, parties))
            parties.counts[f"{name} took or dropped"] += 1
        except ProtocolError:
            parties.counts[f"{name} refused"] += 1
        parties.now += 0.001
        if number % 50 == 49:
            parties.work()
            parties.renew()
    return parties.counts
