"""Which sources of drafts are used, by what they were measured to bring."""

import math

import numpy as np
import pytest

from specq.protocol import COLOCATED, REMOTE, SUFFIX
from specq.verifier.control.arms import WARM_UP_STEPS, Arms
from specq.verifier.control.challenger import FIRST_PATIENCE, MOST_PATIENCE
from specq.verifier.control.load_level import LoadLevel
from specq.verifier.control.source_yields import Yield
from specq.verifier.control.window import LEAST_STEPS, WINDOW_S, Window

STEP_S = 0.01
NONE, R, L, C = frozenset(), frozenset({REMOTE}), frozenset({SUFFIX}), frozenset({COLOCATED})
RL = R | L


class Service(Arms):
    """Arms, and sources that bring something or not."""

    def __init__(self, sources=RL, **options):
        super().__init__(sources, **options)
        self.sent = dict.fromkeys(sources, 0)
        self.seconds = {}  # by arm, of the last `serve`

    def serve(self, seconds, rates, *, sessions=1, silent=NONE, lazy=NONE, noise=0.0, rng=None, drift=0.0):
        """Serve for so long at these rates of each arm; return the tokens as a share of those of the best arm.

        `silent`: sources that send nothing, so that an arm is worth what it is without them; `lazy`: sources that send
        nothing, and cost what they cost.
        """
        spent, tokens_each, self.seconds = 0.0, 0.0, {}
        while spent < seconds:
            arm = self.allowed
            step_s = STEP_S * (1 + drift * spent / seconds)
            rate = rates[arm - silent]
            tokens = 100 * sessions * rate * (max(0.1, 1 + noise * rng.standard_normal()) if noise else 1.0)
            for source in arm - silent - lazy:
                self.sent[source] += 5
            self.meet(sessions)
            self.learn(sessions, round(tokens), step_s, self.sent)
            spent += step_s
            tokens_each += rate * step_s
            self.seconds[arm] = self.seconds.get(arm, 0.0) + step_s
        return tokens_each / spent / max(rates[arm] for arm in rates if not arm & silent)

    def share(self, arm):
        """Return the share of time of an arm in the last `serve`."""
        return self.seconds.get(arm, 0.0) / sum(self.seconds.values())


def rates_of(**gains):
    """Return the rate of each set of these sources, each of which multiplies it."""
    sources = sorted(gains)
    subsets = [[s for i, s in enumerate(sources) if bits >> i & 1] for bits in range(2 ** len(sources))]
    return {frozenset(some): math.prod(gains[source] for source in some) for some in subsets}


@pytest.mark.parametrize("remote", [1.5, 1.05, 0.95, 0.6])
@pytest.mark.parametrize("suffix", [1.2, 0.9])
def test_the_best_arm_has_nearly_all_of_the_time(remote, suffix):
    """After some seconds, in which it finds out; trials cost no more than a hundredth, of which the far arms' are a
    part."""
    arms, rates = Service(), rates_of(remote=remote, suffix=suffix)
    arms.serve(20, rates)
    assert arms.serve(100, rates) >= 0.985
    best = max(rates, key=lambda arm: rates[arm])
    assert arms.share(best) > 0.8


def test_eight_arms_cost_no_more_than_four():
    """With a third source that is of no use beside the others, and one set that loses nearly everything."""
    rates = rates_of(remote=1.3, suffix=1.1, colocated=0.9) | {R | L | C: 0.2}
    arms = Service(R | L | C)
    arms.serve(30, rates)
    assert arms.serve(120, rates) >= 0.985
    assert arms.share(RL) > 0.8
    assert arms.share(R | L | C) < 0.01, "what loses badly is hardly tried"


@pytest.mark.parametrize("rates", [
    {RL: 0.86, L: 1.0, R: 0.8, NONE: 0.75},  # only suffix
    {RL: 0.7, L: 0.9, R: 0.75, NONE: 1.0},  # nothing pays, and that is two changes away
    {RL: 1.0, L: 0.7, R: 0.8, NONE: 0.6},  # both
    {RL: 0.9, L: 0.7, R: 1.0, NONE: 0.6},  # drafters without suffixes
])  # fmt: skip
def test_noise_is_averaged_out(rates):
    """Steps whose tokens vary by two thirds, on five seeds."""
    for seed in range(5):
        rng, arms = np.random.default_rng(seed), Service()
        arms.serve(20, rates, noise=0.67, rng=rng)
        assert arms.serve(60, rates, noise=0.67, rng=rng) >= 0.97


def test_the_first_answer_comes_within_seconds():
    """Drafts that cost a third are dropped after two windows and a trial."""
    arms, rates = Service(), {RL: 0.67, L: 1.0, R: 0.6, NONE: 0.9}
    arms.serve(6 * WINDOW_S, rates)
    assert REMOTE not in arms.allowed


