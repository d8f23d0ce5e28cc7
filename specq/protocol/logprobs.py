"""Log-probabilities: of a completion, token by token, and of a prompt, as bytes; for verifier, broker and client.

A row belongs to one token of the prompt; the first token has none. A row is f32 log-probability of the token, i32[n]
the n likeliest tokens there, f32[n] theirs, little-endian. These are also the journal's rows of generated tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from specq.protocol.arrays import Float32Array, Int32Array, UInt8Array
from specq.protocol.bounds import MAX_PROMPT_ROWS
from specq.protocol.errors import ProtocolError
from specq.protocol.params import SamplingParams
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


def prompt_rows(logprobs: Logprobs) -> Int32Array:
    """Return log-probabilities of m tokens as rows, i32[m, 1 + 2n]."""
    columns = logprobs.tokens[:, None].view(np.int32), logprobs.top_ids, logprobs.top.view(np.int32)
    return np.hstack(columns).astype("<i4", copy=False)


def num_prompt_bytes(prompt_len: int, params: SamplingParams) -> int:
    """Return the number of bytes of all rows of a prompt. 0: none are requested."""
    return 4 * (prompt_len - 1) * (1 + 2 * params.prompt_logprobs) if params.prompt_logprobs >= 0 else 0


def reason_against_prompt_rows(prompt_len: int, params: SamplingParams) -> str:
    """Return why a job may not ask for the log-probabilities of its prompt, or ""."""
    size = num_prompt_bytes(prompt_len, params)
    if size <= MAX_PROMPT_ROWS:
        return ""
    return (
        f"prompt_logprobs is {params.prompt_logprobs}, which takes {size} bytes for a prompt of {prompt_len} tokens; "
        f"at most {MAX_PROMPT_ROWS} are allowed. Request fewer tokens, or shorten the prompt"
    )


def read_prompt_rows(data: UInt8Array, prompt_ids: Int32Array, num_top: int) -> list[dict[str, Any] | None]:
    """Return an entry for each token of a prompt, None for the first, in the form of `LogprobRecord.to_list`.

    Raises ProtocolError if the rows are malformed.
    """
    width = 1 + 2 * num_top
    if len(data) != 4 * width * (len(prompt_ids) - 1):
        raise ProtocolError(f"{len(data)} bytes of log-probabilities for a prompt of {len(prompt_ids)} tokens")
    table = data.view("<i4").reshape(-1, width)
    values = np.delete(table, np.s_[1 : 1 + num_top], axis=1).view("<f4")
    top_ids = table[:, 1 : 1 + num_top]
    if not (values < np.inf).all() or (top_ids < 0).any():
        raise ProtocolError("log-probabilities of a prompt are not numbers, or name no tokens")
    rows = zip(prompt_ids[1:].tolist(), values.tolist(), top_ids.tolist(), strict=True)
    return [
        None,
        *(
            {
                "token_id": token,
                "logprob": own,
                "top": [list(pair) for pair in zip(ids, top, strict=True)],
            }
            for token, (own, *top), ids in rows
        ),
    ]
