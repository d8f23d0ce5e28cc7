"""The stub target's text, and which of a stub drafter's choices is right. Both are keyed hashes, so no data is stored.

The target's token is a hash of (session, position, previous token). A drafter's first choice is this token with a
probability that may vary by position. If it is wrong, each further choice is right with a given probability, given that
those before are not. The drafter knows these probabilities and claims them, unless it is given other claims.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from specq.protocol import Float32Array, Int32Array

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
