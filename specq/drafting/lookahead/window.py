"""The window and the n-grams of lookahead decoding (arXiv 2402.02057), of one session. Pure: tokens in, tokens out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specq.protocol import Int32Array, ScratchRows

MOST_FIRSTS = 4096  # tokens with which n-grams of a session begin; the oldest is forgotten
WIDER = 2  # times its columns: what must be free before a window is widened, since that begins it anew
# Of the n-gram that was met last, of the one before, ...: the probability of its first token is FIRST / 1, FIRST / 2,
# ...; of each that follows NEXT. The lane's calibration corrects them.
FIRST, NEXT = 0.5, 0.7


class Ngrams(NamedTuple):
    """A tree of tokens, parents before children: the places of their parents among them (-1: the context), and their
    scores."""

    token_ids: list[int]
    parents: list[int]
    scores: list[float]


class LookaheadWindow:
    """The guesses of one session: `levels` of `num_columns` tokens each, at most `ngram` - 1 of them, and the pool of
    n-grams."""

    def __init__(self, ngram: int, guesses: int) -> None:
        self.ngram, self.guesses = ngram, guesses
        self.levels: list[list[int]] = []
        self.pool: dict[int, list[tuple[int, ...]]] = {}  # first token -> what followed it, the last met first
        self.asked: Int32Array | None = None  # the tokens of the rows that were asked for

    @property
    def num_columns(self) -> int:
        return len(self.levels[0]) if self.levels else 0

    def rows(self, token_ids: Sequence[int], num_columns: int) -> ScratchRows:
        """Return the window of a text as scratch rows, so many columns wide: one level after the other.

        The first level is a chain, and each token of another follows the one above it. So a token sees its own column,
        and the first tokens of all columns before.
        """
        self._resize(token_ids, num_columns)
        width, base = self.num_columns, len(token_ids)
        self.asked = np.array(self.levels, np.int32).reshape(-1)
        parents = np.arange(-width, len(self.asked) - width, dtype=np.int32)
        parents[:width] = np.arange(-1, width - 1)
        places = np.arange(width) + np.arange(len(self.levels))[:, None]  # [levels, width]
        return ScratchRows(self.asked, parents, (base + places).astype(np.int32).reshape(-1))

    def _resize(self, token_ids: Sequence[int], num_columns: int) -> None:
        """Begin with tokens of the text, or leave out columns."""
        if not self.levels or num_columns >= WIDER * self.num_columns:
            tokens = list(token_ids[-num_columns:])
            self.levels = [(tokens * num_columns)[:num_columns]]
        self.levels = [level[:num_columns] for level in self.levels]

    def learn(self, following: Sequence[int]) -> None:
        """Take in what the target says after each row that was asked for."""
        width, self.asked = self.num_columns, None
        found = list(following[-width:])
        if len(self.levels) == self.ngram - 1:
            for first, *rest in zip(*self.levels, found, strict=True):
                self._keep(first, tuple(rest))
            self.levels.pop(0)
        self.levels.append(found)

    def _keep(self, first: int, rest: tuple[int, ...]) -> None:
        known = self.pool.pop(first, [])
        self.pool[first] = [rest, *(other for other in known if other != rest)][: max(self.guesses, 1)]
        if len(self.pool) > MOST_FIRSTS:
            del self.pool[next(iter(self.pool))]

    def drafts(self, last: int, max_depth: int, max_nodes: int) -> Ngrams:
        """Return the n-grams that begin with the last token, as a tree."""
        drafted, places = Ngrams([], [], []), dict[tuple[int, ...], int]()
        for rank, tokens in enumerate(self.pool.get(last, ())[: self.guesses]):
            for depth in range(min(len(tokens), max_depth)):
                path = tokens[: depth + 1]
                if path in places or len(places) == max_nodes:
                    continue
                places[path] = len(places)
                drafted.token_ids.append(tokens[depth])
                drafted.parents.append(places.get(path[:-1], -1))
                drafted.scores.append(math.log(NEXT if depth else FIRST / (1 + rank)))
        return drafted
