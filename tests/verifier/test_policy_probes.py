"""How a policy tries what it does not use: by probes of one session, then of all, which lose little. By made-up sources
and steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import pytest

from specq.protocol import COLOCATED, REMOTE
from specq.verifier.control import policy as policy_module
from specq.verifier.control.choices import DECISIONS, Choice
from specq.verifier.control.forecast import ROUND_TRIPS
from specq.verifier.control.policy import (
    BUDGET,
    FIRST_CREDIT,
    FIRST_PLAIN,
    FULL_ROUNDS,
    FULL_STEPS,
    LEAST_STEPS,
    LOOK_STEPS,
    MOST_DEBT,
    REST,
    WARM_UP,
)
from specq.verifier.models.token_yield import PRIOR_CHANCE
from tests.verifier.driven_policy import FIRST_S, PLAIN, Driven, Made

GOOD = Made("good", 0.8, as_such_s=0.002)
POOR = Made("poor", 0.3, levels=2, as_such_s=0.003)  # of plain decoding 0.87
POORER = Made("poorer", 0.2, levels=2, as_such_s=0.004)
HOPEFUL = Made("hopeful", 0.5, as_such_s=0.012)
BAD = Made("bad", 0.1, as_such_s=0.02)


def only(*names: str) -> Choice:
    return Choice(frozenset(names))


def reasons(driven: Driven, *among: str) -> list[str]:
    return [one.reason for one in driven.policy.decisions if one.reason in (among or DECISIONS)]


# --- how a probe goes
# ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_sessions", [2, 16])
def test_a_probe_of_what_is_unknown_begins_with_one_session(num_sessions: int) -> None:
    """For some steps, and goes on with all of them."""
    driven = Driven([GOOD])
    driven.run_plain(10, num_sessions)
    driven.run(10 + LOOK_STEPS + 12, num_sessions)
    tried = [step for step in driven.steps if step.kind.sources]
    counts = [step.judged["good"].num_rounds for step in tried]
    num_looks = counts.count(1)
    assert WARM_UP <= num_looks <= LOOK_STEPS
    assert counts == [1] * num_looks + [num_sessions] * (len(counts) - num_looks)
    assert [step.looked_at for step in tried[:num_looks]] == [frozenset({"good"})] * num_looks
    assert driven.policy.used == only("good")


def test_no_probe_begins_before_some_plain_steps() -> None:
    """Though another load is decided at once, and all promises much."""
    driven = Driven([GOOD])
    for i in range(FIRST_PLAIN):
        driven.run(1, 1 + 7 * (i % 2))
    driven.policy.meet(64)
    assert not any(step.kind.sources for step in driven.steps)
    assert len(driven.steps) == FIRST_PLAIN
    assert reasons(driven) == ["probe"]


def test_a_single_session_needs_no_one_session_probe() -> None:
    driven = Driven([GOOD])
    driven.run_plain(10)
    driven.run(14)
    assert not any(step.looked_at for step in driven.steps)
    assert next(step.kind.sources for step in driven.steps[10:] if step.kind.sources) == {"good"}


def test_what_is_known_is_tried_with_all_at_once() -> None:
    driven = Driven([GOOD], is_measured=False)
    driven.run(10, 8)
    driven.policy.used, driven.policy._is_measured = PLAIN, True
    driven.run(20, 8)
    assert reasons(driven) == ["probe", "probe_won"]
    assert not any(step.looked_at for step in driven.steps)


@pytest.mark.parametrize("num_sessions", [1, 16])
def test_a_probe_that_loses_ends_at_the_first_step_that_shows_it(num_sessions: int) -> None:
    """Of one session, if one was enough to see it."""
    driven = Driven([BAD])
    driven.run_plain(10, num_sessions)
    driven.run(20, num_sessions)
    assert reasons(driven) == ["probe", "probe_lost"]
    tried = [step for step in driven.steps if step.kind.sources]
    assert len(tried) == WARM_UP
    assert all(step.judged["bad"].num_rounds == 1 for step in tried)
    assert driven.policy.used == PLAIN


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_steps_that_were_planned_before_a_probe_do_not_count_for_it(lag: int) -> None:
    """A verifier learns from a step after the next one has been launched."""
    driven = Driven([Made("suffix", 0.97, levels=8, as_such_s=0.006)], lag=lag)
    driven.run(60)
    begun, won = list(driven.policy.decisions)[:2]
    assert (begun.reason, won.reason) == ("probe", "probe_won")
    assert won.step - begun.step == lag + LEAST_STEPS


def test_a_probe_that_does_not_win_ends() -> None:
    """Though it does not evidently lose: it brings nothing, and costs nothing."""
    driven = Driven([Made("idle", 0.0001, levels=1)], row_s=0.0, is_measured=False)
    driven.run(100)
    driven.policy.used, driven.policy._is_measured = PLAIN, True
    driven.policy._apply()
    driven.run(3000)
    lengths = [
        len(list(own)) for is_tried, own in groupby(bool(step.kind.sources) for step in driven.steps[100:]) if is_tried
    ]
    assert driven.policy.used == PLAIN
    assert len(lengths) > 3
    assert max(lengths) <= FULL_ROUNDS + FULL_STEPS  # or it has won, and was dropped when it was chosen next


@pytest.mark.parametrize("sources", [[POOR], [POOR, POORER], [POOR, POORER, BAD, GOOD]])
def test_what_has_lost_rests(sources: list[Made]) -> None:
    """For some steps, each choice by itself."""
    driven = Driven(sources, noise=0.02)
    driven.run(2000)
    lost, num_rests = dict[Choice, int](), 0
    for one in driven.policy.decisions:
        if one.reason == "probe" and one.other in lost:
            num_rests += 1
            assert one.step >= lost[one.other] + REST
        elif one.reason == "probe_lost":
            lost[one.other] = one.step
    assert num_rests > 0


@pytest.mark.parametrize("num_sessions", [1, 8])
@pytest.mark.parametrize("seed", range(3))
def test_what_adds_a_source_is_used_after_its_probe_alone(seed: int, num_sessions: int) -> None:
    """However the texts change; and no probe is won before some steps of all sessions."""
    sources = [Made("a", 0.9), Made("b", 0.5, as_such_s=0.003), Made("c", 0.1, as_such_s=0.01)]
    driven, used, probe = Driven(sources, noise=0.05, seed=seed), PLAIN, None
    for turn in range(12):
        for one in sources:
            one.chance = float(driven.rng.choice([0.05, 0.5, 0.9]))
        before = len(driven.policy.decisions)
        driven.run(60, num_sessions)
        for one in list(driven.policy.decisions)[before:] if turn < 5 else ():
            if one.reason == "probe":
                probe = one
            if one.used.sources - used.sources:
                assert one.reason == "probe_won"
                assert probe is not None
                assert one.used == probe.other
                assert one.step >= probe.step + LEAST_STEPS
            used = one.used
        assert driven.policy.used.sources <= {"a", "b", "c"}
    assert driven.policy.num_decided["probe_won"] > 0


# --- what probes may lose
# -----------------------------------------------------------------------------------------------


def lost_s(driven: Driven, begun: int, num_sessions: int) -> float:
    """Return the seconds that were lost to plain decoding since a step."""
    steps = driven.steps[begun:]
    tokens = sum(step.num_tokens for step in steps)
    return sum(step.seconds for step in steps) - tokens / driven.rate([], num_sessions)


@pytest.mark.parametrize("num_sessions", [1, 16])
@pytest.mark.parametrize("sources", [[POORER], [POOR, HOPEFUL], [POOR, POORER, BAD]])
def test_probes_lose_about_the_budget(sources: list[Made], num_sessions: int) -> None:
    """Where nothing pays, and over thousands of steps; beside what may be lost at first, and by sources that nobody
    knows yet, which are foreseen to win."""
    driven = Driven(sources)
    driven.run(4000, num_sessions)
    assert driven.policy.used == PLAIN
    assert driven.policy.num_decided["probe"] > len(sources)
    seconds = sum(step.seconds for step in driven.steps)
    at_first = (FIRST_CREDIT + MOST_DEBT + 5 * len(sources)) * FIRST_S
    assert lost_s(driven, 0, num_sessions) < at_first + 1.6 * BUDGET * seconds
    later = sum(step.seconds for step in driven.steps[1500:])
    assert 0.3 * BUDGET * later < lost_s(driven, 1500, num_sessions) < 1.8 * BUDGET * later


@pytest.mark.parametrize("lag", [2, 3])
def test_steps_in_flight_when_a_probe_ends_are_paid_for(lag: int) -> None:
    """A lost probe has planned more steps than it has learned from."""
    driven = Driven([POOR], lag=lag)
    driven.run(4000, 16)
    later = sum(step.seconds for step in driven.steps[1500:])
    assert driven.policy.num_decided["probe_lost"] > 10
    assert 0.5 * BUDGET * later < lost_s(driven, 1500, 16) < 1.2 * BUDGET * later


def test_a_lost_choice_rests_though_the_load_was_another_one_meanwhile() -> None:
    """Between two waves of jobs, few sessions run."""
    driven = Driven([POOR])
    driven.run(3000, 64)
    lost = [one for one in driven.policy.decisions if one.reason == "probe_lost"][-1]
    driven.policy._num_steps = lost.step + 10
    for num_sessions, credit in ((4, -1.0), (64, 1.0)):
        driven.policy._credit = credit
        driven.policy.meet(num_sessions)
    assert driven.policy._probe is None
    driven.policy._num_steps = lost.step + REST
    driven.policy._choose()
    assert driven.policy._probe is not None


def num_probes(driven: Driven, num_steps: int) -> int:
    before = driven.policy.num_decided["probe"]
    driven.run(num_steps)
    return driven.policy.num_decided["probe"] - before


def test_credit_is_put_by_with_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once what may be lost at first is gone, probes go on as it comes, and end if nothing comes."""
    driven = Driven([POOR])
    driven.run(2000)
    assert num_probes(driven, 3000) > 5
    monkeypatch.setattr(policy_module, "BUDGET", 0.0)
    num_probes(driven, 1000)
    assert num_probes(driven, 3000) == 0
    monkeypatch.setattr(policy_module, "BUDGET", BUDGET)
    assert num_probes(driven, 3000) > 5


