"""Whose KV of a prefix a job shares, and what is said of it: counted once, of the opening that gave the first token,
and for one owner only."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from specq.broker import Send
from specq.broker.jobs.reports import status_report
from specq.broker.state.job import JobRequest, sharers
from specq.broker.state.ledger import restored, taken_record
from specq.journal import StoredJob
from specq.protocol import (
    BROKER_CAPABILITIES,
    CAPABILITIES,
    Assign,
    Failed,
    Hello,
    Int32Array,
    Open,
    SamplingParams,
    Submit,
    Verdict,
    Welcome,
    decode,
    encode,
)
from specq.testing.fake_journal import FakeJournal
from specq.testing.toy import ToyEngine, toy_info
from specq.testing.world import ReceivedText, World
from tests.broker.desk import VERIFIER, Desk

PROMPT = list(range(3, 43))


class SharingEngine(ToyEngine):
    """A toy that shares what one owner's sessions have computed, token by token."""

    def __init__(self) -> None:
        super().__init__()
        self._texts: list[tuple[str, list[int]]] = []  # those of closed sessions stay

    def open(self, session_id: int, token_ids: Int32Array, owner: str = "") -> int:
        super().open(session_id, token_ids)
        known = [num_common(text, token_ids.tolist()) for whose, text in self._texts if whose == owner]
        start = min(max(known, default=0), len(token_ids) - 1)
        self.contexts[session_id] = token_ids[:start].tolist()
        self._texts.append((owner, self.contexts[session_id]))
        return start


def num_common(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def make_world(verifiers: tuple[bytes, ...] = (b"v0",)) -> World:
    world = World()
    for name in verifiers:
        world.add_verifier(name, SharingEngine())
    world.run(1.0)
    return world


def completed(world: World, job_id: int, **fields: Any) -> ReceivedText:
    received = begin(world, job_id, **fields)
    world.run_until(lambda: received.finish or received.failed)
    assert received.finish, received.failed
    return received


def begin(world: World, job_id: int, *, max_tokens: int = 6, **fields: Any) -> ReceivedText:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=4, ignore_eos=True)
    world.received[job_id] = ReceivedText()
    world.send(Submit(job_id=job_id, params=params, prompt_ids=np.array(PROMPT, np.int32), **fields))
    return world.received[job_id]


def test_a_prompt_is_shared_within_a_tenant_and_a_salt_only() -> None:
    """The first job of each finds no cached prefix, its second finds that of its first, and all texts are equal."""
    world = make_world()
    whose = [*product(("", "ann", "ben"), ("", "salt", "other"))]
    jobs = [
        completed(world, 10 * turn + number + 1, tenant=tenant, cache_salt=salt)
        for turn in (0, 1)
        for number, (tenant, salt) in enumerate(whose)
    ]
    found = [job.stats["cached_tokens"] for job in jobs]
    assert found[: len(whose)] == [0] * len(whose)
    assert all(32 <= count < len(PROMPT) for count in found[len(whose) :])
    assert len({tuple(job.token_ids) for job in jobs}) == 1


def test_no_owner_waits_for_a_prompt_of_another_owner() -> None:
    """Jobs that come together: an owner's second waits for the first to compute what it shares; another owner's never
    does."""
    world = make_world()
    jobs = [begin(world, 1 + i, tenant=tenant) for i, tenant in enumerate(("ann", "ann", "ben", ""))]
    world.run_until(lambda: all(job.finish for job in jobs))
    assert [bool(job.stats["cached_tokens"]) for job in jobs] == [False, True, False, False]


