"""A random service as a value: the machine, what drafts, who asks for texts, and the phases in which that changes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from specq.protocol import COLOCATED, EAGLE, REMOTE, SUFFIX
from specq.simulate.scenarios import HardwareCurve

TOGETHER, ONE_BY_ONE, POISSON, BURSTS = "together", "one by one", "poisson", "bursts"
WAVES = (TOGETHER, BURSTS)
STALL_STEPS = 50
STEP_ROWS = 512  # of a step with prompts


@dataclass(frozen=True, slots=True)
class Machine:
    """The target model's device, and the host beside it; milliseconds.

    step_ms      ((rows, milliseconds), ...): what a step takes
    padding      a step has as many rows as a multiple of this
    profile      what the verifier is told at the start: so many times `step_ms`
    overlaps     whether a step can be launched before the last one has ended
    host_ms, session_ms     work of the host for each step, and for each session of it
    mixed_ms     what a step with prompts takes beyond its rows
    jitter       standard deviation of the logarithm of a step's time
    """

    step_ms: tuple[tuple[float, float], ...]
    padding: int
    profile: float
    overlaps: bool
    host_ms: float
    session_ms: float
    mixed_ms: float
    jitter: float

    def step_s(self, num_rows: int) -> float:
        """Return the seconds of a step without jitter."""
        return HardwareCurve(self.step_ms)(-(-num_rows // self.padding) * self.padding)

    def plain_s(self, num_sessions: int) -> float:
        """Return about how long a step of plain decoding takes."""
        device_s = self.step_s(num_sessions)
        host_s = (self.host_ms + self.session_ms * num_sessions) / 1000
        return max(device_s, host_s) if self.overlaps else device_s + host_s


@dataclass(frozen=True, slots=True)
class Source:
    """Something that drafts; milliseconds.

    name        SUFFIX: a lookup on the host; COLOCATED: a draft model on the device; EAGLE: a head on the device;
                REMOTE: drafters behind a network
    depth       most tokens of a chain
    round_ms    of a draft for one session: for COLOCATED each token of it, for the others the whole chain
    session_ms  of each further session, likewise
    context_ms  of each token of a context that a draft model has not computed
    decay       chance of a token to be right, relative to the one before it in the chain
    slows       by which part a step takes longer while this drafts
    round_trip_ms, num_workers   of REMOTE
    """

    name: str
    depth: int
    round_ms: float
    session_ms: float
    context_ms: float
    decay: float
    slows: float
    round_trip_ms: float
    num_workers: int

    def draft_s(self, num_sessions: int, depth: int) -> float:
        """Return the seconds of a round for a number of sessions."""
        seconds = (self.round_ms + self.session_ms * (num_sessions - 1)) / 1000
        return seconds * depth if self.name == COLOCATED else seconds


@dataclass(frozen=True, slots=True)
class Phase:
    """A time without changes. chances: for each source, that its first token is right."""

    seconds: float
    num_sessions: int
    chances: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Service:
    """All that a verifier meets.

    arrivals     TOGETHER: all jobs begin when the last of the wave before has ended; BURSTS: so does a random part of
                 them, after a gap; ONE_BY_ONE: each client sends its next job when one has ended; POISSON: after a
                 random gap
    gap_s        mean gap of BURSTS and POISSON; between the first jobs of ONE_BY_ONE
    text_len     mean tokens of a text
    spread       by how much texts differ in the chances of their drafts, either way
    shared       part of the tokens for which all sources are right or wrong together
    num_stalls   steps of each phase that take STALL_STEPS times as long
    is_honest    whether drafters claim the chances that they have, or 0.7 always
    """

    seed: int
    kind: str
    machine: Machine
    sources: tuple[Source, ...]
    arrivals: str
    gap_s: float
    prompt_len: int
    text_len: int
    spread: float
    shared: float
    is_honest: bool
    num_stalls: int
    phases: tuple[Phase, ...]

    @property
    def starts(self) -> tuple[float, ...]:
        """When each phase begins, and the last one ends, in seconds."""
        found = [0.0]
        for phase in self.phases:
            found.append(found[-1] + phase.seconds)
        return tuple(found)

    def phase_at(self, now: float) -> int:
        """Return the number of the phase at this time; of the last one afterwards."""
        return min(sum(start <= now for start in self.starts[1:]), len(self.phases) - 1)

    def first_like(self, number: int) -> int:
        """Return the number of the first phase that is like this one: both have the same texts."""
        return self.phases.index(self.phases[number])

    def alone(self, number: int) -> Service:
        """Return the same service with one of its phases alone."""
        return replace(self, phases=(self.phases[number],))

    @property
    def stall_times(self) -> list[float]:
        """When the next step takes STALL_STEPS times as long; likewise in each phase."""
        random = Random(self.seed)
        parts = [(i + random.uniform(0.4, 0.6)) / self.num_stalls for i in range(self.num_stalls)]
        return [
            begin + part * phase.seconds
            for begin, phase in zip(self.starts, self.phases, strict=False)
            for part in parts
        ]


ORDER = (COLOCATED, EAGLE, SUFFIX, REMOTE)  # as a verifier has them