def test_slow_steps_of_many_sessions_need_not_be_many():
    """Each of them is sixteen verdicts; and what draft workers take for a round trip delays only what uses them."""
    arms, num_steps = Arms(RL), 0
    sent = dict.fromkeys(RL, 0)
    arms.learn_round_trip(1.0)
    while REMOTE in arms.allowed:
        sent = {source: count + (source in arms.allowed) for source, count in sent.items()}
        arms.meet(16)
        arms.learn(16, 16 * (2 if REMOTE in arms.allowed else 3), 0.3, sent)
        num_steps += 1
    assert num_steps <= 5 * (WARM_UP_STEPS + LEAST_STEPS)  # before, with less, before, with less, before


def test_what_is_known_of_others_is_known_beside_a_new_arm():
    """What beat the old one by 0.1 loses 0.1 against what beat it by 0.2, and the old one is to be tried again soon."""
    level = LoadLevel.of(RL)
    level.challengers[NONE].learn(0.1)
    level._compare(L, 0.2)
    assert level.used == L
    assert level.challengers[NONE].gain == pytest.approx(-0.1)
    assert level.challengers[RL].gain == pytest.approx(-0.2)
    assert level.challengers[RL].until_trial == FIRST_PATIENCE


def test_what_loses_in_each_of_its_changes_is_tried_late():
    """Without drafters two thirds are lost, and likewise without suffixes: without both is no early question."""
    arms, rates = Service(), rates_of(remote=3.0, suffix=3.0)
    arms.serve(12, rates)
    assert arms.share(NONE) == 0.0
    assert arms.share(L) > 0.0
    arms.serve(60, rates)
    assert arms.share(NONE) > 0.0


@pytest.mark.parametrize("alone", [1.1, 1.2])
def test_of_two_sources_that_find_the_same_the_better_one_is_soon_used(alone):
    """Both together lose to the other one alone, and so does none: what is known of each change by itself says nothing
    of the swap. Within 12 s, though steps vary by half."""
    rates = {L | C: 0.9, L: 1.0, C: alone, NONE: 0.93}
    shares = []
    for seed in range(6):
        rng, arms = np.random.default_rng(seed), Service(L | C)
        arms.serve(12, rates, noise=0.5, rng=rng)
        shares.append(arms.serve(12, rates, noise=0.5, rng=rng))
    assert sum(shares) / len(shares) > 0.96


def test_a_machine_that_slows_down_says_nothing_about_drafts():
    """A trial is compared with what was before and after it: a drift of the steps' time by half moves no arm."""
    arms = Service()
    arms.serve(60, rates_of(remote=1.04, suffix=1.04), drift=0.5)
    assert arms.share(RL) > 0.7


def test_the_answer_changes_with_what_is_measured():
    """Drafts that were useless bring something now, and are used again: first by whichever arm with them is tried
    first, at last by the best."""
    arms = Service()
    arms.serve(60, rates_of(remote=0.8, suffix=1.1))
    assert arms.share(L) > 0.7
    arms.serve(60, rates_of(remote=1.4, suffix=1.1))
    assert arms.serve(60, rates_of(remote=1.4, suffix=1.1)) > 0.9
    assert arms.share(RL) + arms.share(R) > 0.95
    arms.serve(60, rates_of(remote=1.4, suffix=1.1))
    assert arms.share(RL) > 0.8


def test_what_drafts_cost_while_prompts_are_computed_counts():
    """All decode as fast with drafters as without; but each fifth step computes a prompt, and takes longer beside
    them."""
    arms = Service(R)
    used = []
    for i in range(4000):
        used.append(arms.allowed)
        arms.meet(4)
        if i % 5:
            arms.sent[REMOTE] += 5 * (REMOTE in arms.allowed)
            arms.learn(4, 100, STEP_S, arms.sent)
        else:
            arms.learn(4, 60, 4 * STEP_S if REMOTE in arms.allowed else STEP_S, arms.sent, num_decoding=3)
    assert used[1000:].count(NONE) > 0.9 * 3000


def test_each_load_has_its_own_answer():
    """Drafts pay for one session and not for sixteen."""
    few, many, arms = rates_of(remote=1.3, suffix=1.1), rates_of(remote=0.8, suffix=1.1), Service()
    for _ in range(30):
        arms.serve(2, few, sessions=1)
        arms.serve(2, many, sessions=16)
    arms.serve(2, few, sessions=1)
    assert arms.share(RL) > 0.8
    arms.serve(2, many, sessions=16)
    assert arms.share(L) > 0.7


def test_a_load_that_is_new_begins_with_the_answer_of_the_nearest():
    """Sixteen sessions end one by one, and what was found for them holds until something else is found."""
    arms, rates = Service(), rates_of(remote=0.5, suffix=1.1)
    arms.serve(20, rates, sessions=16)
    for sessions in (8, 4, 2, 1):
        arms.serve(0.1, rates, sessions=sessions)  # until that is the load
        arms.serve(0.4, rates, sessions=sessions)
        assert arms.share(L) == 1.0


