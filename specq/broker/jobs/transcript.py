"""The text of a job: its prompt, the tokens that are committed after it, and how it ended.

Rule: tokens are only appended. A verdict that does not fit what is there changes nothing.
"""

from __future__ import annotations

import numpy as np

from specq.broker.jobs.commits import Commit
from specq.protocol import Failed, Int32Array, LogprobRecord, SamplingParams


class Transcript:
    """`origins` has the code of each token's origin (`specq.protocol.origins`); `finish` is "" until the job ends.

    failure   what the client receives of a job that failed
    ended_at  by the journal's time; 0.0: it has not ended
    """

    __slots__ = (
        "ended_at",
        "failure",
        "finish",
        "logprobs",
        "max_tokens",
        "origins",
        "prompt_ids",
        "prompt_len",
        "token_ids",
    )

    def __init__(self, prompt_ids: Int32Array, params: SamplingParams) -> None:
        self.prompt_ids, self.prompt_len = prompt_ids, len(prompt_ids)
        self.max_tokens = params.max_tokens
        self.token_ids: list[int] = []
        self.origins = bytearray()
        self.logprobs = LogprobRecord(params.logprobs)
        self.finish = ""
        self.failure: Failed | None = None
        self.ended_at = 0.0

    @property
    def num_tokens(self) -> int:
        """Return how many tokens were generated."""
        return len(self.token_ids)

    @property
    def length(self) -> int:
        """Return the committed length, the prompt included: what `base_len` counts."""
        return self.prompt_len + len(self.token_ids)

    @property
    def tokens_left(self) -> int:
        return self.max_tokens - len(self.token_ids)

    def context(self) -> Int32Array:
        """Return i32[length]: the prompt and what is committed."""
        return np.concatenate([self.prompt_ids, np.array(self.token_ids, np.int32)])

    def since(self, length: int) -> Int32Array:
        """Return i32[self.length - length]: the generated tokens beyond a committed length."""
        return np.array(self.token_ids[length - self.prompt_len :], np.int32)

    def commit(self, commit: Commit) -> int:
        """Append what a verdict adds; return how many of its tokens were known, -1 if it does not fit: a gap, an
        overlap that disagrees, or more tokens than were asked for."""
        tokens = commit.token_ids
        start = commit.base_len - self.prompt_len
        known = len(self.token_ids) - start
        if known < 0 or start < 0 or self.token_ids[start:] != tokens[:known]:
            return -1
        if start + len(tokens) > self.max_tokens:
            return -1
        self.token_ids.extend(tokens[known:])
        self.origins.extend(commit.origins[known:])
        self.finish = self.finish or commit.finish
        return known
