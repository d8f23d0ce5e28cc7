"""Which sources of drafts a verifier uses: by what they were measured to bring, in committed tokens a second.

What a draft costs cannot be summed up from prices: a drafter on the next core takes cache and bandwidth from the verifier, and what
the verifier looks up itself may be the same tokens. So each set of sources is an arm, and for each load level (1 session, 2, 3 to
5, 6 to 11, ...) arms are measured in windows of service. An arm that is not in use is tried for a window now and then, between
two windows of the one in use, and what counts is the ratio of each such triple: both sides of it have met the same machine and
nearly the same texts. The more an arm loses, the more rarely it is tried: all trials together may cost a hundredth of the tokens.

A source that has never sent anything is not compared, so that whoever joins is used; nor is a trial of one that sends nothing.

No clock: seconds are given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import structlog

log = structlog.get_logger(__name__)

# Draft workers, prompt lookup, the verifier's own draft model.
REMOTE, LOOKUP, COLOCATED = "remote", "lookup", "colocated"
Arm = frozenset[str]

WINDOW_S, WINDOW_STEPS, WINDOW_ROUND_TRIPS = 0.25, 20, 5  # a window is the longest of these
WARM_UP_STEPS, WARM_UP_ROUND_TRIPS = 5, 2  # left out after a change of arms
# Windows before an arm's next trial: at first, later, at most.
FIRST_PATIENCE, LEAST_PATIENCE, MOST_PATIENCE = 1, 4, 256
FAR_PATIENCE, MOST_FAR_PATIENCE = 12, 64  # at first, of an arm that differs in several sources
TRIALS_COST = 0.01  # of the tokens: what all trials together may cost
# Standard errors that an arm has lost by; growth of the patience, from trial to trial.
GROWTH = ((4.0, 32), (2.0, 4), (0.0, 2))
NOISE, NOISE_WEIGHT = 0.12, 2.0  # of a trial, in logarithms, as it is believed before trials show it; in trials
MARGIN = 0.01  # of the logarithm of the ratio; within it the arm in use stays
MEMORY = 12.0  # trials after which one has faded to 1/e
ROUND_TRIP_FADE, MOST_ROUND_TRIP_S, LOAD_FADE = 0.1, 1.0, 0.2


@dataclass(slots=True)
class Window:
    """What was measured of one arm without a break for another."""

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    senders: Arm = frozenset()  # sources that sent something

    def add(self, tokens: int, seconds: float, senders: Arm = frozenset()) -> None:
        self.tokens += tokens
        self.seconds += seconds
        self.steps += 1
        self.senders |= senders

    def is_full(self, round_trip_s: float) -> bool:
        """Return whether the window is as long as it must be."""
        return self.steps >= WINDOW_STEPS and self.seconds >= max(WINDOW_S, WINDOW_ROUND_TRIPS * round_trip_s)


def affordable(gain: float, num_challengers: int) -> int:
    """Return how many windows must lie between trials of an arm that is better by this, so that they cost no more than its share."""
    return min(math.ceil(max(-gain, 0.0) * num_challengers / TRIALS_COST), MOST_PATIENCE)


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
        self.patience = min(growth * self.patience, max(affordable(self.gain, num_challengers), LEAST_PATIENCE))
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

    used    the arm in use; trial: the one that is being tried instead, if any; is_second: whether that was cut short before
    num_trials  at this load itself
    before  ln of the rate before the trial; tried: the arm and rate of a trial which awaits the window after it
    """

    used: Arm
    challengers: dict[Arm, Challenger]
    num_trials: int = 0
    trial: Arm | None = None
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

    def resume(self) -> None:
        """Come back from another load, which cut a trial short if one was under way. It begins again, since a visit that is too short
        for what was left may be long enough for a whole one; a second time it is given up: visits may be too short for any."""
        if self.trial is None:
            return
        self.window = Window()
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
        self.trial, self.is_second = None, False
        if arm - self.used <= senders:
            self.tried = arm, rate
        else:
            self.challengers[arm].miss()

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
        patience = min(affordable(sum(each), len(self.challengers)), MOST_FAR_PATIENCE)
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


