"""A target model that only takes time, its text, and what a draft model guesses of it.

The text, and which of a drafter's choices is right, are keyed hashes, so no data is stored.

The target's token is a hash of (session, position, previous token). A drafter's first choice is this token with a
probability that may vary by position. If it is wrong, each further choice is right with a given probability, given that
those before are not. The drafter knows these probabilities and claims them, unless it is given other claims.

The target is a stub that implements `specq.engines.Engine`. `specq.simulate.stub_drafter` has the draft model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from specq.protocol import (
    NO_TAP,
    EngineError,
    Float32Array,
    Int32Array,
    Judgement,
    ModelInfo,
    SessionStep,
    StepOutput,
    Tap,
)
from specq.simulate.scenarios import HardwareCurve
from specq.simulate.settings import EngineSettings

Texts = Sequence[tuple[Sequence[int], Sequence[int]]]
Choices = Sequence[Sequence[float]]  # (claim, rank) of each position

_MASK = 2**64 - 1
_SESSION, _POSITION, _TOKEN = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0x8CB92BA72F3D8DD7  # odd, without a pattern
_DRAFT = 0x2545F4914F6CDD1D
_LEAST_CHANCE = 1e-6

VOCAB_SIZE = 32_000  # minimum


def mix(value: int) -> int:
    """Return 64 well mixed bits (the finalizer of SplitMix64, Steele et al. 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class StubText:
    """The target's text of every session; equal for equal seeds."""

    def __init__(self, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> None:
        self.seed, self.vocab_size = seed, vocab_size

    def token(self, session_id: int, position: int, previous: int) -> int:
        """Return the target's token at a position; never 0, which ends texts."""
        key = self.seed + session_id * _SESSION + position * _POSITION + previous * _TOKEN
        return 1 + mix(key & _MASK) % (self.vocab_size - 1)

    def prompt(self, session_id: int, count: int) -> Int32Array:
        """Return a session's own prompt i32[count]."""
        tokens = [self.token(session_id, position, -1) for position in range(count)]
        return np.array(tokens, np.int32)

    def place(self, session_id: int, position: int) -> int:
        """Return the index of a session's position in a list of probabilities by position; the list repeats."""
        return position + mix(session_id)

    def follows(self, session_id: int, prompt: Sequence[int], tokens: Sequence[int]) -> bool:
        """Return whether the tokens are the target's text after the prompt."""
        previous = prompt[-1]
        for position, token in enumerate(tokens, len(prompt)):
            if token != self.token(session_id, position, previous):
                return False
            previous = token
        return True


class RecordedText(StubText):
    """Texts of a real target.

    The sessions get them in turns, so that repetitions in them can be looked up. Probabilities by position run along
    the texts, one after the other.
    """

    def __init__(self, texts: Texts, seed: int = 0) -> None:
        """Store the texts: (prompt, the target's answer), as token ids."""
        most = max(max(part, default=0) for text in texts for part in text)
        super().__init__(seed, max(VOCAB_SIZE, most + 1))
        self.texts = texts
        self._starts = list(accumulate((len(tokens) for _, tokens in texts), initial=0))

    def token(self, session_id: int, position: int, previous: int) -> int:
        prompt, tokens = self.texts[session_id % len(self.texts)]
        if position < len(prompt):
            return prompt[position]
        at = position - len(prompt)
        return tokens[at] if at < len(tokens) else super().token(session_id, position, previous)

    def prompt(self, session_id: int, count: int) -> Int32Array:
        """Return a session's whole prompt i32[n]."""
        return np.array(self.texts[session_id % len(self.texts)][0], np.int32)

    def place(self, session_id: int, position: int) -> int:
        number = session_id % len(self.texts)
        return self._starts[number] + position - len(self.texts[number][0])


class StubGuesses:
    """The proposals of a stub drafter.

    acceptance   probability that the first choice is right, by position of the text. The list repeats, and each session
                 begins at its own place.
    ranks        [i]: probability that choice i + 2 is right, given that all before it are wrong, but at most that of
                 the choice before it.
    claims       the drafter's claimed acceptance, by position likewise. Empty: the truth.
    model        models of different numbers are right at different places.
    """

    def __init__(
        self,
        text: StubText,
        acceptance: Sequence[float],
        ranks: Sequence[float],
        claims: Sequence[float] = (),
        model: int = 0,
    ) -> None:
        self.text, self.ranks = text, tuple(ranks)
        self._key = mix((text.seed * _DRAFT + model + 1) & _MASK)
        self._chances = [self._of_choices(first) for first in acceptance]
        self._claims = [self._of_choices(first) for first in claims] or self._chances
        self._scores: dict[tuple[float, ...], Float32Array] = {
            chances: np.log(np.maximum(chances, _LEAST_CHANCE)).astype(np.float32) for chances in self._claims
        }

    def _of_choices(self, first: float) -> tuple[float, ...]:
        """Return each choice's probability of being right, if the first one has `first`."""
        chances, left = [first], 1 - first
        for rank in self.ranks:
            chances.append(min(left * rank, chances[-1]))
            left -= chances[-1]
        return tuple(chances)

    def rank(self, session_id: int, position: int, previous: int) -> int:
        """Return which choice is the target's token, from 0; len(ranks) + 1 if none is."""
        key = self._key + session_id * _POSITION + position * _TOKEN + previous * _SESSION
        draw = mix(key & _MASK) / 2**64
        chances = self._at(self._chances, session_id, position)
        for rank, chance in enumerate(chances):
            draw -= chance
            if draw < 0:
                return rank
        return len(chances)

    def children(self, session_id: int, position: int, previous: int, count: int) -> tuple[list[int], Float32Array]:
        """Return the tokens of at most `count` choices and their log-probabilities f32[c], likeliest first."""
        right = self.text.token(session_id, position, previous)
        scores = self._scores[self._at(self._claims, session_id, position)][:count]
        num_others = self.text.vocab_size - 1  # token 0 never occurs
        tokens = [1 + (right + i) % num_others for i in range(len(scores))]
        rank = self.rank(session_id, position, previous)
        if rank < len(scores):
            tokens[rank] = right
        return tokens, scores

    def _at(self, chances: Sequence[tuple[float, ...]], session_id: int, position: int) -> tuple[float, ...]:
        """Return a position's entry of a list that repeats."""
        return chances[0] if len(chances) == 1 else chances[self.text.place(session_id, position) % len(chances)]


class RecordedGuesses(StubGuesses):
    """A real drafter's guesses for recorded texts.

    At each position the target's token has its recorded rank, and the first choice its claimed probability.
    """

    def __init__(self, text: StubText, choices: Choices, ranks: Sequence[float]) -> None:
        """Store `choices`: (claim, rank) of each position; `ranks`: for the other choices, as in `StubGuesses`."""
        claims = [claim for claim, _ in choices]
        super().__init__(text, claims, ranks)
        self._ranks = [int(rank) for _, rank in choices]

    def rank(self, session_id: int, position: int, previous: int) -> int:
        return self._ranks[self.text.place(session_id, position) % len(self._ranks)]


@dataclass(frozen=True, slots=True)
class TimedFlight:
    """A step that a device computes until a time; see `specq.engines.Launched`."""

    engine: TimedEngine
    output: StepOutput
    until: float
    feeds: bool

    def collect(self) -> StepOutput:
        self.engine.wait(self.until)
        return self.output

    def discard(self) -> None:
        raise NotImplementedError("a simulated step does not fail")


PROFILED_SESSIONS = 8  # a profiled step's rows are divided among this number, as in the torch engine


class TimedEngine:
    """Judges by the stub text.

    busy_s      grows by the time that each step takes the host: all of it, or with `overlaps` to plan it and to wait.
    computed_s  grows by the time of each step.
    clock       the host's time in seconds, which its process sets. Only used with `overlaps`.
    help_part   the part of the last step that a thread on another core did.

    The other numbers are counts since the start. A step takes its curve's time for its rows (there are two curves if it
    can be helped). It takes `session_us` more for each session, `context_us` for each 1,000 tokens of KV of its
    sessions, and `plan_us` for each session. The last is the verifier's own time and not part of the profile.
    """

    max_chain = 0
    num_tap_layers = 0
    jumps: tuple[int, ...] = ()
    takes_scratch = takes_unread = False

    def __init__(
        self,
        settings: EngineSettings,
        text: StubText,
        info: ModelInfo,
        plan_us: float = 0.0,
        *,
        knows_prompts: bool = False,
    ) -> None:
        """Start with no sessions. `knows_prompts`: the KV of prompts is there, as if each had been computed before."""
        self._knows_prompts = knows_prompts
        self.settings, self.text, self.info = settings, text, info
        self.overlaps = bool(settings.overlaps)
        self._plan_s = plan_us / 1e6
        self._session_s = settings.session_us / 1e6 + self._plan_s * (not self.overlaps)
        self.busy_s = self.computed_s = self.help_part = 0.0
        self.clock: Callable[[], float] = float
        self._busy_until = 0.0
        self._last: dict[int, int] = {}  # session -> its last token
        self.num_steps = self.num_rows = self.num_rounds = self.num_nodes = self.num_accepted = 0
        self.is_helped = bool(settings.helped_ms)
        self._unhelped = HardwareCurve(settings.step_ms)
        self._helped = HardwareCurve(settings.helped_ms or settings.step_ms)
        self._lengths: dict[int, int] = {}  # session -> tokens whose KV it holds
        self._num_held = 0

    @property
    def _curve(self) -> HardwareCurve:
        return self._helped if self.is_helped else self._unhelped

    @property
    def free_slots(self) -> int:
        return self.info.kv_slots - self._num_held

    def open(self, session_id: int, token_ids: Int32Array, owner: str = "") -> int:
        """Start a session; only the KV of known prompts is shared."""
        if session_id in self._lengths:
            raise EngineError(f"session {session_id} is already open")
        self._lengths[session_id] = num_cached = len(token_ids) - 1 if self._knows_prompts else 0
        self._num_held += num_cached
        return num_cached

    def close(self, session_id: int) -> None:
        """Free the session's KV."""
        self._num_held -= self._lengths.pop(session_id, 0)
        self._last.pop(session_id, None)

    def step(self, steps: Sequence[SessionStep], tap: Tap = NO_TAP) -> StepOutput:
        """Judge the steps, and add their time."""
        return self.launch(steps, tap).collect()

    def launch(self, steps: Sequence[SessionStep], tap: Tap = NO_TAP, after: object = None) -> TimedFlight:
        """Judge the steps, and begin to compute them behind the steps before."""
        if tap.layers or any(step.scratch.num_rows for step in steps):
            raise EngineError("a simulated engine has no hidden states and no logits")
        num_rows = sum(step.num_rows for step in steps)
        if num_rows > self.free_slots:
            raise EngineError(f"{num_rows} rows need as many KV slots; {self.free_slots} are free")
        self.computed_s += (seconds := self._seconds(steps, num_rows))
        alone_s = seconds + self._unhelped(num_rows) - self._curve(num_rows)
        self.help_part = max(1 - seconds / alone_s, 0.0)
        self.num_steps += 1
        self.num_rows += num_rows
        output = StepOutput([judgement for step in steps if (judgement := self._run(step)) is not None])
        if self.overlaps:
            self.busy_s += len(steps) * self._plan_s
            self._busy_until = max(self._busy_until, self.clock()) + seconds
        else:
            self.busy_s += seconds
        return TimedFlight(self, output, self._busy_until, feeds=not any(step.tree.num_nodes for step in steps))

    def wait(self, until: float) -> None:
        """Let the host wait for the device."""
        if self.overlaps:
            self.busy_s += max(until - self.clock(), 0.0)

    def _seconds(self, steps: Sequence[SessionStep], num_rows: int) -> float:
        seconds = self._curve(num_rows) + len(steps) * self._session_s
        if self.settings.context_us:
            seconds += sum(step.base_len for step in steps) * self.settings.context_us / 1e9
        return seconds

    def _run(self, step: SessionStep) -> Judgement | None:
        length = self._lengths[step.session_id]
        if step.start != length:
            raise EngineError(f"session {step.session_id}: the step starts at {step.start}; its KV holds {length}")
        added = len(step.token_ids)
        judgement = None
        if step.judged:
            judgement = self._judge(step)
            added += len(judgement.path)
        self._lengths[step.session_id] = length + added
        self._num_held += added
        return judgement

    def _judge(self, step: SessionStep) -> Judgement:
        """Follow the target's own text down the tree; parents come before children, so one pass is enough."""
        session_id, position, at = step.session_id, step.base_len, -1
        last = self._last.get(session_id, int(step.token_ids[-1])) if self.overlaps else int(step.token_ids[-1])
        wanted = self.text.token(session_id, position, last)
        path, tokens = [], [wanted]
        if step.tree.num_nodes:
            for i, (token, parent) in enumerate(
                zip(step.tree.token_ids.tolist(), step.tree.parents.tolist(), strict=True)
            ):
                if parent == at and token == wanted:
                    position, at = position + 1, i
                    wanted = self.text.token(session_id, position, token)
                    path.append(i)
                    tokens.append(wanted)
        self.num_rounds += 1
        self.num_nodes += step.tree.num_nodes
        self.num_accepted += len(path)
        self._last[session_id] = tokens[-1]
        return Judgement(session_id, tuple(path), np.array(tokens, np.int32))

    def step_times(self, sizes: Sequence[int]) -> list[float]:
        """Return the seconds of steps with these numbers of rows, as a verifier profiles them at start-up."""
        sessions = self.settings.session_us / 1e6
        return [self._curve(size) + min(size, PROFILED_SESSIONS) * sessions for size in sizes]

    def shutdown(self) -> None:
        """Do nothing."""
