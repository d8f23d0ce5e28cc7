"""What steps take is found again from noisy steps whose parts are known; what sources are waited for, likewise."""

from __future__ import annotations

import numpy as np
import pytest

from specq.verifier.models.step_curve import StepCurve
from specq.verifier.models.step_time import LEAST_PART, NO_ROWS, SourceWait, StepKind, StepRows, StepTime

FIRST_S, ROW_S = 0.004, 0.0001
SLOW, HARMLESS = "slow", "harmless"
SOURCES = [frozenset(one) for one in ((), {SLOW}, {HARMLESS}, {SLOW, HARMLESS})]


def profiled(rows: int) -> float:
    return FIRST_S + (rows - 1) * ROW_S


def made(most: int = 512) -> StepTime:
    curve = StepCurve([1, most], [profiled(1), profiled(most)])
    slower = StepCurve([1, most], [2 * profiled(1), 2 * profiled(most)])
    return StepTime({SLOW: False, HARMLESS: False}, (slower, curve))


def true_s(kind: StepKind, rows: StepRows) -> float:
    """What steps really take: rows 1.1 of what was measured, beside a source that slows them 1.2; the step 0.5 ms more,
    launched early 1 ms less, unread 0.2 ms less; each node 20 us, prompts 0.8 ms, a row of them 8 us, a token that it
    attends to 40 ns."""
    factor = (1.1 + 0.1 * (SLOW in kind.sources)) * (2 - kind.is_helped)
    beyond = 0.0005 - 0.001 * kind.is_early - 0.0002 * kind.is_unread + 0.00002 * rows.nodes
    if rows.prompts:
        beyond += 0.0008 + 0.000008 * rows.prompts + 0.00000004 * rows.attended
    return profiled(rows.total) * factor + beyond * (2 - kind.is_helped)


def any_step(rng: np.random.Generator) -> tuple[StepKind, StepRows]:
    sources = SOURCES[rng.integers(4)]
    is_early, is_unread = not sources and bool(rng.integers(2)), bool(sources) and bool(rng.integers(2))
    sessions, nodes = int(rng.choice([1, 4, 16, 64])), int(rng.integers(0, 60)) if sources else 0
    prompts = int(rng.integers(1, 200)) if rng.random() < 0.3 else 0
    attended = prompts * int(rng.integers(10, 1000))
    return StepKind(sources, is_early, is_unread), StepRows(sessions + nodes + prompts, nodes, prompts, attended)


def served(num_steps: int, noise: float = 0.02, time: StepTime | None = None) -> StepTime:
    """Return a model after a number of steps of all kinds."""
    time, rng = time or made(), np.random.default_rng(num_steps)
    for _ in range(num_steps):
        kind, rows = any_step(rng)
        time.learn(kind, rows, true_s(kind, rows) * rng.lognormal(0, noise))
    return time


def expected_s(time: StepTime, kind: StepKind, rows: StepRows) -> float:
    besides = StepRows(rows.prompts, prompts=rows.prompts, attended=rows.attended) if rows.prompts else NO_ROWS
    return float(time.times(kind, np.array([rows.total - rows.prompts]), np.array([float(rows.nodes)]), besides)[0])


# --- steps
# --------------------------------------------------------------------------------------------------------------


def test_all_parts_of_a_step_are_found_again() -> None:
    time, rng = served(1500), np.random.default_rng(7)
    for _ in range(100):
        kind, rows = any_step(rng)
        assert expected_s(time, kind, rows) == pytest.approx(true_s(kind, rows), rel=0.06)


def test_before_any_step_all_is_as_it_was_measured() -> None:
    time = made()
    for kind, rows in (
        (StepKind(), StepRows(1)),
        (StepKind(SOURCES[3], is_unread=True), StepRows(40, 39)),
        (StepKind(is_early=True), StepRows(9)),
    ):
        assert expected_s(time, kind, rows) == pytest.approx(profiled(rows.total))
    assert time.saved_s == 0.0


def test_a_source_that_slows_steps_is_distinguished() -> None:
    time = served(1000)
    plain, slow, harmless, both = (time.times(StepKind(one), np.array([16]), np.zeros(1))[0] for one in SOURCES)
    assert slow / plain == pytest.approx(1.09, abs=0.02)
    assert harmless / plain == pytest.approx(1.0, abs=0.015)
    assert both / slow == pytest.approx(1.0, abs=0.015)