class Arms:
    """All arms at all loads. Told of each step, it says which sources the next may use."""

    def __init__(self, sources: Iterable[str], *, is_measured: bool = True) -> None:
        """`is_measured`: else all sources are always allowed."""
        self._sources, self._is_measured = frozenset(sources), is_measured
        self._levels: dict[int, LoadLevel] = {}
        self.round_trip_s = self._load = 0.0
        self._number = -1  # of the level of the last step
        self.allowed: Arm = self._sources
        self._warm_up = Window()  # since the last change of arms
        self._num_sent: dict[str, int] = {}
        self._heard: Arm = frozenset()

    def uses(self, source: str) -> bool:
        """Return whether a source is allowed, and has ever sent anything."""
        return source in self.allowed and source in self._heard

    def learn_round_trip(self, seconds: float) -> None:
        """Take in how long after a verdict the first draft came that had seen it. What takes longer than a second is not a round trip
        but a drafter that is late, and does not make windows longer."""
        self.round_trip_s += ROUND_TRIP_FADE * (min(seconds, MOST_ROUND_TRIP_S) - self.round_trip_s)

    def learn(self, num_sessions: int, num_tokens: int, seconds: float, num_sent: Mapping[str, int]) -> None:
        """Take in a step: its sessions, the tokens that they committed, its seconds since the step before, and how many nodes each
        source has sent in all."""
        senders = frozenset(source for source, count in num_sent.items() if count > self._num_sent.get(source, 0))
        self._num_sent = dict(num_sent)
        self._heard |= senders
        if not self._is_measured:
            return
        level = self._level(num_sessions)
        if level.arm == self.allowed and self._is_warm(seconds):
            level.window.add(num_tokens, seconds, senders)
            if level.window.is_full(self.round_trip_s):
                level.close(self._heard)
        if level.arm != self.allowed:
            self.allowed, self._warm_up = level.arm, Window()

    def metrics(self) -> dict[str, dict[str, Any]]:
        """Return what is known of the arms at each load, by the names of heartbeats (`specq.protocol.worker_metrics`): of each arm that is
        used, or was tried, whether it is used, and its gain; and how many trials there were. A load is its number of sessions."""
        arms: dict[str, list[float]] = {}
        for number, level in self._levels.items():
            arms[_label(number, level.used)] = [1, 0]
            for arm, one in level.challengers.items():
                if one.weight:
                    arms[_label(number, arm)] = [0, round(one.gain, 4)]
        return {"arms": arms, "arm_trials": {str(2**number): one.num_trials for number, one in self._levels.items()}}

    def _level(self, num_sessions: int) -> LoadLevel:
        """Return the level of the load, which follows the number of sessions with a delay: it may go up and down from step to step.

        A level without a trial of its own goes by the nearest that had one.
        """
        self._load += (num_sessions - self._load) * (LOAD_FADE if self._load else 1.0)
        number = round(math.log2(max(self._load, 1.0)))
        level = self._levels.setdefault(number, LoadLevel.of(self._sources))
        if number != self._number and not level.num_trials:
            tried = [known for known, one in self._levels.items() if one.num_trials]
            nearest = min(tried, key=lambda known: abs(known - number), default=number)
            if self._levels[nearest].used != level.used:
                level = self._levels[number] = self._levels[nearest].like()
        if number != self._number:
            self._number = number
            level.resume()
        return level

    def _is_warm(self, seconds: float) -> bool:
        warm_up = self._warm_up
        if warm_up.steps >= WARM_UP_STEPS and warm_up.seconds >= WARM_UP_ROUND_TRIPS * self.round_trip_s:
            return True
        warm_up.add(0, seconds)
        return False


def _label(number: int, arm: Arm) -> str:
    return f"{2**number} {'+'.join(sorted(arm)) or 'none'}"