def test_loads_that_never_last_go_by_those_that_do():
    """Batches of sixteen sessions whose ends are short: at first all loads are new, and later ends go by what was found
    for sixteen."""
    arms, rates = Service(), rates_of(remote=0.5, suffix=1.1)
    for _ in range(20):
        arms.serve(1, rates, sessions=16)
        for sessions in (8, 4, 2, 1):
            arms.serve(0.07, rates, sessions=sessions)
    with_drafts = []
    for _ in range(10):
        arms.serve(1, rates, sessions=16)
        for sessions in (8, 4, 2, 1):
            arms.serve(0.07, rates, sessions=sessions)
            with_drafts.append(arms.share(RL))
    assert sum(with_drafts) / len(with_drafts) < 0.15


def test_a_load_that_flickers_is_one_load():
    """One of sixteen sessions is replaced again and again: no change of arms comes from that."""
    arms, rates = Service(), rates_of(remote=0.7, suffix=1.1)
    arms.serve(20, rates, sessions=16)
    used = 0.0
    for _ in range(200):
        arms.serve(0.05, rates, sessions=15)
        arms.serve(0.05, rates, sessions=16)
        used += arms.share(L) / 200
    assert used > 0.9


def test_sessions_that_come_together_are_met_by_the_answer_for_so_many():
    """While their prompts are computed, when nothing can be learned: drafters pay for one session and not for
    sixteen."""
    few, many, arms = rates_of(remote=1.5, suffix=1.1), rates_of(remote=0.6, suffix=1.1), Service()
    arms.serve(10, few, sessions=1)
    arms.serve(10, many, sessions=16)
    arms.serve(5, few, sessions=1)
    assert REMOTE in arms.allowed
    for num_sessions in (5, 16, 16):
        arms.meet(num_sessions)
    assert REMOTE not in arms.allowed


def test_a_step_with_few_sessions_is_no_other_load():
    """Drafts pay for four and not for sixteen, and each tenth step has four, since others are late."""
    few, many, arms = rates_of(remote=1.5, suffix=1.1), rates_of(remote=0.6, suffix=1.1), Service()
    for _ in range(10):
        arms.serve(3, few, sessions=4)
        arms.serve(3, many, sessions=16)
    used = 0.0
    for _ in range(50):
        arms.serve(9 * STEP_S, many, sessions=16)
        used += arms.share(L) / 50
        arms.serve(STEP_S, many, sessions=4)
    assert used > 0.9


@pytest.mark.parametrize("step_s", [0.0055, 0.03])
def test_a_dip_among_many_sessions_is_no_other_load(step_s: float) -> None:
    """Drafts pay for four and not for sixteen, of which most are late for 0.03 s now and then, since their clients take
    a while to send the next jobs."""
    few, many, arms = rates_of(remote=1.5, suffix=1.1), rates_of(remote=0.6, suffix=1.1), Service()
    for _ in range(10):
        arms.serve(3, few, sessions=4)
        arms.serve(3, many, sessions=16)
    used = []
    for _ in range(50):
        for sessions, seconds in ((16, 0.7), (3, 0.03)):
            for _ in range(round(seconds / step_s)):
                arms.meet(sessions)
                used += [arms.allowed] * (sessions == 3)
                arms.learn(sessions, round(100 * sessions * many[arms.allowed]), step_s, arms.sent)
    assert sum(REMOTE in arm for arm in used) <= 0.05 * len(used)


def test_texts_that_a_draft_model_computes_first_are_paid_for() -> None:
    """Where its trial begins, a step takes 0.4 s instead of 0.01, since it knows none of the texts: no stall, and so it
    is tried the more rarely."""
    arms, spent, at_first_s, tokens = Arms(C), 0.0, 60.0, {False: 0, True: 0}
    sent, was_used = {COLOCATED: 0}, True
    while spent < 300:
        is_used = COLOCATED in arms.allowed
        of_texts_s = 0.4 * (is_used and not was_used)
        was_used, rate = is_used, 75 if is_used else 100
        sent = {COLOCATED: sent[COLOCATED] + 5 * is_used}
        arms.meet(8)
        arms.learn(
            8, rate, STEP_S + of_texts_s, sent, {COLOCATED: Yield(0.005 + of_texts_s, rate / 2)} if is_used else {}
        )
        spent += STEP_S + of_texts_s
        tokens[spent > at_first_s] += rate
    assert tokens[False] > 0.98 * 100 / STEP_S * at_first_s
    assert tokens[True] > 0.992 * 100 / STEP_S * (300 - at_first_s)


