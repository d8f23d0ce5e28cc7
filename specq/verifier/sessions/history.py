"""A session's past, as judging needs it.

It grows with the transcript, so that no step reads the whole context again.

Rule: this state depends only on the transcript, the prompt's length and the parameters. So a session that is opened
again, here or on another verifier, has the same counts.

It also has the log-probabilities of the prompt, for jobs with `prompt_logprobs`. Rule: the values are a function of the
prompt alone. Rows may be computed again, for example after an eviction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from specq.protocol import (
    NO_SCORED,
    NO_TOKENS,
    Bans,
    Float32Array,
    History,
    Int32Array,
    Int64Array,
    Logprobs,
    SamplingParams,
    ScoredRows,
    UInt8Array,
    prompt_rows,
)

_ROOM = 64  # initial room of the arrays, in tokens; it doubles when they are full


class Past:
    """The past of one session; each call gets its transcript. `end_ids` are the tokens that end its text."""

    def __init__(self, params: SamplingParams, prompt_len: int, end_ids: tuple[int, ...] = ()) -> None:
        self._is_needed, self._prompt_len, self._end_ids = params.needs_history, prompt_len, end_ids
        self._bans = bans_of(params.bad_token_ids)
        self._lookback = max((len(sequence) for sequence in params.bad_token_ids), default=1) - 1
        self._counts = TokenCounts(with_prompt=params.repetition_penalty != 1) if params.has_penalties else None

    def history(self, token_ids: Sequence[int]) -> History | None:
        """Return what judging needs after the transcript `token_ids`; None if the parameters need no past.

        Since the last call the transcript may only have grown.
        """
        if not self._is_needed:
            return None
        tail = np.array(token_ids[max(0, len(token_ids) - self._lookback) :], np.int32)
        if self._counts is None:
            return History(self._prompt_len, self._end_ids, tail, bans=self._bans)
        self._counts.follow(token_ids, self._prompt_len)
        return History(self._prompt_len, self._end_ids, tail, *self._counts.arrays(), self._bans)


def bans_of(sequences: Iterable[Sequence[int]]) -> Bans | None:
    """Return banned token sequences in a form for fast look-up; None if there are none."""
    by_beginning: dict[tuple[int, ...], list[int]] = {}
    for *beginning, last in sequences:
        by_beginning.setdefault(tuple(beginning), []).append(last)
    if not by_beginning:
        return None
    alone = np.unique(np.array(by_beginning.pop((), []), np.int64))
    following: dict[int, list[tuple[list[int], Int64Array]]] = {}
    for found, lasts in by_beginning.items():
        following.setdefault(found[-1], []).append((list(found), np.unique(np.array(lasts, np.int64))))
    return Bans(alone, following)


class TokenCounts:
    """How often each token was generated; with `with_prompt`, the prompt counts too.

    Tokens that never occurred are left out.
    """

    def __init__(self, *, with_prompt: bool) -> None:
        self._with_prompt = with_prompt
        self._followed = 0  # number of counted tokens of the transcript
        self._size = 0
        self._token_ids: Int32Array = NO_TOKENS  # i32[size or more], ascending
        self._counts: Float32Array = np.zeros(0, np.float32)

    def arrays(self) -> tuple[Int32Array, Float32Array]:
        """Return the occurring tokens, i32[k] ascending, and their present counts, f32[k]."""
        return self._token_ids[: self._size].copy(), self._counts[: self._size].copy()

    def follow(self, token_ids: Sequence[int], prompt_len: int) -> None:
        """Count the tokens appended to the transcript since the last call."""
        if not self._followed:
            self._count_all(np.array(token_ids, np.int32), prompt_len)
        else:
            self._count(token_ids[self._followed :])
        self._followed = len(token_ids)

    def _count_all(self, token_ids: Int32Array, prompt_len: int) -> None:
        generated, counts = np.unique(token_ids[prompt_len:], return_counts=True)
        occurring = np.unique(token_ids) if self._with_prompt else generated
        self._size = len(occurring)
        self._token_ids = np.concatenate([occurring, np.zeros(_ROOM, np.int32)])
        self._counts = np.zeros(self._size + _ROOM, np.float32)
        self._counts[occurring.searchsorted(generated)] = counts

    def _count(self, generated: Iterable[int]) -> None:
        for token in map(np.int32, generated):  # in the array's own type; otherwise the search converts the whole array
            place = int(self._token_ids[: self._size].searchsorted(token))
            if place == self._size or self._token_ids[place] != token:
                self._insert(place, token)
            self._counts[place] += 1

    def _insert(self, place: int, token: np.int32) -> None:
        """Insert a token that has not occurred yet, with a count of 0."""
        if self._size == len(self._token_ids):
            self._token_ids = np.concatenate([self._token_ids, np.zeros_like(self._token_ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        for array in (self._token_ids, self._counts):
            array[place + 1 : self._size + 1] = array[place : self._size]
        self._token_ids[place], self._counts[place] = token, 0
        self._size += 1


class PromptScores:
    """The values so far. Row i holds those of prompt token i + 1."""

    def __init__(self, prompt_ids: Int32Array, num_top: int) -> None:
        self._token_ids, self._num_top = prompt_ids, num_top
        self._rows = np.zeros((len(prompt_ids) - 1, 1 + 2 * num_top), "<i4")
        self._is_known = np.zeros(len(self._rows), np.bool_)

    def wanted(self, start: int, end: int) -> ScoredRows:
        """Return the scored rows of a step that computes the tokens from position `start` to before `end`."""
        following = self._token_ids[start + 1 : end + 1]
        return ScoredRows(following, self._num_top) if len(following) else NO_SCORED

    def put(self, start: int, found: Logprobs) -> None:
        """Store the values of the rows from position `start` on."""
        rows = prompt_rows(found)
        self._rows[start : start + len(rows)] = rows
        self._is_known[start : start + len(rows)] = True

    @property
    def is_complete(self) -> bool:
        """Whether all values are known."""
        return bool(self._is_known.all())

    def packed(self) -> UInt8Array:
        """Return all values as `Verdict.prompt_rows`."""
        assert self.is_complete, "a row of the prompt has KV and no log-probabilities"
        return self._rows.reshape(-1).view(np.uint8)