def test_no_source_makes_steps_faster() -> None:
    """Nor is a node or a step that is launched early ever the contrary of what it is: steps may vary as they like."""
    time, rows = made(), StepRows(20, 16)
    for _ in range(100):
        time.learn(StepKind(SOURCES[1]), rows, 0.7 * profiled(20))
        time.learn(StepKind(), StepRows(4), profiled(4))
        time.learn(StepKind(is_early=True), StepRows(4), 1.3 * profiled(4))
    with_source, without = (time.times(StepKind(one), np.array([4]), np.zeros(1))[0] for one in SOURCES[1::-1])
    assert with_source >= without
    assert (
        time.times(StepKind(), np.array([20]), np.array([16.0]))[0]
        >= time.times(StepKind(), np.array([20]), np.zeros(1))[0]
    )
    assert time.times(StepKind(is_early=True), np.array([4]), np.zeros(1))[0] <= without
    assert time.saved_s == 0.0


def test_what_unread_drafts_save_is_found_at_once() -> None:
    """On a GPU they save the host's whole launch, which takes as long as a step."""
    time, rows, read = made(), StepRows(40, 32), StepKind(frozenset({HARMLESS}))
    for _ in range(100):
        time.learn(read, rows, profiled(40) + 1.2 * FIRST_S)
    unread = read._replace(is_unread=True)
    for _ in range(4):
        time.learn(unread, rows, profiled(40))
    assert expected_s(time, unread, rows) == pytest.approx(profiled(40), rel=0.1)
    assert expected_s(time, read, rows) > profiled(40) + 0.7 * FIRST_S


def test_what_launching_early_saves_is_found() -> None:
    assert served(1500).saved_s == pytest.approx(0.001, rel=0.15)


def test_what_steps_take_is_not_below_a_part_of_what_was_measured() -> None:
    time = made()
    for _ in range(500):
        time.learn(StepKind(), StepRows(1), 0.0)
    assert time.times(StepKind(), np.array([1]), np.zeros(1))[0] == pytest.approx(LEAST_PART * profiled(1))


def test_helped_steps_are_held_against_their_own_measurement() -> None:
    """What both take beyond is the same part."""
    time = served(1000)
    helped, alone = (time.times(StepKind(is_helped=one), np.array([16]), np.zeros(1))[0] for one in (True, False))
    assert alone == pytest.approx(2 * helped)
    for _ in range(300):
        time.learn(StepKind(is_helped=False), StepRows(16), true_s(StepKind(is_helped=False), StepRows(16)))
    assert time.times(StepKind(), np.array([16]), np.zeros(1))[0] == pytest.approx(
        true_s(StepKind(), StepRows(16)), rel=0.03
    )


def test_one_late_step_is_not_a_measurement() -> None:
    time = served(500)
    before = expected_s(time, StepKind(), StepRows(16))
    time.learn(StepKind(), StepRows(16), 100.0)
    assert expected_s(time, StepKind(), StepRows(16)) < 1.1 * before


def test_a_machine_that_slows_down_is_followed() -> None:
    """Within some memories."""
    time, rng = served(500), np.random.default_rng(3)
    for _ in range(300):
        kind, rows = any_step(rng)
        time.learn(kind, rows, 1.5 * true_s(kind, rows))
    for kind, rows in ((StepKind(), StepRows(4)), (StepKind(SOURCES[1]), StepRows(40, 36))):
        assert expected_s(time, kind, rows) == pytest.approx(1.5 * true_s(kind, rows), rel=0.08)


def test_what_was_seen_is_surer_than_what_was_not() -> None:
    time, fresh = made(), made()
    for _ in range(200):
        time.learn(StepKind(), StepRows(4), 1.1 * profiled(4))
    assert time.deviation(StepKind(), 4) < 0.02 < time.deviation(StepKind(SOURCES[1]), 4)
    assert fresh.deviation(StepKind(), 4) > 0.2


def test_a_curve_is_what_is_expected_of_rows_and_nodes() -> None:
    time = served(1000)
    for kind in (StepKind(), StepKind(SOURCES[1]), StepKind(is_helped=False)):
        curve = time.curve(kind)
        for rows, nodes in ((1, 0), (16, 0), (40, 24)):
            found = float(time.times(kind, np.array([rows]), np.array([float(nodes)]))[0])
            assert curve(rows, nodes) == pytest.approx(found)


def test_rows_beyond_the_largest_that_was_measured_go_on_as_they_are_learned() -> None:
    """By steps that are waited for: one that is launched early says nothing of it."""
    time = made(most=64)
    for _ in range(300):
        time.learn(StepKind(is_early=True), StepRows(200), 3 * profiled(200))
    assert time.profile(StepKind()).profiled(200) == pytest.approx(profiled(200))
    time, dear_s = made(most=64), profiled(64) + 136 * 0.0003
    for _ in range(300):
        time.learn(StepKind(), StepRows(200), dear_s)
        time.learn(StepKind(), StepRows(64), profiled(64))
    assert expected_s(time, StepKind(), StepRows(200)) == pytest.approx(dear_s, rel=0.03)
    assert expected_s(time, StepKind(), StepRows(64)) == pytest.approx(profiled(64), rel=0.03)


