"""The broker passes the drafts of several sessions on, each by the rules of a single draft."""

from __future__ import annotations

import numpy as np

from specq.broker import Send
from specq.protocol import CAPABILITIES, MANY_DRAFTS, Assign, Draft, Drafts, SamplingParams, Submit, decode, encode
from tests.broker.desk import ANN, VERIFIER, Desk

OTHER, DRAFTER, STRANGER = b"other", b"d0", b"d1"
WITHOUT = tuple(one for one in CAPABILITIES if one != MANY_DRAFTS)


class Busy(Desk):
    """A broker with one job on each of some verifiers, and a drafter for all."""

    def __init__(self, *verifiers: tuple[bytes, tuple[str, ...]]) -> None:
        super().__init__(max_sessions=1, capabilities=verifiers[0][1])
        for identity, capabilities in verifiers[1:]:
            self.hello(identity, max_sessions=1, capabilities=capabilities)
        self.lanes = {one.session_id: one for one in self.add_drafter(DRAFTER) if isinstance(one, Assign)}
        for job_id in range(1, len(verifiers) + 1):
            submit = Submit(job_id=job_id, params=SamplingParams(max_tokens=50), prompt_ids=np.array([5, 6], np.int32))
            effects = self.broker.from_front(ANN, encode(submit), self.now)
            sent = [decode(one.frames) for one in effects if isinstance(one, Send) and one.to == DRAFTER]
            self.lanes |= {one.session_id: one for one in sent if isinstance(one, Assign)}

    def draft(self, job_id: int, size: int = 2, **changes: object) -> Draft:
        lane = self.lanes[job_id]
        fields: dict[str, object] = {
            "session_id": job_id, "epoch": lane.epoch, "lane": lane.lane, "base_len": 2, "first_id": 0,
            "token_ids": np.ones(size, np.int32), "parent_ids": np.arange(size, dtype=np.int32) - 1,
            "scores": np.zeros(size, np.float16),
        }  # fmt: skip
        return Draft(**fields | changes)  # type: ignore[arg-type]

    def passed(self, *drafts: Draft, sender: bytes = DRAFTER) -> list[tuple[bytes, Draft | Drafts]]:
        """Return what the verifiers receive if a drafter sends these in one message."""
        effects = self.broker.from_front(sender, encode(Drafts.of(drafts)), self.now)
        return [(one.to, decode(one.frames)) for one in effects if isinstance(one, Send) and one.link == "back"]


def test_drafts_for_one_verifier_pass_as_they_are() -> None:
    desk = Busy((VERIFIER, CAPABILITIES))
    both = desk.draft(1), desk.draft(1, first_id=2, parent_ids=np.array([1, 2], np.int32))
    assert desk.passed(*both) == [(VERIFIER, Drafts.of(both))]
    assert desk.broker.state.workers.get(DRAFTER).num_drafts == 2


def test_each_verifier_receives_its_own() -> None:
    """One of an older version receives single drafts."""
    desk = Busy((VERIFIER, CAPABILITIES), (OTHER, WITHOUT))
    first, second = desk.draft(1), desk.draft(2)
    by_job = {desk.broker.state.jobs.active[i].session.verifier: one for i, one in ((1, first), (2, second))}
    assert dict(desk.passed(first, second)) == {VERIFIER: Drafts.of([by_job[VERIFIER]]), OTHER: by_job[OTHER]}


def test_one_that_may_not_pass_does_not_stop_the_others() -> None:
    """Of another epoch, of a job that is gone, of a lane that is not there, and too large."""
    desk = Busy((VERIFIER, CAPABILITIES))
    good = desk.draft(1)
    bad = [
        desk.draft(1, epoch=good.epoch + 1), desk.draft(1, session_id=9), desk.draft(1, lane=good.lane + 1),
        desk.draft(1, size=600),
    ]  # fmt: skip
    assert desk.passed(*bad, good) == [(VERIFIER, Drafts.of([good]))]
    counts = desk.broker.state.counts
    assert (counts["late_drafts"], counts["limited_drafts"]) == (2, 1)


def test_nobody_drafts_for_anothers_lane() -> None:
    desk = Busy((VERIFIER, CAPABILITIES))
    desk.add_drafter(STRANGER)
    assert desk.passed(desk.draft(1), desk.draft(1, first_id=5), sender=STRANGER) == []


def test_together_they_may_take_what_they_may_take_alone() -> None:
    """As many nodes pass as in messages of their own."""
    passed = []
    for count in (1, 8):
        desk = Busy((VERIFIER, CAPABILITIES))
        found = [desk.passed(*(desk.draft(1, 500) for _ in range(count))) for _ in range(800 // count)]
        passed.append(sum(len(one.session_ids) for sent in found for _, one in sent))
    assert passed[0] == passed[1] < 800
