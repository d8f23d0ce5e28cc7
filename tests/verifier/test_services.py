"""The judge of controllers judges: it gives the same figures again, and finds controllers that are bad."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from specq.protocol import COLOCATED
from tests.verifier.services.candidates import choices
from tests.verifier.services.draw import BUILD_SEEDS, FINAL_SEEDS, draw
from tests.verifier.services.figures import Fixed, Row, all_fixed, as_columns, followed, from_columns, judge
from tests.verifier.services.report import is_in_time, summary
from tests.verifier.services.service import ONE_BY_ONE, Machine, Phase, Service, Source
from tests.verifier.services.serving import PLAIN, Choice, Log

MODEL = Choice((COLOCATED,), 4)
CHANGES = Service(
    seed=1,
    kind="better",
    machine=Machine(
        step_ms=((1.0, 40.0), (512.0, 2000.0)), padding=1, profile=1.0, overlaps=False, host_ms=1.0, session_ms=0.02,
        mixed_ms=0.0, jitter=0.02,
    ),
    sources=(
        Source(
            name=COLOCATED, depth=4, round_ms=4.0, session_ms=1.0, context_ms=0.1, decay=1.0, slows=0.05,
            round_trip_ms=0.0, num_workers=0,
        ),
    ),
    arrivals=ONE_BY_ONE,
    gap_s=0.1,
    prompt_len=20,
    text_len=40,
    spread=0.1,
    shared=0.0,
    is_honest=True,
    num_stalls=0,
    phases=(Phase(12.0, 2, (0.1,)), Phase(12.0, 2, (0.95,))),
)  # fmt: skip


@pytest.fixture(scope="module")
def fixed() -> list[Fixed]:
    return all_fixed(CHANGES)


def test_sets_are_large_and_have_no_seed_in_common() -> None:
    assert min(len(BUILD_SEEDS), len(FINAL_SEEDS)) >= 150
    assert not {*BUILD_SEEDS} & {*FINAL_SEEDS}


def test_a_service_follows_from_its_seed() -> None:
    assert draw(7) == draw(7)
    assert len({draw(seed) for seed in range(50)}) == 50


def test_drawn_services_are_of_every_kind() -> None:
    services = [draw(seed) for seed in BUILD_SEEDS]
    assert {phase.num_sessions for one in services for phase in one.phases} >= {1, 8, 64, 256}
    assert {source.name for one in services for source in one.sources} == {"colocated", "eagle3", "suffix", "remote"}
    assert {one.arrivals for one in services} == {"together", "one by one", "poisson", "bursts"}
    assert any(one.num_stalls for one in services)


def test_the_same_service_gives_the_same_figures(fixed: list[Fixed]) -> None:
    assert judge(CHANGES, fixed) == judge(CHANGES, fixed)


def test_the_best_fixed_choice_differs_between_phases(fixed: list[Fixed]) -> None:
    assert fixed[0].best == "plain"
    assert fixed[1].best == "colocated:4"
    assert fixed[1].rate > 1.5 * fixed[1].plain


@pytest.mark.parametrize("choice", [PLAIN, *choices(CHANGES)], ids=str)
def test_no_fixed_choice_is_better_than_the_best(choice: Choice, fixed: list[Fixed]) -> None:
    for row in judge(CHANGES, fixed, choice):
        assert row.controller < 1.05 * row.best_rate


def test_a_controller_that_never_drafts_is_found(fixed: list[Fixed]) -> None:
    before, after = judge(CHANGES, fixed, PLAIN)
    assert before.controller == pytest.approx(before.best_rate, rel=0.05)
    assert after.controller < 0.7 * after.best_rate
    assert not is_in_time(after)


def test_a_controller_that_always_drafts_is_found(fixed: list[Fixed]) -> None:
    before, after = judge(CHANGES, fixed, MODEL)
    assert before.later < 0.85 * before.plain
    assert not is_in_time(before)
    assert after.controller == pytest.approx(after.best_rate, rel=0.05)
    assert after.followed_s < 1.0


def test_stalls_come_in_each_phase_alike() -> None:
    service = replace(CHANGES, num_stalls=2)
    times = service.stall_times
    assert len(times) == 4
    assert np.array(times[2:]) - 12.0 == pytest.approx(np.array(times[:2]))
    assert service.alone(1).stall_times == pytest.approx(times[:2])


def test_a_change_is_followed_where_a_window_has_the_rate() -> None:
    """100 steps of 0.1 s with two verdicts: one token each up to 5 s, three each afterwards."""
    times = np.arange(101) / 10
    tokens = np.where(times <= 5, 20 * times, 100 + 60 * (times - 5))
    log = Log(times, times, tokens, 20 * times)
    seconds, steps = followed(log, 0.0, 20.0, 0.9 * 60, is_in_waves=False)
    assert (seconds, steps) == (-1.0, -1)
    longer = np.arange(301) / 10
    log = Log(longer, longer, np.where(longer <= 5, 20 * longer, 100 + 60 * (longer - 5)), 20 * longer)
    seconds, steps = followed(log, 0.0, 30.0, 0.9 * 60, is_in_waves=False)
    assert seconds == pytest.approx(4.0, abs=0.7)
    assert steps == pytest.approx(10 * seconds, abs=1)


def test_figures_can_be_read_again_and_compared(fixed: list[Fixed]) -> None:
    rows: list[Row] = judge(CHANGES, fixed, PLAIN)
    assert from_columns(as_columns(rows)) == rows
    assert "at least 0.98 of the one before in 100%" in summary(rows, rows)
