"""Whether remote drafters are listened to: by what they were measured to bring, in committed tokens a second.

What a draft costs cannot be summed up from prices: a drafter on the next core takes cache and bandwidth from the verifier, and what
the verifier looks up itself may be the same tokens. So there are two arms, with remote drafts and without (all else is the same), and
for each load level (1 session, 2 to 3, 4 to 7, ...) both are measured in windows of service. The arm that is not in use is tried
for a window now and then, between two windows of the other, and what counts is the ratio of each such triple: both sides of
it have met the same machine and nearly the same texts. Trials are rarer while the answer stands.

No clock: seconds are given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

WINDOW_S, WINDOW_STEPS, WINDOW_ROUND_TRIPS = 0.25, 20, 5  # a window is the longest of these
WARM_UP_STEPS, WARM_UP_ROUND_TRIPS = 5, 2  # left out after a change of arms
FIRST_PATIENCE, MOST_PATIENCE = 1, 64  # windows between trials
MARGIN = 0.01  # of the logarithm of the ratio; within it the arm in use stays
CERTAIN, DOUBTFUL_PATIENCE = (
    2.0,
    4,
)  # standard errors from which on trials become rarer; windows between trials before that
MEMORY = 12.0  # trials after which one has faded to 1/e
ROUND_TRIP_FADE = 0.1


@dataclass(slots=True)
class Window:
    """What was measured of one arm without a break for another."""

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    drafted: int = 0

    def add(self, tokens: int, seconds: float, drafted: int) -> None:
        self.tokens += tokens
        self.seconds += seconds
        self.steps += 1
        self.drafted += drafted

    def is_full(self, round_trip_s: float) -> bool:
        """Return whether the window is as long as it must be."""
        return self.steps >= WINDOW_STEPS and self.seconds >= max(WINDOW_S, WINDOW_ROUND_TRIPS * round_trip_s)


@dataclass(slots=True)
class LoadLevel:
    """The two arms at one load.

    listens     the arm in use: whether remote drafts are wanted; is_trial: the other is being tried
    gain, variance, weight  the mean of ln(rate with drafts / rate without) over trials, its variance between them, and how many
                trials they stand for; older ones fade
    """

    listens: bool = True
    is_trial: bool = False
    gain: float = 0.0
    variance: float = 0.0
    weight: float = 0.0
    patience: int = FIRST_PATIENCE
    until_trial: int = FIRST_PATIENCE
    window: Window = field(default_factory=Window)
    before: float = 0.0  # ln of the rate before the trial
    tried: float | None = None  # that of a trial which awaits the window after it

    @property
    def wants_drafts(self) -> bool:
        """Return whether drafters shall draft now."""
        return self.listens != self.is_trial

    def close(self) -> None:
        """Take a full window in, and decide what is measured next."""
        window, self.window = self.window, Window()
        if self.wants_drafts and not window.drafted:
            self._nobody_drafts()
            return
        rate = math.log(max(window.tokens, 1) / window.seconds)
        if self.is_trial:
            self.is_trial, self.tried = False, rate
            return
        if self.tried is not None:
            self._compare(self.tried - (self.before + rate) / 2)
            self.tried = None
        self.before = rate
        self.until_trial -= 1
        self.is_trial = self.until_trial <= 0

    def _nobody_drafts(self) -> None:
        """There is nothing to compare: no drafter sends."""
        self.is_trial, self.tried = False, None
        self.until_trial = self.patience = FIRST_PATIENCE if self.listens else min(2 * self.patience, MOST_PATIENCE)

    def _compare(self, advantage: float) -> None:
        """Learn from a trial, whose arm was better by this, in logarithms, than the one in use; change arms if that pays."""
        self._learn(-advantage if self.listens else advantage)
        is_better = self.gain > (-MARGIN if self.listens else MARGIN)
        if is_better != self.listens:
            self.listens, self.patience = is_better, FIRST_PATIENCE
        elif abs(self.gain) > CERTAIN * math.sqrt(self.variance / self.weight):
            self.patience = min(2 * self.patience, MOST_PATIENCE)
        else:
            self.patience = min(2 * self.patience, DOUBTFUL_PATIENCE)
        self.until_trial = self.patience

    def _learn(self, gain: float) -> None:
        self.weight = 1 + self.weight * math.exp(-1 / MEMORY)
        off = gain - self.gain
        self.gain += off / self.weight
        self.variance += (off * (gain - self.gain) - self.variance) / self.weight


class Arms:
    """Both arms at all loads. Told of each step, it says which arm the next is in."""

    def __init__(self) -> None:
        self._levels: dict[int, LoadLevel] = {}
        self._round_trip_s = 0.0
        self._wanted = True
        self._warm_up = Window()  # since the last change of arms
        self._num_drafted = 0

    @property
    def wants_drafts(self) -> bool:
        """Return whether remote drafters shall draft."""
        return self._wanted

    def learn_round_trip(self, seconds: float) -> None:
        """Take in how long after a verdict the first draft came that had seen it."""
        self._round_trip_s += ROUND_TRIP_FADE * (seconds - self._round_trip_s)

    def learn(self, num_sessions: int, num_tokens: int, seconds: float, num_drafted: int) -> None:
        """Take in a step: its sessions, the tokens that they committed, its seconds since the step before, and the nodes that remote
        drafters have sent in all."""
        fresh, self._num_drafted = num_drafted - self._num_drafted, num_drafted
        level = self._levels.setdefault(num_sessions.bit_length(), LoadLevel())
        if level.wants_drafts != self._wanted:
            self._wanted, self._warm_up = level.wants_drafts, Window()
            return
        if not self._is_warm(seconds):
            return
        level.window.add(num_tokens, seconds, fresh)
        if level.window.is_full(self._round_trip_s):
            level.close()
            if level.wants_drafts != self._wanted:
                self._wanted, self._warm_up = level.wants_drafts, Window()

    def _is_warm(self, seconds: float) -> bool:
        warm_up = self._warm_up
        if warm_up.steps >= WARM_UP_STEPS and warm_up.seconds >= WARM_UP_ROUND_TRIPS * self._round_trip_s:
            return True
        warm_up.add(0, seconds, 0)
        return False
