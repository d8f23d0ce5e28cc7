"""The log-probabilities of a completion, token by token, for verifier, broker and client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from specq.protocol.arrays import Float32Array, Int32Array
from specq.protocol.types import Logprobs


class CarriesLogprobs(Protocol):
    """A `Verdict` or `Tokens`: see there."""

    @property
    def logprobs(self) -> Float32Array: ...
    @property
    def top_ids(self) -> Int32Array: ...
    @property
    def top_logprobs(self) -> Float32Array: ...


class LogprobRecord:
    """For each token: its log-probability, and the `num_top` likeliest tokens with theirs."""

    __slots__ = ("num_top", "tokens", "top", "top_ids")

    def __init__(self, num_top: int) -> None:
        """Begin an empty record. `num_top` < 0: record no values."""
        self.num_top = num_top
        self.tokens: list[float] = []
        self.top_ids: list[int] = []
        self.top: list[float] = []

    def extend(self, message: CarriesLogprobs, known: int) -> None:
        """Append a message's values, without those of the first `known` tokens."""
        if self.num_top >= 0:
            self.tokens += message.logprobs[known:].tolist()
            self.top_ids += message.top_ids[known * self.num_top :].tolist()
            self.top += message.top_logprobs[known * self.num_top :].tolist()

    def add(self, logprobs: Logprobs, num_tokens: int) -> None:
        """Append the judge's values of the first `num_tokens` tokens."""
        self.tokens += logprobs.tokens[:num_tokens].tolist()
        self.top_ids += logprobs.top_ids[:num_tokens].reshape(-1).tolist()
        self.top += logprobs.top[:num_tokens].reshape(-1).tolist()

    def arrays(self, start: int) -> dict[str, Any]:
        """Return the fields of a message for the tokens from `start` on. Empty if the record is off."""
        if self.num_top < 0:
            return {}
        return {
            "logprobs": np.array(self.tokens[start:], np.float32),
            "top_ids": np.array(self.top_ids[start * self.num_top :], np.int32),
            "top_logprobs": np.array(self.top[start * self.num_top :], np.float32),
        }

    def to_list(self, token_ids: Sequence[int], start: int = 0) -> list[dict[str, Any]]:
        """Return a JSON-able entry for each token from `start` on. Empty if the record is off.

        An entry is {"token_id", "logprob", "top": [[token id, logprob], ...]}.
        """
        n = self.num_top
        return [
            {
                "token_id": token,
                "logprob": logprob,
                "top": [
                    list(pair)
                    for pair in zip(self.top_ids[i * n : i * n + n], self.top[i * n : i * n + n], strict=True)
                ],
            }
            for i, (token, logprob) in enumerate(zip(token_ids, self.tokens[start:], strict=False), start)
        ]
