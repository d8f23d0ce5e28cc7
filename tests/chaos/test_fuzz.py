"""Garbage, messages of another version and forged values: a few thousand to every party in one process here, 100,000 in
`make chaos`; and a few hundred of each role to real ones."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import numpy as np
import orjson
import pytest

from specq.broker import Send
from specq.protocol import Cancel, Follow, Frames, Hello, ProtocolError, SamplingParams, Submit, decode, encode
from specq.protocol.messages import MESSAGES, Assign, Message, Verdict
from specq.protocol.versions import OLDEST_VERSION, PROTOCOL_VERSION
from specq.testing.toy import toy_info
from tests.chaos import values
from tests.chaos.forging import Forger, Session
from tests.chaos.fuzz import PARTIES, PROMPT, Parties, fuzz, real_messages, send_all
from tests.each import each


def test_no_message_stops_any_party() -> None:
    """Only ProtocolError is raised. Each party gets both messages that it accepts and messages that it refuses."""
    counts = fuzz(3000)
    assert sum(counts.values()) == 3000
    assert all(counts[f"{name} took or dropped"] > 10 for name in PARTIES)
    assert all(counts[f"{name} refused"] > 10 for name in PARTIES if not name.startswith("broker"))


def of_version(version: int, frames: Frames) -> Frames:
    return [frames[0], orjson.dumps(orjson.loads(frames[1]) | {"v": version}), *frames[2:]]


@pytest.mark.parametrize("version", [OLDEST_VERSION - 1, PROTOCOL_VERSION + 1])
def test_a_version_that_is_too_far_is_refused_by_all(version: int) -> None:
    """The message is counted and dropped. At most, its sender receives an error. No state changes."""
    parties = Parties()
    before = list(parties.broker.state.jobs.active[1].transcript.token_ids)
    for message in real_messages():
        frames = of_version(version, encode(message))
        with pytest.raises(ProtocolError, match="protocol version"):
            decode(frames)
        told = [sent.frames[1] for sent in parties.broker.from_front(b"c", frames, 0.0) if isinstance(sent, Send)]
        assert all(b"this side speaks" in header and b'"v":%d' % version in header for header in told)
        assert len(told) == (type(message) in (Hello, Submit, Follow, Cancel))
        assert parties.broker.from_back(b"v", frames, 0.0) == []
    counts = parties.broker.state.counts
    assert counts["dropped_front"] + counts["dropped_back"] == 2 * len(real_messages())
    assert parties.broker.state.jobs.active[1].transcript.token_ids == before


@pytest.mark.parametrize(
    "message",
    [
        Assign(session_id=2, epoch=1, lane=0, prompt_len=0, params=SamplingParams(), token_ids=np.array([], np.int32)),
        Assign(session_id=2, epoch=1, lane=0, prompt_len=4, params=SamplingParams(), token_ids=PROMPT),
        Assign(session_id=2, epoch=1, lane=0, prompt_len=3, params=SamplingParams(), token_ids=-PROMPT),
        Verdict(session_id=1, epoch=1, base_len=3, token_ids=np.array([-1])),
    ],
    ids=["no context", "a prompt beyond the context", "no tokens", "a verdict without sense"],
)
def test_a_drafter_takes_no_nonsense(message: Message) -> None:
    """What a model could not be given is refused, and the sessions that there are go on."""
    parties = Parties()
    with pytest.raises(ProtocolError):
        parties.drafter.handle(message)
    assert list(parties.drafter.sessions) == [1]
    assert parties.drafter.step()


MODEL = dataclasses.asdict(toy_info())


def fuzz_values(num: int, seed: int) -> Counter[str]:
    """Send so many forged messages, to each party in turn; return how many each took or refused."""
    rng = random.Random(seed)
    forger = Forger(rng, MODEL)

    def forged(name: str, kind: type[Message], parties: Parties) -> Frames:
        job = parties.broker.state.jobs.active.get(1)
        epoch = job.session.epoch if job is not None and name.startswith("broker") else 1
        forger.sessions = {1: Session(1, epoch)}
        return forger.frames(kind)

    return send_all(num, rng, list(MESSAGES.values()), forged)


def test_no_value_stops_anybody() -> None:
    """Only ProtocolError is raised. Each party gets both messages that it accepts and messages that it refuses."""
    counts = fuzz_values(4000, seed=3)
    assert sum(counts.values()) == 4000
    assert all(counts[f"{name} took or dropped"] > 50 for name in PARTIES)
    assert all(counts[f"{name} refused"] > 50 for name in PARTIES if not name.startswith("broker"))


@each("cls", MESSAGES.values())
def test_a_forger_makes_both_kinds(cls: type) -> None:
    """Of every type some messages that decode and some that do not; else half of the code behind is never reached."""
    forger = Forger(random.Random(1), MODEL, sessions={1: Session(1)})
    outcomes = Counter[bool]()
    for _ in range(150):
        try:
            decode(forger.frames(cls))
            outcomes[True] += 1
        except ProtocolError:
            outcomes[False] += 1
    assert min(outcomes[True], outcomes[False]) >= 5, outcomes


def test_the_same_seed_forges_the_same() -> None:
    one, other = (Forger(random.Random(5), MODEL, sessions={1: Session(1)}) for _ in range(2))
    assert [one.frames(cls) for cls in MESSAGES.values()] == [other.frames(cls) for cls in MESSAGES.values()]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_jobs_beside_forgers_of_every_role_are_right() -> None:
    """And every process lives."""
    lines: list[str] = []
    report = values.run(300, seed=1, real=False, show=lines.append)
    assert values.is_good(report), report
    assert all(report[role]["sent"] == 300 for role in values.ROLES)
    assert len(lines) == len(values.ROLES) + 1


def test_harm_is_noticed() -> None:
    """What the status of the command is worth."""
    role, jobs = {"dead": {}, "trouble": ""}, {"jobs": 5}
    assert values.is_good({"client": role, "all": {"jobs": jobs}})
    for harm in ({"dead": {"broker": "why"}}, {"trouble": "nobody took any more"}):
        assert not values.is_good({"client": role | harm, "all": {"jobs": jobs}})
    for harm in ({"lost": 1}, {"wrong": 1}, {"doubled": 1}, {"jobs": 0}):
        assert not values.is_good({"client": role, "all": {"jobs": jobs | harm}})
