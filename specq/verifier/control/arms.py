"""Which sources of drafts a verifier uses: by what they were measured to bring, in committed tokens a second.

What a draft costs cannot be summed up from prices: a drafter on the next core takes cache and bandwidth from the
verifier, and what the verifier looks up itself may be the same tokens. So each set of sources is an arm, and for each
load level (1 session, 2, 3 to 5, 6 to 11, ...) arms are measured in windows of service. An arm that is not in use is
tried for a window now and then, between two windows of the one in use, and what counts is the ratio of each such
triple: both sides of it have met the same machine and nearly the same texts. The more an arm loses, the more rarely it
is tried: all trials together may cost a hundredth of the tokens. What each source takes and brings by itself says which
arm is tried first, and a window ends early where its answer is evident: a source that takes several plain steps a round
is dropped within some rounds.

A source that has never sent anything is not compared, so that whoever joins is used; nor is a trial of one that sends
nothing.

No clock: seconds are given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from specq.protocol import REMOTE
from specq.verifier.control.load_level import LoadLevel
from specq.verifier.control.source_yields import Arm, SourceBounds, Yields
from specq.verifier.control.window import Window

# Left out after a change of arms: round trips, where draft workers are heard; and steps, fewer once they took so many
# seconds.
WARM_UP_ROUND_TRIPS, WARM_UP_STEPS, LEAST_WARM_UP_STEPS, WARM_UP_S = 2, 5, 2, 0.1
ROUND_TRIP_FADE, MOST_ROUND_TRIP_S = 0.1, 1.0
# Of the difference between the load and a step's sessions, with each step: they come at once, and end one by one. Where
# jobs follow one another there are few for a while now and then, until their clients have sent the next ones, and a
# draft model would compute all texts for some rounds: it falls only after so many seconds.
MORE_LOAD_FADE, LESS_LOAD_FADE, DIP_S = 0.6, 0.2, 0.05


class Arms:
    """All arms at all loads. Told of each step, it says which sources the next may use: `allowed`; and which of these
    for one session alone, since nothing is known of them yet: `looked_at`. Those that are `asleep` need not follow the
    texts: their next trial is far away."""

    def __init__(self, sources: Iterable[str], *, unpriced: Iterable[str] = (), is_measured: bool = True) -> None:
        """`unpriced`: sources that may take long, nobody knows how long: they are not used before a trial.
        `is_measured`: else all sources are always allowed."""
        self._sources, self._is_measured = frozenset(sources), is_measured
        self._unpriced = frozenset(unpriced) if is_measured else frozenset()
        self._levels: dict[int, LoadLevel] = {}
        self._bounds = SourceBounds()
        self.round_trip_s = self._load = 0.0
        self._fewer_s = 0.0  # since when steps have fewer sessions than the load says
        self._number = -1  # of the level of the last step
        self.allowed: Arm = self._sources - self._unpriced
        self.looked_at: Arm = frozenset()
        self.asleep: Arm = frozenset()
        self._warm_up = Window()  # since the last change of arms
        self._num_added: dict[str, int] = {}
        self._heard: Arm = frozenset()

    def uses(self, source: str) -> bool:
        """Return whether a source is allowed, and has ever sent anything."""
        return source in self.allowed and source in self._heard

    def hear(self, num_sent: Mapping[str, int]) -> None:
        """Take in how many nodes each source has sent in all, also where a step teaches nothing else."""
        self._heard |= {source for source, count in num_sent.items() if count}

    def learn_round_trip(self, seconds: float) -> None:
        """Take in how long after a verdict the first draft came that had seen it. What takes longer than a second is
        not a round trip but a drafter that is late, and does not make windows longer."""
        self.round_trip_s += ROUND_TRIP_FADE * (min(seconds, MOST_ROUND_TRIP_S) - self.round_trip_s)

    def meet(self, num_sessions: int) -> None:
        """Take in how many sessions the next step has, those whose prompts are computed among them: it uses the arm of
        that load."""
        if self._is_measured:
            self._allow(self._level(num_sessions))

    def learn(
        self,
        num_sessions: int,
        num_tokens: int,
        seconds: float,
        num_added: Mapping[str, int],
        yields: Yields = MappingProxyType({}),
        *,
        num_decoding: int | None = None,
        is_crowded: bool = False,
    ) -> None:
        """Take in a step of the load that was met: the sessions that there were, the tokens that were committed, its
        seconds since the step before, and how much each source has added to steps in all, and took and brought in this
        one. `num_decoding`: the sessions that it computed a token of, None: all. Of a step that computes prompts, too
        (`is_crowded`), only what it took beyond them counts; where it computes nothing else, it makes no window longer.
        What is drafted may find no room beside prompts, so that a source which brings nothing there says nothing of
        what it can bring."""
        num_decoding = num_sessions if num_decoding is None else num_decoding
        is_decoding = num_decoding > 0
        senders = frozenset(source for source, count in num_added.items() if count > self._num_added.get(source, 0))
        self._num_added = dict(num_added)
        self._heard |= senders
        if not self._is_measured:
            return
        level = self._levels[self._number]
        whole_s, seconds = seconds, level.steps.cut(self.allowed, seconds, is_decoding=is_decoding)
        self._fewer_s += whole_s
        if is_decoding:
            shown = frozenset(one for one in senders if not is_crowded or (one in yields and yields[one].tokens))
            self._bounds.learn(num_decoding, seconds, (shown & self.allowed) - self.looked_at, yields)
            self._bounds.learn(1, seconds, shown & self.looked_at, yields)
        if (
            _number(num_sessions) != self._number
            or level.take_trial_step(num_tokens, seconds, whole_s, yields)
            or self.looked_at
        ):
            pass
        elif self._is_warm(seconds, self._awaited_s(level)):
            level.window.add(num_tokens, seconds, num_decoding, senders, is_decoding, yields)
            if level.is_over(awaited_s := self._awaited_s(level)):
                level.close(self._heard, awaited_s)
        self._allow(level)

    def _allow(self, level: LoadLevel) -> None:
        if (level.arm, level.looked_at) != (self.allowed, self.looked_at):
            self.allowed, self.looked_at, self._warm_up = level.arm, level.looked_at, Window()
        self.asleep = level.asleep - level.arm

    def metrics(self) -> dict[str, dict[str, Any]]:
        """Return what is known of the arms at each load, by the names of heartbeats (`specq.protocol.stats`):
        of each arm that is used, or was tried, whether it is used, and its gain; and how many trials there were. A load
        is its number of sessions."""
        arms: dict[str, list[float]] = {}
        for number, level in self._levels.items():
            arms[_label(number, level.used)] = [1, 0]
            for arm, one in level.challengers.items():
                if one.weight:
                    arms[_label(number, arm)] = [0, round(one.gain, 4)]
        return {"arms": arms, "arm_trials": {str(2**number): one.num_trials for number, one in self._levels.items()}}

    def _level(self, num_sessions: int) -> LoadLevel:
        """Return the level of the load, which follows the number of sessions with a delay, a longer one where they
        become fewer: it may go up and down from step to step. A level without a trial of its own goes by the nearest
        that had one."""
        if num_sessions >= self._load:
            self._fewer_s, fade = 0.0, MORE_LOAD_FADE if self._load else 1.0
        else:
            fade = LESS_LOAD_FADE if self._fewer_s >= DIP_S else 0.0
        self._load += (num_sessions - self._load) * fade
        number = _number(self._load)
        level = self._levels.setdefault(number, LoadLevel.of(self._sources, self._unpriced, self._bounds))
        if number != self._number and not level.num_trials:
            tried = [known for known, one in self._levels.items() if one.num_trials]
            nearest = min(tried, key=lambda known: abs(known - number), default=number)
            if self._levels[nearest].used != level.used:
                level = self._levels[number] = self._levels[nearest].like()
        if number != self._number:
            self._number = number
            level.resume(self._awaited_s(level))
        return level

    def _awaited_s(self, level: LoadLevel) -> float:
        """Return the round trip of what an arm to be measured waits for: of draft workers, if it has them."""
        return self.round_trip_s if REMOTE in level.arm else 0.0

    def _is_warm(self, seconds: float, awaited_s: float) -> bool:
        warm_up = self._warm_up
        least = WARM_UP_STEPS if warm_up.seconds < WARM_UP_S else LEAST_WARM_UP_STEPS
        if warm_up.steps >= least and warm_up.seconds >= WARM_UP_ROUND_TRIPS * awaited_s:
            return True
        warm_up.add(0, seconds, 0)
        return False


def _number(load: float) -> int:
    return round(math.log2(max(load, 1.0)))


def _label(number: int, arm: Arm) -> str:
    return f"{2**number} {'+'.join(sorted(arm)) or 'none'}"
