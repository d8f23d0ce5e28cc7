"""Forged values: a few thousand to every party in one process here, and a few hundred of each role to real ones."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest

from specq.protocol.errors import ProtocolError
from specq.protocol.messages import MESSAGES
from specq.protocol.wire import decode
from specq.testing.toy import toy_info
from tests.chaos import values
from tests.chaos.forging import Forger, Session
from tests.chaos.fuzz import PARTIES, SUITED, Parties
from tests.each import each

MODEL = dataclasses.asdict(toy_info())


def fuzz_values(num: int, seed: int) -> Counter[str]:
    """Send so many forged messages, to each party in turn; return how many each took or refused. All else is raised."""
    rng, parties, counts = random.Random(seed), Parties(), Counter[str]()
    forger = Forger(rng, MODEL)
    for number in range(num):
        name = PARTIES[number % len(PARTIES)]
        job = parties.broker.state.jobs.active.get(1)
        epoch = job.session.epoch if job is not None and name.startswith("broker") else 1
        forger.sessions = {1: Session(1, epoch)}
        cls = rng.choice(SUITED[name]) if rng.random() < 0.8 else rng.choice(list(MESSAGES.values()))
        try:
            parties.takers()[name](forger.frames(cls))
            counts[f"{name} took or dropped"] += 1
        except ProtocolError:
            counts[f"{name} refused"] += 1
        parties.now += 0.001
        if number % 50 == 49:
            parties.work()
            parties.renew()
    return counts


def test_no_value_stops_anybody() -> None:
    """ProtocolError is all that is raised, and each party hears both what it takes and what it refuses."""
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


@each(
    "harm",
    [
        {"dead": {"broker": "why"}},
        {"trouble": "nobody took any more"},
        {"lost": 1},
        {"wrong": 1},
        {"doubled": 1},
        {"jobs": 0},
    ],
)
def test_harm_is_noticed(harm: dict[str, object]) -> None:
    """What the status of the command is worth."""
    role = {"dead": {}, "trouble": ""} | {name: value for name, value in harm.items() if name in ("dead", "trouble")}
    jobs = {"jobs": 5} | {name: value for name, value in harm.items() if name in ("lost", "wrong", "doubled", "jobs")}
    assert not values.is_good({"client": role, "all": {"jobs": jobs}})
    assert values.is_good({"client": {"dead": {}, "trouble": ""}, "all": {"jobs": {"jobs": 5}}})