def test_what_is_late_is_no_round_trip():
    """A drafter that answers after minutes makes no window longer than five seconds."""
    arms = Service()
    for _ in range(100):
        arms.learn_round_trip(100.0)
    assert arms.round_trip_s <= 1.0


def test_without_drafters_none_are_missed():
    """There is nobody to silence, and whoever comes is heard; suffixes are measured all the same."""
    arms, rates = Service(), rates_of(remote=1.0, suffix=0.8)
    arms.serve(30, rates, silent=R)
    assert arms.serve(30, rates, silent=R) > 0.97
    assert arms.share(R) > 0.9
    rates = rates_of(remote=1.5, suffix=0.8)
    assert arms.serve(10, rates) > 0.94


def test_drafters_that_send_hardly_anything_are_silenced_if_they_cost_something():
    """A bad drafter backs off, but receives verdicts and tries again, on a core that it shares with the broker."""
    arms, rates = Service(), rates_of(remote=0.93, suffix=1.2)
    arms.serve(STEP_S, rates)
    arms.serve(20, rates, lazy=R)
    arms.serve(60, rates, lazy=R)
    assert arms.share(L) > 0.9


def test_drafters_that_have_gone_are_looked_for_more_and_more_rarely():
    """Once silenced, they are waited for in vain: each trial lasts a window."""
    arms, rates = Service(), rates_of(remote=0.7, suffix=1.1)
    arms.serve(20, rates)
    arms.serve(600, rates, silent=R)
    arms.serve(200, rates, silent=R)
    assert 0 < arms.share(RL) < 4 / MOST_PATIENCE


def test_where_nothing_is_measured_all_is_used():
    arms = Service(is_measured=False)
    arms.serve(20, rates_of(remote=0.5, suffix=0.5))
    assert arms.share(RL) == 1.0


def test_a_window_holds_some_round_trips():
    """With a round trip of 0.5 s, an arm is measured for 2.5 s, after a second that is left out."""
    arms = Service()
    for _ in range(200):
        arms.learn_round_trip(0.5)
    spent = 0.0
    while arms.allowed == RL:
        arms.sent = {source: count + 1 for source, count in arms.sent.items()}
        arms.meet(1)
        arms.learn(1, 10, STEP_S, arms.sent)
        spent += STEP_S
    assert spent == pytest.approx(5 * 0.5 + 2 * 0.5, rel=0.05)
    assert spent > 4 * WINDOW_S


@pytest.mark.parametrize("windows", [0.4, 0.7, 1.0, 1.3, 1.7, 2.5])
def test_loads_that_come_back_for_about_a_window_are_answered(windows):
    """The end of a batch cuts trials short: they go on with the next. What does not pay is found out all the same."""
    arms, rates = Service(), {RL: 0.6, L: 1.0, R: 0.55, NONE: 0.9}
    shares = []
    for _ in range(round(100 / windows)):
        shares.append(arms.serve(windows * WINDOW_S, rates, sessions=4))
        arms.serve(10 * STEP_S, rates, sessions=1)
    assert np.mean(shares) >= 0.92


@pytest.mark.parametrize("passage_s", [0.1, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("offset_s", [0.0, 0.1, 0.2])
def test_a_passage_that_is_hard_to_foresee_does_not_silence_drafts(passage_s, offset_s):
    """Neither where it is what a trial of plain decoding is compared with, nor where it is as long as the trial and the
    windows beside it."""
    service = Service(R)
    easy, hard = {NONE: 1.0, R: 1.6}, {NONE: 1.0, R: 0.3}
    service.serve(10.0 + offset_s, easy)
    service.serve(passage_s, hard)
    service.serve(4.0, easy)
    service.serve(3.0, easy)
    assert service.share(R) > 0.9


def test_an_arm_that_wins_by_the_window_after_its_trial_is_compared_with_itself_from_then_on() -> None:
    """The window after it is of the arm that was in use: not what the new one's rounds give, and not what the next
    trial is held against."""

    def served(tokens: int, step_s: float, senders: frozenset[str]) -> Window:
        found = Window()
        for _ in range(20):
            found.add(tokens, step_s, 8, senders)
        return found

    drafted, plain = (lambda: served(24, 0.03, C)), (lambda: served(8, 0.0085, NONE))
    level = LoadLevel.of(C)
    for of_arm in (drafted, plain, drafted):
        level.window = of_arm()
        level.close(C)
    assert level.used == NONE, "the trial has won"
    assert level.before.log_rate == pytest.approx(plain().log_rate)
    assert level.trial == C
    for of_arm in (drafted, plain, plain):
        level.window = of_arm()
        level.close(C)
    former = level.challengers[C]
    assert former.gain == pytest.approx(math.log(800 / (8 / 0.0085)))
    assert former.weight > 1, "what its trials said is not forgotten"