@pytest.mark.parametrize("is_warm", [True, False])
def test_what_counts_is_the_opening_that_gave_the_first_token(is_warm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later opening at another verifier does not count, even if that one caches more of the prompt."""
    world = make_world((b"v0", b"v1"))
    places = world.broker.state.workers
    warming = completed(world, 1)
    first = next(worker.identity for worker in places.verifiers() if worker.prefixes)
    if not is_warm:
        places.get(first).prefixes.clear()  # so that the next may go anywhere
        monkeypatch.setattr(world.broker, "validates", False)  # job 999 stands for load
        places.get(first).job_ids.add(999)
    job = begin(world, 2, max_tokens=200)
    world.run_until(lambda: len(job.token_ids) > 3)
    held_by = world.broker.state.jobs.active[2].session.verifier
    assert (held_by == first) == is_warm
    places.get(first).job_ids.discard(999)
    world.kill(held_by)
    world.run_until(lambda: job.finish)
    assert warming.stats["cached_tokens"] == 0
    assert (job.stats["cached_tokens"] >= 32) == is_warm


# --- peers of before --------------------------------------------------------------------------------------------------


def opens(desk: Desk) -> list[Open]:
    return desk.received(b"", Open)


@pytest.mark.parametrize("listed", [(), CAPABILITIES, ("unheard-of",)])
def test_a_broker_says_what_it_can_do_to_those_who_read_it(listed: tuple[str, ...]) -> None:
    """A worker of before would not read such a welcome. The report says what each can do."""
    desk = Desk()
    hello = Hello(role="draft", name="d", incarnation=1, model=toy_info(), capabilities=listed)
    (welcome,) = [message for message in desk.front(b"d", hello) if isinstance(message, Welcome)]
    assert welcome.capabilities == (BROKER_CAPABILITIES if listed else ())
    report = status_report(desk.broker.state)
    assert (report["capabilities"], report["workers"][1]["capabilities"]) == (list(BROKER_CAPABILITIES), list(listed))


def test_an_older_verifier_receives_no_new_fields_and_no_salted_jobs() -> None:
    """If all verifiers are older, the job is refused. Otherwise a newer one gets it and keeps it."""
    desk = Desk(capabilities=())
    desk.submit(1, tenant="ann")
    (refused,) = desk.submit(2, tenant="ann", cache_salt="s")
    desk.hello(b"new")
    desk.submit(3, tenant="ann", cache_salt="s")
    desk.submit(4)
    told = {(to, message.session_id): message for to, message in desk.sent if isinstance(message, Open)}
    assert {(to, job_id) for to, job_id in told if job_id < 4} == {(VERIFIER, 1), (b"new", 3)}
    assert all(message.by_owner == (to == b"new") for (to, _), message in told.items())
    assert told[b"new", 3].owner.endswith(" /ann")
    assert isinstance(refused, Failed)
    assert (refused.code, "cache_salt: all have an older version" in refused.reason) == ("no_verifier", True)


@pytest.mark.parametrize("salt", ["", "s"])
def test_work_is_shared_with_a_verifier_of_before_but_for_jobs_with_a_salt(salt: str) -> None:
    desk = Desk()
    for job_id in range(6):
        desk.submit(1 + job_id, max_tokens=1000, cache_salt=salt)
    desk.hello(b"old", capabilities=())
    for _ in range(8):
        desk.beat(b"old")
        desk.tick()
    moved = {to for to, message in desk.sent if isinstance(message, Open)} - {VERIFIER}
    assert moved == (set() if salt else {b"old"})


def test_a_job_with_a_salt_waits_for_a_verifier_that_knows_it() -> None:
    """Where the last such verifier is gone; the one who asked learns what was missing."""
    desk = Desk(weights_wait_s=5.0)
    desk.hello(b"old", capabilities=())
    desk.submit(1, cache_salt="s")
    desk.leave()
    for _ in range(12):
        desk.now += 0.5
        desk.beat(b"old")
        desk.take(desk.broker.tick(desk.now))
    assert {to for to, message in desk.sent if isinstance(message, Open)} == {VERIFIER}
    (failed,) = desk.received(b"", Failed)
    assert "that supports cache_salt was available for 5 s" in failed.reason


def test_older_drafters_receive_no_new_fields_and_no_salted_jobs() -> None:
    """Those keep what they compute of texts for all. A verdict's count is for the broker alone."""
    desk = Desk()
    for name in (b"old", b"new"):
        model = replace(toy_info(), fingerprint=name.decode())
        knows = CAPABILITIES if name == b"new" else ()
        desk.front(name, Hello(role="draft", name="d", incarnation=1, model=model, capabilities=knows))
    desk.submit(1)
    desk.submit(2, tenant="ann")
    desk.take(desk.broker.tick(desk.now))
    assigned = [(to, message) for to, message in desk.sent if isinstance(message, Assign)]
    assert {(to, message.session_id) for to, message in assigned if message.session_id == 2} == {(b"new", 2)}
    assert {(to, message.owner) for to, message in assigned if message.session_id == 1} == {(b"old", ""), (b"new", "")}
    job, before = desk.job(1), len(desk.sent)
    verdict = Verdict(
        session_id=1, epoch=job.session.epoch, base_len=2, token_ids=np.array([9], np.int32), cached_tokens=7
    )
    effects = desk.broker.from_back(VERIFIER, encode(verdict), desk.now)
    relayed = [decode(e.frames) for e in effects if isinstance(e, Send) and e.to in (b"old", b"new")]
    assert job.stats.cached_tokens == 2  # the prompt has no more
    assert len(desk.sent) == before
    assert relayed
    assert all(b"cached_tokens" not in encode(message)[1] for message in relayed)


def test_what_was_there_survives_the_broker() -> None:
    """The count is journaled with the first tokens. Later tokens do not carry it."""
    desk = Desk(has_journal=True)
    desk.submit(1, cache_salt="s")
    desk.verdict(1, 9, cached_tokens=1)
    desk.verdict(1, 10, 11, cached_tokens=2)
    journal = FakeJournal()
    for write in desk.writes:
        journal.write([write.record])
    job = restored(journal.jobs[1])
    assert (job.stats.cached_tokens, job.request.submit.cache_salt) == (1, "s")
    assert job.stats.to_dict()["cached_tokens"] == 1
    assert restored(StoredJob(taken_record(job).submit)).stats.cached_tokens == 0


# --- whose ------------------------------------------------------------------------------------------------------------


def test_no_two_owners_tenants_and_salts_are_one() -> None:
    """Among names that were made to look like each other. Placement compares prompts of one owner only."""
    salt = sharers("", "", "s")
    parts = ["", "a", "/", "a/", "/a", "+", "s", salt, salt + "a", "a b", " "]
    owners = ["", "a", "a.b", "b"]  # as names of keys may be
    whose = [*product(owners, parts, parts)]
    names = [sharers(*one) for one in whose]
    assert len(set(names)) == len(whose)
    request = JobRequest(Submit(job_id=1, params=SamplingParams(), prompt_ids=np.arange(300, dtype=np.int32)))
    keys = [request.prefix_keys(name) for name in names]
    assert len({key for own in keys for key in own}) == 4 * len(whose)
    assert request.prefix_keys("a") == request.prefix_keys("a")
