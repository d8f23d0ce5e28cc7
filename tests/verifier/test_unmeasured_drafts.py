"""A policy where drafts are not measured (`--drafts always`): all sources draft, and it chooses how: whether drafts are
verified before they are read, and whether steps wait for draft workers. By made-up sources and steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specq.protocol import COLOCATED, REMOTE
from specq.verifier.control.choices import Choice
from specq.verifier.control.policy import FIRST_PLAIN
from tests.verifier.driven_policy import Driven, Made

NEAR = Made(REMOTE, 0.8, as_such_s=0.001)
FAR = Made(REMOTE, 0.02, as_such_s=0.003)
WAITING, EARLY = Choice(frozenset({REMOTE})), Choice(frozenset({REMOTE}), is_early=True)


def test_without_measurements_all_sources_always_draft() -> None:
    driven = Driven(
        [Made("bad", 0.1, as_such_s=0.02), Made("poor", 0.3, levels=2, as_such_s=0.003), Made(REMOTE, 0.1)],
        is_measured=False,
    )
    driven.run(100, 4)
    driven.run(100, 64)
    assert driven.policy.allowed == {"bad", "poor", REMOTE}
    assert {len(step.kind.sources) for step in driven.steps} == {3}
    assert not any(step.looked_at for step in driven.steps)
    assert not driven.policy.decisions


@pytest.mark.parametrize(("unread_s", "is_unread"), [(0.001, True), (-0.001, False)])
def test_drafts_are_verified_unread_where_that_is_found_to_be_faster(unread_s: float, is_unread: bool) -> None:
    own = Made(COLOCATED, 0.8, as_such_s=0.002, may_be_unread=True, is_told=True)
    driven = Driven([own], unread_s=unread_s, noise=0.01, is_measured=False)
    driven.run(600)
    assert driven.policy.is_unread is is_unread
    assert {step.kind.sources for step in driven.steps} == {frozenset({COLOCATED})}


@pytest.mark.parametrize(("worker", "used"), [(FAR, EARLY), (NEAR, WAITING)])
def test_steps_are_launched_early_where_drafts_come_too_late(worker: Made, used: Choice) -> None:
    """Draft workers go on drafting. Probes find it out, and none begins with the first steps."""
    driven = Driven([worker], overlaps=True, saved_s=0.001, noise=0.01, is_measured=False)
    driven.run(300)
    served = driven.run(500)
    is_early = used == EARLY
    assert (driven.policy.used, driven.policy.allowed) == (used, frozenset({REMOTE}))
    assert driven.policy.is_early is is_early
    assert served.rate > 0.97 * max(driven.rate([REMOTE]), driven.rate())
    assert (driven.rate() > driven.rate([REMOTE])) is is_early
    assert {step.kind.sources for step in driven.steps} == {frozenset({REMOTE})}
    assert not any(step.kind.is_early for step in driven.steps[:FIRST_PLAIN])


def test_drafts_that_come_in_time_are_waited_for_again() -> None:
    """Steps that were launched early have said nothing of them, so that they may be better by now."""
    worker = replace(FAR)
    driven = Driven([worker], overlaps=True, saved_s=0.001, noise=0.01, is_measured=False)
    driven.run(800)
    assert driven.policy.used == EARLY
    worker.chance, worker.as_such_s = NEAR.chance, NEAR.as_such_s
    driven.run(800)
    assert driven.policy.used == WAITING


def test_where_drafts_are_measured_no_step_is_early_that_has_drafts() -> None:
    """Plain decoding is better than drafts that come too late."""
    driven = Driven([FAR], overlaps=True, saved_s=0.001, noise=0.01)
    driven.run(800)
    assert not any(one.other.is_early or one.used.is_early for one in driven.policy.decisions)
    assert not any(step.kind.is_early and step.kind.sources for step in driven.steps)
    assert driven.policy.decisions