def test_saved_probe_credit_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """After hours without trials a probe may lose a few steps. An overdraft must be repaid first."""
    driven = Driven([POOR])
    driven.run(1500)
    driven.policy._rests = {only("poor"): (10**9, 1)}
    driven.run(6000)
    driven.policy._rests, begun = {}, len(driven.steps)
    driven.run(300)
    assert driven.policy.num_decided["probe"] > 1
    assert lost_s(driven, begun, 1) < (6.0 + MOST_DEBT + 2) * FIRST_S + 0.02 * 300 * FIRST_S


def test_a_probe_that_is_expected_to_win_needs_no_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried without credit; what might win is not."""
    monkeypatch.setattr(policy_module, "FIRST_CREDIT", 0.0)
    monkeypatch.setattr(policy_module, "BUDGET", 0.0)
    unknown, poor = Driven([GOOD]), Driven([POOR], is_measured=False)
    unknown.run(40)
    assert unknown.policy.used == only("good")
    assert unknown.policy._credit >= 0.0
    poor.run(30)
    poor.policy.used, poor.policy._is_measured = PLAIN, True
    poor.run(1000)
    assert poor.policy.num_decided["probe"] == 0


def test_a_source_that_computes_the_texts_first_is_tried_where_that_pays() -> None:
    """The cost of joining is separate from its usual draft cost, and is spread over the following steps."""
    driven = Driven([Made("good", 0.8, as_such_s=0.002, join_s=0.05)])
    driven.run(60)
    assert driven.policy.used == only("good")
    assert driven.policy.forecast.foresee(only("good"), 1).rate == pytest.approx(driven.rate(["good"]), rel=0.2)
    dear = Driven([Made("dear", 0.45, levels=1, as_such_s=0.0005, join_s=0.3)])
    dear.run(3000)
    assert dear.policy.num_decided["probe"] < 12


def test_the_step_in_which_a_source_joins_does_not_rate_others() -> None:
    """The step may compute contexts, and does not wait for drafts."""
    policy = (driven := Driven([GOOD], is_measured=False)).policy
    policy.meet(1)
    before = policy.forecast.foresee(PLAIN, 1).rate
    late = driven.made_step(1)._replace(seconds=1.0)
    policy.learn(late)
    assert policy.forecast.foresee(PLAIN, 1).rate == before
    policy.learn(late)
    assert policy.forecast.foresee(PLAIN, 1).rate < before


# --- who is compared
# ----------------------------------------------------------------------------------------------------


def test_a_draft_worker_without_messages_is_not_compared() -> None:
    """It stays enabled, so that a new drafter is received. No decision depends on it."""
    driven = Driven([Made(REMOTE, 0.8), replace(GOOD, name=COLOCATED)])
    driven.heard.remove(REMOTE)
    driven.run(200)
    policy = driven.policy
    assert REMOTE in policy.allowed
    assert not policy.uses(REMOTE)
    assert policy.used == only(COLOCATED)
    assert policy.metrics()["choices"].keys() == {"none", COLOCATED}
    assert not any(REMOTE in one.other.sources | one.used.sources for one in policy.decisions)
    assert policy.forecast.yields[REMOTE].worth == 0
    driven.heard.add(REMOTE)
    driven.run(200)
    assert policy.uses(REMOTE)
    assert policy.used == only(COLOCATED, REMOTE)


def test_a_draft_worker_may_answer_before_its_silence_counts() -> None:
    """Some round trips from its first step on; other sources answer at once."""
    driven = Driven([Made(REMOTE, 0.0001, levels=1), Made("own", 0.0001, levels=1)], is_measured=False)
    for _ in range(200):
        driven.policy.forecast.learn_round_trip(5.0)  # as a second
    driven.run(5)
    worth = {name: one.worth for name, one in driven.policy.forecast.yields.items()}
    assert worth == {REMOTE: 0.0, "own": pytest.approx(5.0, rel=0.05)}
    driven.run(round(ROUND_TRIPS / FIRST_S) + 10)
    assert driven.policy.forecast.yields[REMOTE].worth > 0
    assert driven.policy.forecast.yields[REMOTE].reach()[0] < PRIOR_CHANCE


def test_sources_that_cannot_bring_more_sleep() -> None:
    """They need not follow the texts; those that may draft do, and those that may be tried soon."""
    for other in (GOOD, POOR):
        driven = Driven([BAD, other])
        driven.run(400)
        assert driven.policy.asleep == {"bad"}
    driven = Driven([GOOD])
    assert driven.policy.asleep == frozenset()
    driven.run(1)
    assert driven.policy.asleep == frozenset()
