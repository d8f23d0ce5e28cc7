"""The log-probabilities of a session's prompt, for jobs with `prompt_logprobs`.

Rule: the values are a function of the prompt alone. Rows may be computed again, for example after an eviction.
"""

from __future__ import annotations

import numpy as np

from specq.protocol import NO_SCORED, Int32Array, Logprobs, ScoredRows, UInt8Array, prompt_rows


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