# --- what sources are waited for
# ----------------------------------------------------------------------------------------


def waited(wait: SourceWait, sessions: int, foreseen_s: float = 0.0) -> float:
    return float(wait.of(sessions, np.array([foreseen_s]))[0])


@pytest.mark.parametrize(
    ("is_foreseen", "as_such_s", "of_session_s", "factor"), [(False, 0.001, 0.0001, 0.0), (True, 0.0002, 0.00002, 1.1)]
)
def test_what_a_source_takes_is_found(is_foreseen: bool, as_such_s: float, of_session_s: float, factor: float) -> None:
    """By sessions, and by what was foreseen of it, which is about right where it was measured."""
    wait, rng = SourceWait(FIRST_S, is_foreseen=is_foreseen), np.random.default_rng(0)
    for _ in range(400):
        sessions, foreseen_s = int(rng.choice([1, 4, 16])), float(rng.choice([0.001, 0.004])) * is_foreseen
        seconds = as_such_s + of_session_s * sessions + factor * foreseen_s
        wait.learn(sessions, seconds * rng.lognormal(0, 0.03), foreseen_s, joins=False)
    assert wait.num_seen == 400
    for sessions, foreseen_s in ((8, 0.002 * is_foreseen), (1, 0.001 * is_foreseen)):
        expected = as_such_s + of_session_s * sessions + factor * foreseen_s
        assert waited(wait, sessions, foreseen_s) == pytest.approx(expected, rel=0.08)


def test_a_source_that_was_measured_is_believed_for_longer() -> None:
    """Than one of which nothing is foreseen: a few steps that take much longer."""
    found = []
    for is_foreseen in (True, False):
        wait = SourceWait(FIRST_S, is_foreseen=is_foreseen)
        wait.learn(1, 0.004, 0.001, joins=False)
        found.append(waited(wait, 1, 0.001))
    assert 0.001 < found[0] < found[1] <= 0.004


def test_of_a_few_sessions_what_many_take_is_not_concluded() -> None:
    """If drafts were measured at start-up: a wait longer by the time of half a step is so for any number of them."""
    wait, rng = SourceWait(FIRST_S, is_foreseen=True), np.random.default_rng(3)
    for _ in range(100):
        wait.learn(8, (0.0044 + 0.5 * FIRST_S) * rng.lognormal(0, 0.02), 0.0044, joins=False)
    assert waited(wait, 8, 0.0044) == pytest.approx(0.0044 + 0.5 * FIRST_S, rel=0.05)
    assert waited(wait, 64, 0.0062) == pytest.approx(0.0062 + 0.5 * FIRST_S, rel=0.15)


def test_before_it_was_seen_what_is_foreseen_is_expected() -> None:
    wait = SourceWait(FIRST_S, is_foreseen=False)
    assert (wait.num_seen, wait.join_s) == (0, 0.0)
    assert waited(wait, 8, 0.002) == pytest.approx(0.002)
    assert waited(wait, 8) == 0.0


def test_the_step_in_which_a_source_joins_says_only_what_joining_takes() -> None:
    """For each session, beyond what is expected."""
    wait = SourceWait(FIRST_S, is_foreseen=False)
    for _ in range(100):
        wait.learn(4, 0.002, 0.002, joins=False)
    for _ in range(30):
        wait.learn(4, 0.042, 0.002, joins=True)
    assert wait.num_seen == 100
    assert wait.join_s == pytest.approx(0.01, rel=0.05)
    assert waited(wait, 4, 0.002) == pytest.approx(0.002, rel=0.05)
    wait.learn(4, 0.0, 0.002, joins=True)
    assert 0 < wait.join_s < 0.0075


def test_what_a_source_takes_is_not_below_a_part_of_what_was_foreseen() -> None:
    wait = SourceWait(FIRST_S, is_foreseen=False)
    for _ in range(300):
        wait.learn(1, 0.0, 0.004, joins=False)
    assert waited(wait, 1, 0.004) == pytest.approx(LEAST_PART * 0.004)
    assert wait.of(1, np.array([0.0, 0.001, 0.04])).min() >= 0.0


def test_what_was_learned_is_kept_once_enough_steps_have_shown_it():
    """Of steps with help from other cores and without, each by itself."""
    time = made()
    for _ in range(79):
        time.learn(StepKind(), StepRows(1), 1.2 * profiled(1))
    assert time.learned_curves() == {}
    time.learn(StepKind(), StepRows(1), 1.2 * profiled(1))
    (learned,) = time.learned_curves().items()
    assert learned[0] is True
    assert learned[1](1) == pytest.approx(1.2 * profiled(1), rel=0.02)
