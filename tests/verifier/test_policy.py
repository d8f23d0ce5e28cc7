"""What a policy uses, held against what is best of made-up sources, and what it says of it. How it tries is in
test_policy_probes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from specq.protocol import COLOCATED, SUFFIX
from specq.verifier.control.choices import DECISIONS, Choice
from specq.verifier.control.forecast import PROMPT_FADE, SHARED
from specq.verifier.control.policy import KEPT_DECISIONS
from specq.verifier.models.step_time import StepRows
from specq.verifier.models.token_yield import NO_NODES, PRIOR_CHANCE, Judged, TokenYield
from tests.verifier.driven_policy import FIRST_S, PLAIN, Driven, Made

GOOD = Made("good", 0.8, as_such_s=0.002)
FAIR = Made("fair", 0.6, levels=2, as_such_s=0.0005)
POOR = Made("poor", 0.3, levels=2, as_such_s=0.003)  # of plain decoding 0.87
BAD = Made("bad", 0.1, as_such_s=0.02)
USELESS = Made("useless", 0.03, as_such_s=0.0003)


def only(*names: str) -> Choice:
    return Choice(frozenset(names))


# --- whether drafts are used
# --------------------------------------------------------------------------------------------


def test_plain_decoding_comes_first() -> None:
    driven = Driven([GOOD])
    assert (driven.policy.used, driven.policy.allowed) == (PLAIN, frozenset())
    driven.run(2)
    assert driven.policy.used == PLAIN, "as long as drafts are tried"


@pytest.mark.parametrize("num_sessions", [1, 64])
@pytest.mark.parametrize("sources", [[GOOD], [GOOD, BAD], [BAD, USELESS], [GOOD, FAIR, USELESS, BAD]])
def test_what_is_used_is_as_fast_as_the_best_alone(sources: list[Made], num_sessions: int) -> None:
    """From some steps on, and all that is tried meanwhile costs little."""
    driven = Driven(sources, noise=0.05)
    best = max(driven.rate(one, num_sessions) for one in ([], *([one.name] for one in sources)))
    driven.run(150, num_sessions)
    assert driven.run(1000, num_sessions).rate > 0.97 * best


def test_of_sources_that_find_the_same_one_is_used() -> None:
    """What both bring is less than was foreseen of them, and the second one takes its time."""
    twin = replace(GOOD, name="twin", as_such_s=0.003)
    driven = Driven([GOOD, twin], find_alike=True)
    driven.run(400)
    served = driven.run(2000)
    assert driven.policy.used == only("good")
    assert served.rate > 0.97 * driven.rate(["good"])


def test_sources_that_find_their_own_are_used_together() -> None:
    driven = Driven([GOOD, FAIR])
    driven.run(400)
    assert driven.policy.used == only("good", "fair")


@pytest.mark.parametrize(("slows", "is_used"), [(0.0, True), (0.25, False)])
def test_what_slows_steps_counts_against_a_source(slows: float, is_used: bool) -> None:
    """It would pay if it were waited for and nothing else."""
    driven = Driven([Made("slow", 0.15, levels=1, slows=slows)], is_measured=False, noise=0.01)
    for driven.policy.used in (PLAIN, only("slow")) * 3:
        driven.run(200)
    for choice, names in ((PLAIN, []), (only("slow"), ["slow"])):
        assert driven.policy.forecast.foresee(choice, 1).rate == pytest.approx(driven.rate(names), rel=0.06)
    driven.policy._is_measured = True
    driven.run(100)
    assert (driven.policy.used == only("slow")) is is_used
    assert (driven.rate(["slow"]) > driven.rate()) is is_used


@pytest.mark.parametrize(("saved_s", "is_used"), [(0.0, True), (0.0025, False)])
def test_what_a_plain_step_saves_counts_against_drafts(saved_s: float, is_used: bool) -> None:
    """It is launched before the last one has ended; a drafted one is not."""
    driven = Driven([replace(FAIR, chance=0.4, levels=1)], overlaps=True, saved_s=saved_s, noise=0.01)
    driven.run_plain(30)
    driven.run(300)
    assert (driven.policy.used == only("fair")) is is_used
    assert (driven.rate(["fair"]) > driven.rate()) is is_used


@pytest.mark.parametrize(("unread_s", "is_unread"), [(0.001, True), (-0.001, False)])
def test_drafts_are_verified_unread_where_that_is_faster(unread_s: float, is_unread: bool) -> None:
    """The source is waited for less then."""
    source = replace(GOOD, name=COLOCATED, may_be_unread=True, is_told=True)
    driven = Driven([source], unread_s=unread_s, noise=0.01)
    driven.run(600)
    assert driven.policy.used == Choice(frozenset({COLOCATED}), is_unread)
    assert driven.policy.is_unread is is_unread


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_reading_is_chosen_by_seconds_alone(seed: int) -> None:
    """The tokens of both ways are the same, so the noise of the tokens does not change the choice."""
    source = replace(GOOD, name=COLOCATED, may_be_unread=True, is_told=True)
    driven = Driven([source], unread_s=0.0005, noise=0.01, seed=seed)
    driven.run(400)
    driven.run(1500)
    changes = [one for one in driven.policy.decisions if one.step > 400 and one.reason != "probe"]
    assert driven.policy.used == Choice(frozenset({COLOCATED}), is_unread=True)
    assert all(one.used == driven.policy.used for one in changes), [one.shown() for one in changes]


def test_prompts_that_leave_no_room_for_drafts_do_not_rate_them() -> None:
    """As when many jobs begin together. The drafts stay in use."""
    driven = Driven([GOOD])
    driven.run(300, 32)
    used, tokens = driven.policy.used, driven.policy.forecast.foresee(driven.policy.used, 32).tokens
    none = {"good": Judged(32, NO_NODES, NO_NODES, NO_NODES)}
    for _ in range(8):
        step = driven.made_step(32)
        driven.policy.learn(step._replace(rows=StepRows(512, 0, 480, 40_000), judged=none, num_tokens=32))
    assert used == only("good")
    assert driven.policy.used == used
    assert driven.policy.forecast.foresee(used, 32).tokens == pytest.approx(tokens, rel=0.005)


# --- changes
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_sessions", [1, 8])
def test_drafts_that_become_worse_are_dropped_within_some_rounds(num_sessions: int) -> None:
    """Without a probe."""
    source = replace(GOOD)
    driven = Driven([source])
    driven.run(600, num_sessions)
    assert driven.policy.used == only("good")
    source.chance = 0.05
    driven.run(40, num_sessions)
    assert driven.policy.used == PLAIN
    decisions = [(one.reason, one.used, one.other) for one in driven.policy.decisions]
    assert ("drafts_fell", PLAIN, only("good")) in decisions
    assert driven.run(400, num_sessions).rate > 0.93 * driven.rate([], num_sessions)


def test_drafts_that_become_better_are_used_again() -> None:
    source = replace(GOOD, chance=0.05)
    driven = Driven([source])
    driven.run(600)
    assert driven.policy.used == PLAIN
    source.chance = 0.9
    driven.run(400)
    assert driven.policy.used == only("good")


def test_a_part_that_is_better_than_the_whole_is_used_at_once() -> None:
    """The best one, without a probe."""
    driven = Driven([GOOD, FAIR, BAD], is_measured=False)
    driven.run(60)
    assert driven.policy.used == only("good", "fair", "bad")
    driven.policy._is_measured = True
    driven.run(6)
    first = driven.policy.decisions[0]
    assert (first.reason, first.other) == ("drafts_fell", only("good", "fair", "bad"))
    assert first.used in (only("good", "fair"), only("good"))
    assert first.rate > 2 * first.other_rate


def test_a_source_that_becomes_dear_is_dropped() -> None:
    fair = replace(FAIR)
    driven = Driven([GOOD, fair])
    driven.run(400)
    assert driven.policy.used == only("good", "fair")
    fair.as_such_s = 0.05
    driven.run(60)
    assert driven.policy.used == only("good")


def test_another_load_is_met_by_its_own_choice() -> None:
    """What is fast for one session takes each of many more than it brings: what is known of tokens holds, and what is
    known of seconds by sessions."""
    driven = Driven([replace(GOOD, session_s=0.003)])
    driven.run(300, 1)
    driven.run(100, 64)
    assert driven.policy.used == PLAIN
    num_decided = len(driven.policy.decisions)
    driven.policy.meet(1)
    assert len(driven.policy.decisions) == num_decided + 1, "at once, before the next step"
    driven.run(100, 1)
    assert driven.policy.used == only("good")
    assert len(driven.policy.decisions) < 15


def test_a_load_that_hardly_changes_is_the_same() -> None:
    driven = Driven([BAD])
    driven.run(200, 64)
    num_decided = len(driven.policy.decisions)
    for num_sessions in (63, 64, 65, 60, 64):
        driven.policy.meet(num_sessions)
    assert len(driven.policy.decisions) == num_decided


def test_steps_that_do_not_rate_drafts_still_measure_step_time() -> None:
    """Those of sessions that wait for drafts, or take none."""
    driven = Driven([GOOD], is_told=False, node_s=0.0)
    driven.policy.used = only("good")
    driven.run(100)
    assert driven.policy.forecast.yields["good"].reach().tolist() == TokenYield().reach().tolist()
    driven = Driven([GOOD], row_s=0.0)
    driven.is_told = False
    for _ in range(200):
        driven.policy.learn(driven.made_step(1)._replace(seconds=1.3 * FIRST_S))
    assert driven.policy.forecast.foresee(PLAIN, 1).rate == pytest.approx(1 / (1.3 * FIRST_S), rel=0.05)
    assert not driven.policy.decisions


def test_a_step_without_room_beside_prompts_does_not_rate_a_source() -> None:
    """Without prompts, a round without drafted tokens counts."""
    driven = Driven([GOOD], is_measured=False)
    driven.policy.meet(1)
    step = driven.made_step(1)._replace(judged={"good": Judged(1, NO_NODES, NO_NODES, NO_NODES)})
    for prompts, is_learned in ((10, False), (0, True)):
        driven.policy.learn(step._replace(rows=StepRows(1 + prompts, prompts=prompts)))
        assert (driven.policy.forecast.yields["good"].worth > 0) is is_learned


# --- what is foreseen
# ---------------------------------------------------------------------------------------------------


def test_before_any_step_tokens_are_likely_and_seconds_as_measured() -> None:
    policy = Driven([Made("new", 0.5)]).policy
    plain, new = policy.forecast.foresee(PLAIN, 1), policy.forecast.foresee(only("new"), 1)
    assert (plain.rate, plain.tokens, plain.depth) == (pytest.approx(1 / FIRST_S), 1.0, 0)
    assert new.tokens == pytest.approx(1 + sum(PRIOR_CHANCE**level for level in range(1, new.depth + 1)))
    assert new.deviation > plain.deviation


def test_two_sources_are_foreseen_to_find_some_tokens_alike() -> None:
    """More than the better one, less than if each found its own."""
    policy = Driven([Made("a", 0.5), Made("b", 0.5)]).policy
    alone, both = policy.forecast.foresee(only("a"), 1).tokens, policy.forecast.foresee(only("a", "b"), 1).tokens
    chances = PRIOR_CHANCE ** np.arange(1, 1 + policy.forecast.foresee(only("a", "b"), 1).depth)
    assert both - 1 == pytest.approx(float((chances + SHARED * (chances - chances**2)).sum()))
    assert alone < both < 2 * alone - 1


@pytest.mark.parametrize(("level_s", "expected"), [(0.00001, range(9, 13)), (0.002, range(2, 5)), (0.02, range(1, 2))])
def test_levels_are_drafted_as_they_pay(level_s: float, expected: range) -> None:
    """As many as bring most tokens a second, and one at least of a source that drafts at all."""
    driven = Driven([Made("deep", 0.9, levels=12, level_s=level_s, is_told=True)], row_s=0.00001)
    driven.policy.used = only("deep")
    driven.is_measured = driven.policy._is_measured = False
    driven.run(300)
    assert driven.policy.depth in expected
    tokens = driven.policy.forecast.foresee(only("deep"), 1).tokens
    assert driven.policy.promised == pytest.approx(tokens - 1, rel=0.05)  # of the last choice


def test_each_token_brings_its_part_of_prompts() -> None:
    """Since a text that ends makes room for another: what brings three times the tokens computes three times as many
    rows of prompts. Not each step; and by what hundreds of steps have said."""
    driven = Driven([Made("good", 0.8)], prompts=(5, 100, 5000), prompt_row_s=0.00005, row_s=0.0, is_measured=False)
    for driven.policy.used in (only("good"), PLAIN) * 4:
        driven.run(100)
    driven.run(round(5 / PROMPT_FADE))
    policy, prompt_s = driven.policy, 100 * 0.00005
    plain, good = policy.forecast.foresee(PLAIN, 1), policy.forecast.foresee(only("good"), 1)
    assert 2.5 < good.tokens < 4.5
    assert plain.rate == pytest.approx(1 / (FIRST_S + 0.2 * prompt_s), rel=0.1)
    assert good.rate == pytest.approx(good.tokens / (FIRST_S + 0.2 * good.tokens * prompt_s), rel=0.1)
    without = policy.forecast.foresee(only("good"), 1, prompts=False)
    assert without.rate == pytest.approx(good.tokens / FIRST_S, rel=0.05)


def test_a_step_waits_for_prompts_once() -> None:
    """However many tokens it brings, and so however many texts end in it."""
    driven = Driven([Made("good", 0.8)], prompts=(2, 1, 1), prompt_s=FIRST_S, row_s=0.0, is_measured=False)
    for driven.policy.used in (only("good"), *[PLAIN] * 9):
        driven.run(100)
    plain, good = (driven.policy.forecast.foresee(one, 1) for one in (PLAIN, only("good")))
    assert plain.tokens / plain.rate < 1.5 * FIRST_S
    assert 1.6 * FIRST_S < good.tokens / good.rate < 2.1 * FIRST_S


# --- what is said of it
# -------------------------------------------------------------------------------------------------


def test_each_decision_says_why_and_by_which_rates() -> None:
    driven = Driven([GOOD])
    driven.run_plain(10, 4)
    driven.run(30, 4)
    began, won = driven.policy.decisions
    assert (began.reason, began.sessions, began.used, began.other) == ("probe", 4, PLAIN, only("good"))
    assert began.rate == pytest.approx(driven.rate([], 4), rel=0.03)
    assert (won.reason, won.used, won.other) == ("probe_won", only("good"), PLAIN)
    assert won.rate == pytest.approx(driven.rate(["good"], 4), rel=0.35)
    assert won.other_rate == pytest.approx(driven.rate([], 4), rel=0.03)
    assert began.step < won.step
    assert won.shown() == {
        "step": won.step, "sessions": 4, "reason": "probe_won", "used": "good",
        "tokens_per_s": round(won.rate, 1), "other": "none", "other_tokens_per_s": round(won.other_rate, 1),
    }  # fmt: skip


def test_the_last_decisions_are_kept_and_all_are_counted() -> None:
    driven = Driven([replace(POOR, name=SUFFIX)], noise=0.02)
    driven.run(3000)
    policy = driven.policy
    assert len(policy.decisions) == KEPT_DECISIONS < sum(policy.num_decided.values())
    assert policy.metrics()["decisions"] == {name: count for name, count in policy.num_decided.items() if count}
    assert {one.reason for one in policy.decisions} <= set(DECISIONS)


def test_a_choice_has_a_name() -> None:
    assert [str(one) for one in (PLAIN, only("b", "a"), Choice(frozenset({"a"}), True))] == ["none", "a+b", "a unread"]
