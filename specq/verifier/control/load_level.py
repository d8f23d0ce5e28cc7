"""The arms at one load: what is known of each set of sources beside the one in use, and which is measured next.

Rules: what counts of a trial is the ratio to the windows of the arm in use before and after it. The arms are those that
differ in one source, those of one source, and that of none; and the one without all sources that are seen to bring less
than they take, which is tried first. An arm that adds a source must gain by more than a standard error, so that of arms
that are nearly equal the one with fewer sources is used. One that differs in several is tried later, and not at all for
a while if what is known of each of them says that it loses; so is one that promises a loss at best
(`specq.verifier.control.source_yields`). Where drafts are right less often than they were, what trials have said of
arms that may be better now is forgotten (`specq.verifier.control.traffic`), and since that may be one hard passage of a
text, the next trial awaits the window after it; an arm that is given up for one trial alone is tried again soon. A
trial ends at the first round that shows that it cannot catch up. What a trial has lost, in seconds, says how soon it
comes again. Guesses (`specq.verifier.control.source_yields`) say what is tried, and never what is used.
(`specq.verifier.control.arms` has the whole.)

No clock: seconds are given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import structlog

from specq.verifier.control.challenger import FIRST_PATIENCE, MOST_OF_LOSERS, TRIALS_COST, Challenger, affordable
from specq.verifier.control.source_yields import NOTHING, Arm, SourceBounds, Yield, Yields, leanest, promise
from specq.verifier.control.traffic import Traffic
from specq.verifier.control.window import WINDOW_S, UsualSteps, Window

log = structlog.get_logger(__name__)

FAR_PATIENCE, MOST_FAR_PATIENCE = 12, 64  # at first, of an arm that differs in several sources
GUESSED, EVIDENTLY_GUESSED = (
    0.05,
    0.4,
)  # gains, in logarithms: an arm that is guessed to be so much better is tried next; and at once
FAIR_PART = 0.1  # of a window: what a visit to a load must bring for a trial to go on at the next
# Standard deviations: a trial that is so much better than the window before awaits none after it; one that differs by
# so much ends early.
EVIDENT, SOON_EVIDENT = 2.0, 3.0
MARGIN = 0.01  # of the logarithm of the ratio; within it the arm in use stays
HOPELESS = 0.1  # the least loss, as a logarithm, that a trial's best promise must show for it to end
AWAKE = 16  # windows before a trial, from which on its sources follow the texts
MANY = 1.5  # sessions of a step
MOST_LOOKS = 8  # steps in which one session is drafted for alone, by a source of which nothing is known


@dataclass(slots=True)
class LoadLevel:
    """The arms at one load.

    sources  all that there are; used: the arm in use; trial: the one that is being tried instead, if any
    had     the part of the trial's window that was there when the load came back; is_second: whether a visit brought
            too little before
    num_trials  at this load itself
    before  the window of the arm in use before the trial; tried: the arm and its window, of a trial which awaits the
            window after it
    of_trial  what the trial took and brought, its warm-up included; num_looks: its first steps, in which one session
              was drafted for alone
    debt_s  seconds that trials have cost and that no share of later windows has paid for: until then none that was put
            off begins
    traffic what rounds of the arm in use give; is_fallen: it has fallen since the last trial ended
    step    what a step of the arm in use took and brought; yields: what each source did, where it was used last, in a
            step
    asleep  sources whose next trial is far away: they need not follow the texts
    steps   what steps of each arm usually take: what stalls take beyond it does not count
    bounds  what each source can do at best; num_sessions: of a step, for which they are asked
    """

    sources: Arm
    used: Arm
    bounds: SourceBounds = field(default_factory=SourceBounds)
    challengers: dict[Arm, Challenger] = field(default_factory=dict)
    num_trials: int = 0
    trial: Arm | None = None
    had: float = 0.0
    is_second: bool = False
    window: Window = field(default_factory=Window)
    before: Window = field(default_factory=Window)
    tried: tuple[Arm, Window] | None = None
    of_trial: Yield = NOTHING
    num_looks: int = 0
    debt_s: float = 0.0
    traffic: Traffic = field(default_factory=Traffic)
    is_fallen: bool = False
    step: Yield = NOTHING
    yields: dict[str, Yield] = field(default_factory=dict)
    num_sessions: float = 1.0
    asleep: Arm = frozenset()
    steps: UsualSteps = field(default_factory=UsualSteps)

    @classmethod
    def of(cls, sources: Arm, unpriced: Arm = frozenset(), bounds: SourceBounds | None = None) -> LoadLevel:
        """Return the state before anything is known: all sources are used but the `unpriced` ones, whose trials come
        first."""
        level = cls(sources, sources - unpriced, bounds or SourceBounds())
        level._meet_challengers(silent=frozenset())
        return level

    def like(self) -> LoadLevel:
        """Return the state at a load that has not been measured, where this is the nearest that was."""
        challengers = {arm: one.like() for arm, one in self.challengers.items()}
        return LoadLevel(self.sources, self.used, self.bounds, challengers, step=self.step, yields=dict(self.yields))

    def _meet_challengers(self, silent: Arm) -> None:
        """Let those arms be tried that differ in one source from the one in use, those of one source, and that of none;
        `silent`: sources that need not be left out."""
        others = sorted(self.sources - silent)
        arms = [self.used ^ {other} for other in others] + [silent, *(silent | {other} for other in others)]
        for arm in arms:
            if arm != self.used:
                patience = FIRST_PATIENCE if len(arm ^ self.used) == 1 else FAR_PATIENCE
                self.challengers.setdefault(arm, Challenger(patience, patience))
        for arm in [arm for arm, one in self.challengers.items() if not one.weight and arm not in arms]:
            del self.challengers[arm]

    def _forget_trials(self, fall: float) -> None:
        """Where the arm in use gives so much less than before, as a logarithm, let those be tried as if they had not
        been, but for how much trials differ, that lost by less: they may give as much as before."""
        if not fall:
            return
        self.is_fallen = True
        for arm, one in self.challengers.items():
            if one.weight and one.gain > -fall:
                self.challengers[arm] = Challenger(variance=one.variance)
                log.debug("drafts_worsened", sources=sorted(self.used), fall=round(fall, 3), beside=sorted(arm))

    @property
    def arm(self) -> Arm:
        """The arm that is to be measured now."""
        return self.used if self.trial is None else self.trial

    def resume(self, round_trip_s: float) -> None:
        """Come back from another load, which cut a trial short if one was under way. It goes on if the last visit
        brought a fair part of its window. It may have begun late in that visit, so it has a second chance, from the
        beginning; then it is given up: visits may be too short for any."""
        if self.trial is None:
            return
        part = self.window.part(round_trip_s)
        if part - self.had >= FAIR_PART:
            self.had, self.is_second = part, False
            return
        self.window, self.had = Window(), 0.0
        if self.is_second:
            self.challengers[self.trial].miss(len(self.challengers))
            self.trial, self.of_trial, self.num_looks = None, NOTHING, 0
        self.is_second = not self.is_second

    # --- windows ------------------------------------------------------------------------------------------------------

    def is_over(self, round_trip_s: float) -> bool:
        """Return whether the window has said enough: it is full, or, of a trial, the answer is evident; or, of the arm
        in use, it is evident that another should be tried."""
        if self.window.part(round_trip_s) >= 1:
            return True
        if not self.window.says_something(round_trip_s):
            return False
        if self.trial is not None:
            return self._is_evident(self.trial, self.window, SOON_EVIDENT)
        if self.tried is not None:
            return False
        if self._awaits_unknown():
            return True
        arm, gain = self._guess(self.window)
        return gain > max(EVIDENTLY_GUESSED, EVIDENT * math.sqrt(self.window.variance)) and not self._weight(arm)

    def _awaits_unknown(self) -> bool:
        """Return whether the next trial is the first of a source of which nothing is known: it waits for no full
        window."""
        return any(
            challenger.until_trial <= 1 and not challenger.weight and not challenger.is_put_off
            for source in self._unknown(self.sources - self.used)
            if (challenger := self.challengers.get(self.used | {source})) is not None
        )

    def _is_evident(self, arm: Arm, window: Window, deviations: float = EVIDENT) -> bool:
        """Return whether the window of a trial differs by so much from the one before that none after it is awaited."""
        noise = math.sqrt(self._noise(arm, window))
        return abs(window.log_rate - self.before.log_rate) > deviations * noise

    def _noise(self, arm: Arm, window: Window) -> float:
        """Return the variance of the gain that a trial says: as trials of the arm showed it, or as the steps of both
        windows do, if that is more."""
        of_trials = self.challengers[arm].variance * sum(1 / min(one.size, 1.0) for one in (window, self.before)) / 2
        return max(of_trials, window.variance + self.before.variance)

    def close(self, heard: Arm, round_trip_s: float = 0.0) -> None:
        """Take a window in, and decide what is measured next; `heard`: sources that have ever sent anything."""
        window, self.window = self.window, Window()
        self.yields |= window.yields(self.arm)
        if self.trial is not None:
            self._end_trial(self.trial, window, is_short=window.part(round_trip_s) < 1)
            return
        self.debt_s = max(self.debt_s - TRIALS_COST * window.seconds, 0.0)
        if self.tried is not None:
            arm, tried = self.tried
            gain = tried.log_rate - (self.before.log_rate + window.log_rate) / 2
            self._compare(arm, gain, tried.variance + (self.before.variance + window.variance) / 4)
            self.tried = None
            if arm == self.used:  # from now on, so its own window says what is usual
                window = tried
        self.before, self.step = window, window.step
        self.num_sessions = window.verdicts / window.steps or self.num_sessions
        self._forget_trials(self.traffic.fall(window))
        self._choose_trial(silent=self.used - heard)

    @property
    def looked_at(self) -> Arm:
        """The sources of a trial of which nothing is known: where there are several sessions, they draft for one alone
        at first."""
        if self.trial is None or self.num_sessions < MANY:
            return frozenset()
        return self._unknown(self.trial - self.used)

    def _unknown(self, sources: Arm) -> Arm:
        return frozenset(source for source in sources if self.bounds.best(source, self.num_sessions) is None)

    def take_trial_step(self, num_tokens: int, seconds: float, whole_s: float, yields: Yields) -> bool:
        """Take in a step of a trial, its warm-up included; return whether the trial is over, since even at its best its
        arm loses. `seconds`: of the whole, without a stall; what the sources that are tried took by themselves is none:
        at first a draft model computes all texts."""
        if self.trial is None:
            return False
        added = self.trial - self.used
        own_s = sum(yields[source].seconds for source in added & yields.keys())
        self.of_trial = self.of_trial.plus(Yield(max(seconds, min(own_s, whole_s)), num_tokens))
        self.num_looks += bool(self.looked_at)
        is_unknown, gain = bool(self._unknown(added)), self._promise(self.trial)
        if gain > -HOPELESS if not is_unknown else self.num_looks < MOST_LOOKS:
            return False
        arm, self.window = self.trial, Window()
        self._leave_trial(arm)
        if is_unknown:
            self.challengers[arm].miss(len(self.challengers))
        else:
            self._compare(arm, gain)
        return True

    def _leave_trial(self, arm: Arm) -> None:
        """Count what a trial has lost."""
        self.trial, self.had, self.is_second = None, 0.0, False
        of_trial, self.of_trial, self.num_looks = self.of_trial, NOTHING, 0
        lost_s = max(of_trial.seconds - of_trial.tokens / math.exp(self.before.log_rate), 0.0)
        self.challengers[arm].lost = lost_s / max(self.before.seconds, WINDOW_S)
        self.debt_s += lost_s

    def _end_trial(self, arm: Arm, window: Window, *, is_short: bool) -> None:
        self._leave_trial(arm)
        gain = window.log_rate - self.before.log_rate
        if not arm - self.used <= window.senders:
            self.challengers[arm].miss(len(self.challengers))
        elif self._is_evident(arm, window) and (not self.is_fallen if gain > 0 else is_short):
            self._compare(arm, gain, window.variance + self.before.variance)
        else:
            self.tried = arm, window

    def _compare(self, arm: Arm, gain: float, noise: float = 0.0) -> None:
        """Learn from a trial, whose arm was better by this, in logarithms, than the one in use; change arms if that
        pays. `noise`: the variance of that, as its steps show it."""
        self.num_trials += 1
        self.is_fallen = False
        challenger = self.challengers[arm]
        challenger.learn(gain, noise)
        log.debug(
            "sources_tried",
            sources=sorted(arm),
            beside=sorted(self.used),
            gain=round(gain, 3),
            mean_gain=round(challenger.gain, 3),
        )
        if challenger.gain > MARGIN + (0.0 if arm < self.used else challenger.error):
            self._use(arm)
        else:
            challenger.wait(len(self.challengers))

    def _use(self, arm: Arm) -> None:
        """Change arms; what is known of the others is known beside the new one."""
        winner = self.challengers.pop(arm)
        for other in self.challengers.values():
            other.gain -= winner.gain
        former = replace(winner, gain=-winner.gain, patience=FIRST_PATIENCE, until_trial=FIRST_PATIENCE)
        self.challengers[self.used], self.used, self.traffic = former, arm, Traffic()
        if winner.gain > EVIDENTLY_GUESSED and winner.weight > 1:
            former.wait(len(self.challengers))
        elif winner.gain > EVIDENTLY_GUESSED:
            former.doubt()
        for near, challenger in self.challengers.items():
            if len(near ^ arm) == 1 and not challenger.weight:
                challenger.patience = challenger.until_trial = FIRST_PATIENCE
                challenger.is_put_off = False
            elif not challenger.weight:
                challenger.patience = challenger.until_trial = FAR_PATIENCE

    # --- which is tried -----------------------------------------------------------------------------------------------

    def _choose_trial(self, silent: Arm) -> None:
        """Begin the trial of the arm that is guessed to be better and was not tried, or the one that is most overdue,
        and of several that which promises most. Arms that lack a source which was never heard wait."""
        self._meet_challengers(silent)
        open_to_trial = {arm: one for arm, one in self.challengers.items() if not silent - arm}
        for arm, challenger in open_to_trial.items():
            challenger.until_trial -= 1
            if challenger.until_trial == 0 and not challenger.is_put_off:
                self._put_off(arm, challenger)
        self.asleep = self.sources - self.used - silent - self._tried_soon()
        guessed, gain = self._guess(self.before, silent)
        if gain > GUESSED and not self._weight(guessed):
            self.challengers.setdefault(guessed, Challenger())
            self.trial = guessed
            return
        due = {
            arm: one.until_trial
            for arm, one in open_to_trial.items()
            if one.until_trial <= 0 and not (one.is_put_off and self.debt_s)
        }
        self.trial = min(due, key=lambda arm: (due[arm], -self._promise(arm)), default=None)

    def _tried_soon(self) -> Arm:
        """Return the sources of all arms whose trials are near, but for those that wait until earlier trials are paid
        for."""
        in_debt = self.debt_s > AWAKE * TRIALS_COST * WINDOW_S
        near = [
            arm
            for arm, one in self.challengers.items()
            if one.until_trial <= AWAKE and not (one.is_put_off and in_debt)
        ]
        return frozenset[str]().union(*near)

    def _weight(self, arm: Arm) -> float:
        return self.challengers[arm].weight if arm in self.challengers else 0.0

    def _guess(self, window: Window, silent: Arm = frozenset()) -> tuple[Arm, float]:
        """Return the arm without the sources that bring less than they take, and its gain, as a logarithm, given a
        window of the arm in use."""
        dropped, gain = leanest(window.step, window.yields(self.used - silent))
        return self.used - dropped, gain

    def _promise(self, arm: Arm) -> float:
        """Return the gain that an arm promises at best, as a logarithm, by what each source was seen to take and
        bring."""
        if not self.step.tokens:
            return 0.0
        added, dropped = arm - self.used, self.used - arm
        yields = {source: best for source in added if (best := self.bounds.best(source, self.num_sessions)) is not None}
        yields |= {source: self.yields[source] for source in dropped & self.yields.keys()}
        return promise(self.step, yields, added, dropped)

    def _put_off(self, arm: Arm, challenger: Challenger) -> None:
        """Try an arm later, if it promises a loss at best; or, where it differs in several sources and was not tried,
        what is known of each of them says that it loses. That says nothing of an arm of one source: two that find the
        same tokens lose together, and each may win alone."""
        differs = arm ^ self.used
        gain = promised = self._promise(arm)
        if len(differs) > 1 and len(arm) != 1 and not challenger.weight:
            near = [self.challengers.get(self.used ^ {source}) for source in differs]
            gain = min(gain, sum(one.gain for one in near if one is not None))
        most = MOST_OF_LOSERS if promised < -HOPELESS else MOST_FAR_PATIENCE
        windows = min(affordable(-gain, 0.0, len(self.challengers)), most)
        if windows > challenger.patience or (windows and challenger.weight):
            challenger.until_trial = challenger.patience = windows
            challenger.is_put_off = True
