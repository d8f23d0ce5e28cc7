"""Planted faults of steps that overlap, each found by the random service."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest

from specq.drafting.draft_model import source as colocated
from specq.protocol.errors import SpecqError
from specq.verification import StepBatch
from specq.verifier import core
from specq.verifier.sessions.open_sessions import OpenSessions
from specq.verifier.sources import SourceSet
from specq.verifier.step import in_flight
from specq.verifier.step import plan as planner
from specq.verifier.step.in_flight import StepsInFlight
from tests.verifier.overlapping import NUM_ACTS
from tests.verifier.random_service import serve


def _looks_at_all(shares: Any, *arguments: Any, commit: Any = core.commit, **_options: Any) -> Any:
    return commit(shares, *arguments)


def _next_ones(chunks: Any, before: Any, fed_by: Any = planner._fed_by) -> Any:
    found = fed_by(chunks, before)
    return None if found is None else np.where(found > 0, found - 1, found)


def _keeps_those_behind(self: StepsInFlight) -> None:
    self._steps.clear()


def _forgets_starts(self: StepsInFlight) -> None:
    while self._steps:
        for _, launched in self._steps.pop().parts:
            launched.discard()


def _discards_one(self: StepsInFlight, discard: Any = StepsInFlight._discard_behind) -> None:
    older = [self._steps.popleft() for _ in range(len(self) - 1)]
    discard(self)
    self._steps.extend(older)


def _lets_all_go_on(self: OpenSessions, _: Any) -> bool:
    return True


def _forgets_histories(self: OpenSessions, look: Any = OpenSessions._look) -> Any:
    found = look(self)
    return found._replace(joins=found.runs)


MUTANTS: dict[str, tuple[object, str, Callable[..., object]]] = {
    "what is said of sessions that ended is looked at": (core, "commit", _looks_at_all),
    "a session is fed with another's token": (planner, "_fed_by", _next_ones),
    "a step behind one that failed is not discarded": (StepsInFlight, "_discard_behind", _keeps_those_behind),
    "sessions of a discarded step are not as they were": (StepsInFlight, "_discard_behind", _forgets_starts),
    "any step is followed": (StepsInFlight, "can_follow", lambda self, step: self._engine.overlaps and step.parts),
    "all are fed, whatever their tokens depend on": (OpenSessions, "_look", _forgets_histories),
    "steps are repeated with tokens that were not known": (StepBatch, "fed", lambda self, _: self),
    "ended sessions are computed again": (in_flight, "_again", lambda shares: shares),
}


def _serve_some(*, is_apart: bool = False, has_chains: bool = False) -> None:
    for seed in range(40):
        serve(Random(seed), NUM_ACTS, is_apart=is_apart, has_chains=has_chains)


@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("name", MUTANTS)
def test_the_random_service_finds(name: str, is_apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above is worth: each of these mistakes breaks a rule within a few runs."""
    owner, attribute, mutant = MUTANTS[name]
    monkeypatch.setattr(owner, attribute, mutant)
    with pytest.raises((AssertionError, SpecqError, KeyError)):  # the text is wrong, or a check of the engine's fails
        _serve_some(is_apart=is_apart)


APART_MUTANTS: dict[str, tuple[object, str, Callable[..., object]]] = {
    "of two steps behind one that failed the newest alone is discarded": (
        StepsInFlight,
        "_discard_behind",
        _discards_one,
    ),
    "any step is planned behind two others": (OpenSessions, "all_go_on", _lets_all_go_on),
}


@pytest.mark.parametrize("name", APART_MUTANTS)
def test_the_random_service_with_steps_launched_by_others_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where three steps may be in flight."""
    owner, attribute, mutant = APART_MUTANTS[name]
    monkeypatch.setattr(owner, attribute, mutant)
    with pytest.raises((AssertionError, SpecqError, KeyError)):
        _serve_some(is_apart=True)


CHAIN_MUTANTS: dict[str, tuple[object, str, Callable[..., object]]] = {
    "chains hang unread beside other nodes": (colocated, "may_be_unread", lambda *_: True),
    "what hangs unread is not read": (SourceSet, "read", lambda *_: False),
}


@pytest.mark.parametrize("name", CHAIN_MUTANTS)
def test_the_random_service_with_chains_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same of chains that are verified before they are read."""
    owner, attribute, mutant = CHAIN_MUTANTS[name]
    monkeypatch.setattr(owner, attribute, mutant)
    with pytest.raises((AssertionError, SpecqError)):
        _serve_some(has_chains=True)
