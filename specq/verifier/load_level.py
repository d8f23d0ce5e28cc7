"""The arms at one load: what is known of each set of sources beside the one in use, and which is measured next.

Rules: what counts of a trial is the ratio to the windows of the arm in use before and after it. An arm that differs in several sources is
tried later, and not at all for a while if what is known of each of them says that it loses. (`specq.verifier.arms` has the whole.)

No clock: seconds are given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import combinations

import structlog

log = structlog.get_logger(__name__)

Arm = frozenset[str]

# A window is the longest of: seconds; round trips, where draft workers are heard; LEAST_STEPS steps; and so many that they
# have WINDOW_VERDICTS verdicts, of all sessions, or WINDOW_STEPS.
WINDOW_S, WINDOW_ROUND_TRIPS, WINDOW_STEPS, WINDOW_VERDICTS, LEAST_STEPS = 0.25, 5, 20, 40, 8
# Windows before an arm's next trial: at first, later, at most.
FIRST_PATIENCE, LEAST_PATIENCE, MOST_PATIENCE = 1, 4, 256
FAR_PATIENCE, MOST_FAR_PATIENCE = 12, 64  # at first, of an arm that differs in several sources
FAIR_PART = 0.1  # of a window: what a visit to a load must bring for a trial to go on at the next
# Of the tokens: what all trials together may cost while little is known, and where the answer has stood for STANDING trials.
TRIALS_COST, STANDING_COST, STANDING = 0.01, 0.005, 4.0
# Standard errors that an arm has lost by; growth of the patience, from trial to trial.
GROWTH = ((3.0, 32), (1.0, 8), (0.0, 2))
NOISE, NOISE_WEIGHT = 0.12, 2.0  # of a trial, in logarithms, as it is believed before trials show it; in trials
EVIDENT = 2.0  # standard deviations; a trial that is so much better than the window before awaits none after it
MARGIN = 0.01  # of the logarithm of the ratio; within it the arm in use stays
MEMORY = 12.0  # trials after which one has faded to 1/e


@dataclass(slots=True)
class Window:
    """What was measured of one arm without a break for another."""

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    verdicts: int = 0
    senders: Arm = frozenset()  # sources that sent something

    def add(self, tokens: int, seconds: float, verdicts: int, senders: Arm = frozenset(), steps: int = 1) -> None:
        self.tokens += tokens
        self.seconds += seconds
        self.steps += steps
        self.verdicts += verdicts
        self.senders |= senders

    def part(self, round_trip_s: float) -> float:
        """Return how long it is, as a part of what it must be."""
        enough = max(self.steps / WINDOW_STEPS, min(self.steps / LEAST_STEPS, self.verdicts / WINDOW_VERDICTS))
        return min(enough, self.seconds / max(WINDOW_S, WINDOW_ROUND_TRIPS * round_trip_s))


def affordable(gain: float, weight: float, num_challengers: int) -> int:
    """Return how many windows must lie between trials of an arm that is better by this, as so many trials say, so that they cost no more
    than its share."""
    cost = TRIALS_COST + (STANDING_COST - TRIALS_COST) * min(weight / STANDING, 1.0)
    return min(math.ceil(max(-gain, 0.0) * num_challengers / cost), MOST_PATIENCE)


@dataclass(slots=True)
class Challenger:
    """An arm that is not in use.

    gain, variance, weight  the mean of ln(its rate / that of the arm in use) over trials, its variance between them, and how many
                trials they stand for; older ones fade
    """

    patience: int = FIRST_PATIENCE
    until_trial: int = FIRST_PATIENCE
    gain: float = 0.0
    variance: float = NOISE**2
    weight: float = 0.0

    def learn(self, gain: float) -> None:
        """Take a trial in."""
        self.weight = 1 + self.weight * math.exp(-1 / MEMORY)
        off = gain - self.gain
        self.gain += off / self.weight
        self.variance += (off * (gain - self.gain) - self.variance) / (self.weight + NOISE_WEIGHT)

    def wait(self, num_challengers: int) -> None:
        """Set when it is tried next: so late that its trials cost its share, but not at once."""
        errors = -self.gain / math.sqrt(self.variance / max(self.weight, 1.0))
        growth = next((growth for least, growth in GROWTH if errors >= least), GROWTH[-1][1])
        self.patience = min(
            growth * self.patience, max(affordable(self.gain, self.weight, num_challengers), LEAST_PATIENCE)
        )
        self.until_trial = self.patience

    def miss(self) -> None:
        """Set when it is tried next, where a source of it sent nothing or the load changed."""
        self.patience = self.until_trial = min(2 * self.patience, MOST_PATIENCE)

    def like(self) -> Challenger:
        """Return what is believed of the arm at a load that has not been measured: as if it had been tried once."""
        patience = min(self.patience, LEAST_PATIENCE)
        return replace(self, patience=patience, until_trial=patience, weight=min(self.weight, 1.0))


@dataclass(slots=True)
class LoadLevel:
    """The arms at one load.

    used    the arm in use; trial: the one that is being tried instead, if any
    had     the part of the trial's window that was there when the load came back; is_second: whether a visit brought too little before
    num_trials  at this load itself
    before  ln of the rate before the trial; tried: the arm and rate of a trial which awaits the window after it
    """

    used: Arm
    challengers: dict[Arm, Challenger]
    num_trials: int = 0
    trial: Arm | None = None
    had: float = 0.0
    is_second: bool = False
    window: Window = field(default_factory=Window)
    before: float = 0.0
    tried: tuple[Arm, float] | None = None

    @classmethod
    def of(cls, sources: Arm) -> LoadLevel:
        """Return the state before anything is known: all sources are used."""
        subsets = (frozenset(some) for count in range(len(sources)) for some in combinations(sorted(sources), count))
        patience = {arm: FIRST_PATIENCE if len(sources - arm) == 1 else FAR_PATIENCE for arm in subsets}
        return cls(sources, {arm: Challenger(windows, windows) for arm, windows in patience.items()})

    def like(self) -> LoadLevel:
        """Return the state at a load that has not been measured, where this is the nearest that was."""
        return LoadLevel(self.used, {arm: one.like() for arm, one in self.challengers.items()})

    @property
    def arm(self) -> Arm:
        """The arm that is to be measured now."""
        return self.used if self.trial is None else self.trial

    def resume(self, round_trip_s: float) -> None:
        """Come back from another load, which cut a trial short if one was under way. It goes on if the last visit brought a fair part of
        its window. It may have begun late in that visit, so it has a second chance, from the beginning; then it is given up: visits
        may be too short for any."""
        if self.trial is None:
            return
        part = self.window.part(round_trip_s)
        if part - self.had >= FAIR_PART:
            self.had, self.is_second = part, False
            return
        self.window, self.had = Window(), 0.0
        if self.is_second:
            self.challengers[self.trial].miss()
            self.trial = None
        self.is_second = not self.is_second

    def close(self, heard: Arm) -> None:
        """Take a full window in, and decide what is measured next; `heard`: sources that have ever sent anything."""
        window, self.window = self.window, Window()
        rate = math.log(max(window.tokens, 1) / window.seconds)
        if self.trial is not None:
            self._end_trial(self.trial, rate, window.senders)
            return
        if self.tried is not None:
            self._compare(self.tried[0], self.tried[1] - (self.before + rate) / 2)
            self.tried = None
        self.before = rate
        self._choose_trial(silent=self.used - heard)

    def _end_trial(self, arm: Arm, rate: float, senders: Arm) -> None:
        self.trial, self.had, self.is_second = None, 0.0, False
        challenger = self.challengers[arm]
        if not arm - self.used <= senders:
            challenger.miss()
        elif rate - self.before > EVIDENT * math.sqrt(challenger.variance):
            self._compare(arm, rate - self.before)
        else:
            self.tried = arm, rate

    def _choose_trial(self, silent: Arm) -> None:
        """Begin the trial that is most overdue, if one is; arms that lack a source which was never heard wait."""
        open_to_trial = {arm: one for arm, one in self.challengers.items() if not silent - arm}
        for arm, challenger in open_to_trial.items():
            challenger.until_trial -= 1
            if challenger.until_trial == 0 and challenger.patience == FAR_PATIENCE:
                self._postpone(arm, challenger)
        due = {arm: one.until_trial for arm, one in open_to_trial.items() if one.until_trial <= 0}
        self.trial = min(due, key=lambda arm: due[arm], default=None)

    def _postpone(self, arm: Arm, challenger: Challenger) -> None:
        """Try an arm that differs in several sources later, if what is known of each of them says that it loses."""
        each = [self.challengers[self.used ^ {source}].gain for source in arm ^ self.used]
        patience = min(affordable(sum(each), 0.0, len(self.challengers)), MOST_FAR_PATIENCE)
        challenger.until_trial = challenger.patience = max(patience, challenger.patience + 1)
        if patience <= FAR_PATIENCE:
            challenger.until_trial = 0

    def _compare(self, arm: Arm, gain: float) -> None:
        """Learn from a trial, whose arm was better by this, in logarithms, than the one in use; change arms if that pays."""
        self.num_trials += 1
        challenger = self.challengers[arm]
        challenger.learn(gain)
        log.debug(
            "sources_tried",
            sources=sorted(arm),
            beside=sorted(self.used),
            gain=round(gain, 3),
            mean_gain=round(challenger.gain, 3),
        )
        if challenger.gain > MARGIN:
            self._use(arm)
        else:
            challenger.wait(len(self.challengers))

    def _use(self, arm: Arm) -> None:
        """Change arms; what is known of the others is known beside the new one."""
        winner = self.challengers.pop(arm)
        for other in self.challengers.values():
            other.gain -= winner.gain
        self.challengers[self.used] = replace(
            winner, gain=-winner.gain, patience=FIRST_PATIENCE, until_trial=FIRST_PATIENCE
        )
        self.used = arm
        for near, challenger in self.challengers.items():
            if len(near ^ arm) == 1 and not challenger.weight:
                challenger.patience = challenger.until_trial = FIRST_PATIENCE
