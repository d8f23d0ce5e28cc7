"""The log-probabilities of a prompt as bytes: from the verifier through broker and journal to the client.

A row belongs to one token of the prompt; the first token has none. A row is f32 log-probability of the token, i32[n]
the n likeliest tokens there, f32[n] theirs, little-endian. These are also the journal's rows of generated tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from specq.protocol.arrays import Int32Array, UInt8Array
from specq.protocol.bounds import MAX_PROMPT_ROWS
from specq.protocol.errors import ProtocolError
from specq.protocol.params import SamplingParams
from specq.protocol.types import Logprobs


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
