"""All sources of drafts at once are about as fast as the best of them alone, by a virtual clock: cheap ones and dear
ones, good and bad, on a small target and on a large one, where what takes 50 ms pays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from specq.protocol import (
    COLOCATED,
    COLOCATED_LANE,
    EAGLE,
    LANES,
    LOOKAHEAD,
    LOOKAHEAD_LANE,
    MEDUSA,
    REMOTE,
    SUFFIX,
    SUFFIX_LANE,
)
from specq.verifier.control.policy import LOOK_STEPS
from specq.verifier.sessions.grafting import DraftBatch
from tests.verifier.timed_service import TimedService, TimedSource
from tests.verifier.timed_target import Machine, TimedTarget

STEPS_MS = {
    "small": [(1, 8.7), (4, 9.5), (8, 11.0), (16, 14.5), (80, 80.0)],
    "large": [(1, 60.0), (4, 62.0), (16, 70.0), (80, 120.0), (200, 260.0)],
}
SERVED_S = {"small": 20.0, "large": 120.0}  # so long that texts alone make no difference of a hundredth
DEAR = (MEDUSA, EAGLE, SUFFIX, LOOKAHEAD)
ALL = (COLOCATED, *DEAR)
SOON_S = 10.0


def sources_of(machine: Machine, only: Iterable[str]) -> list[TimedSource]:
    """Return sources whose names only say their lanes; each session more takes a tenth more."""
    made = [
        TimedSource(machine, COLOCATED, COLOCATED_LANE, 0.002, 0.7, 5, session_s=0.0002),  # cheap and good
        TimedSource(machine, MEDUSA, LANES[MEDUSA], 0.05, 0.1, 4, session_s=0.005),  # 50 ms and bad
        TimedSource(machine, EAGLE, LANES[EAGLE], 0.05, 0.85, 6, session_s=0.005),  # 50 ms and good
        TimedSource(machine, SUFFIX, SUFFIX_LANE, 0.0002, 0.05, 4),  # cheap and useless
        TimedSource(machine, LOOKAHEAD, LOOKAHEAD_LANE, 0.001, 0.3, 3, num_scratch=120),
    ]
    return [source for source in made if source.name in only]


def service_of(target: str, only: Iterable[str], *, measures_drafts: bool = True) -> TimedService:
    """Return a service with some sources, all of which are used unless drafts are measured."""
    machine = Machine()
    engine = TimedTarget(machine, STEPS_MS[target], overlaps=False, launch_s=0.0003, collect_s=0.0003)
    return TimedService(
        engine, sources_of(machine, only), loop_s=0.0004, prompt_len=40, num_tokens=256, measures_drafts=measures_drafts
    )


def best_alone(target: str, sources: Iterable[str], num_sessions: int) -> float:
    """Return the tokens a second of the best single source, or of none."""
    services = [service_of(target, only, measures_drafts=False) for only in ((), *((one,) for one in sources))]
    return max(service.serve(SERVED_S[target], num_sessions).rate for service in services)


@pytest.mark.slow
@pytest.mark.parametrize("num_sessions", [1, 4, 16])
@pytest.mark.parametrize("sources", [ALL, DEAR], ids=["all", "dear"])
@pytest.mark.parametrize("target", STEPS_MS)
def test_all_at_once_are_as_fast_as_the_best_alone(target: str, sources: tuple[str, ...], num_sessions: int) -> None:
    """From the eleventh second on 0.97 of it at least, and in the first ten no less than 0.8: also where nothing
    pays."""
    best = best_alone(target, [source for source in sources if source not in (MEDUSA, LOOKAHEAD)], num_sessions)
    service = service_of(target, sources)
    soon = service.serve(SOON_S, num_sessions)
    later = service.serve(SERVED_S[target], num_sessions)
    assert later.rate >= 0.97 * best
    assert soon.rate >= 0.8 * best


def test_what_one_load_showed_is_not_tried_again_at_another() -> None:
    """What takes six steps of one session and brings little is silent from the first step of four on."""
    service = service_of("small", (COLOCATED, MEDUSA))
    service.serve(5.0, 1)
    assert MEDUSA not in service.verifier.policy.allowed
    served = service.serve(10.0, 4)
    assert served.share(MEDUSA) == 0.0
    assert served.share(COLOCATED) > 0.0


def test_an_unknown_source_drafts_for_one_session_first() -> None:
    """Of sixteen: 120 rows of each would be a step of 2 s."""
    service = service_of("small", (LOOKAHEAD,))
    service.serve(3.0, 16)
    num_scratch = service.verifier.sources.num_scratch[LOOKAHEAD]
    assert 0 < num_scratch <= 120 * 3 * LOOK_STEPS
    assert service.verifier.policy.allowed == {REMOTE}


@pytest.mark.parametrize("num_sessions", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_slow_source_without_drafts_is_tried_rarely(num_sessions: int) -> None:
    """Its gain cannot be known. The loss of its trials sets the time of the next one."""

    class Silent(TimedSource):
        def collect(self, *asked: Any) -> Sequence[DraftBatch]:
            super().collect(*asked)
            return ()

    service = service_of("small", ())
    service = TimedService(service.verifier.engine, [Silent(service.machine, EAGLE, LANES[EAGLE], 0.05, 0.8)])
    service.serve(10.0, num_sessions)
    served = service.serve(30.0, num_sessions)
    assert served.share(EAGLE) < 0.02


def test_what_will_not_be_tried_for_long_sleeps() -> None:
    """It is given no hidden states."""
    service = service_of("small", ALL)
    service.serve(10.0, 1)
    assert {EAGLE, MEDUSA, LOOKAHEAD} <= service.verifier.policy.asleep
