"""Whether chains are read before they are verified, by what rounds take and give."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from specq.drafting.draft_model.reading_choice import FIRST, LEAST_PATIENCE, MOST_PATIENCE, ReadingChoice

DRAFT_S = 0.004


def run(
    choice: ReadingChoice, num_rounds: int, take: Callable[[bool], tuple[float, int]], num_sessions: int = 8
) -> list[bool]:
    """Let rounds be chosen, which take seconds beyond their drafts and give tokens; return which were unread."""
    found = list[bool]()
    for _ in range(num_rounds):
        is_unread = choice.choose(num_sessions, DRAFT_S)
        choice.learn(num_sessions, *take(is_unread), is_unread=is_unread)
        found.append(is_unread)
    return found


def test_both_kinds_are_tried_at_first() -> None:
    found = run(ReadingChoice(), 2 * LEAST_PATIENCE, lambda _: (0.005, 30))
    num_first = FIRST + LEAST_PATIENCE - 1
    assert all(found[:num_first])
    assert not any(found[num_first : num_first + FIRST])
    assert all(found[num_first + FIRST + 1 :])


@pytest.mark.parametrize("is_better", [False, True])
def test_the_faster_kind_is_chosen_and_the_other_tried_ever_more_rarely(is_better: bool) -> None:
    found = run(ReadingChoice(), 4000, lambda is_unread: (0.005 if is_unread is is_better else 0.008, 30))[100:]
    trials = [i for i, is_unread in enumerate(found) if is_unread is not is_better]
    gaps = [after - before for before, after in itertools.pairwise(trials)]
    assert gaps == sorted(gaps)
    assert len(gaps) > 5
    assert gaps[0] < gaps[-1] == MOST_PATIENCE


def test_what_a_draft_takes_counts_with_the_tokens() -> None:
    """Rounds that take a third less beyond their drafts, and give a quarter less, are better only where drafts take
    little."""
    for draft_s, is_better in ((0.0, True), (0.02, False)):
        choice = ReadingChoice()
        for is_unread in (False, True) * 400:
            choice.learn(8, *((0.004, 30) if is_unread else (0.006, 40)), is_unread=is_unread)
        assert choice.choose(8, draft_s) is is_better


def test_few_rounds_say_little_of_tokens() -> None:
    """A round gives now few, now many; so what it takes decides at first."""
    choice = ReadingChoice()
    for is_unread in (False, True) * FIRST:
        choice.learn(8, *((0.005, 20) if is_unread else (0.0055, 22)), is_unread=is_unread)
    assert choice.choose(8, DRAFT_S)


def test_a_round_that_was_held_up_changes_nothing() -> None:
    choice = ReadingChoice()
    run(choice, 40, lambda is_unread: (0.005 if is_unread else 0.006, 30))
    choice.learn(8, 9.0, 30, is_unread=True)
    assert choice.choose(8, DRAFT_S)


def test_a_load_goes_by_the_nearest_that_was_met_until_it_has_found_its_own() -> None:
    choice = ReadingChoice()
    run(choice, 60, lambda is_unread: (0.006 if is_unread else 0.005, 30), num_sessions=4)
    run(choice, 60, lambda is_unread: (0.005 if is_unread else 0.006, 30), num_sessions=33)
    assert choice.choose(63, DRAFT_S)  # the same load
    assert choice.choose(128, DRAFT_S)
    assert not choice.choose(8, DRAFT_S)
    found = run(choice, 60, lambda is_unread: (0.005 if is_unread else 0.006, 30))
    assert not any(found[:30])
    assert found[-1]


def test_what_was_best_may_change() -> None:
    choice = ReadingChoice()
    run(choice, 100, lambda is_unread: (0.005 if is_unread else 0.006, 30))
    found = run(choice, 200, lambda is_unread: (0.005 if not is_unread else 0.009, 30))
    assert not any(found[8:30])


def test_rounds_of_more_sessions_do_not_seem_better_for_their_tokens() -> None:
    choice = ReadingChoice()
    for _ in range(FIRST):
        choice.learn(8, 0.005, 40, is_unread=False)
    for _ in range(100):
        choice.learn(15, 0.0055, 75, is_unread=True)
    assert not choice.choose(12, DRAFT_S)
