"""Rows of logits and of tokens between the order of a step's sessions and that of vLLM's persistent batch. Pure.

`order` i64[n] says which of the n sessions of a step each request of vLLM's batch is. Of logits, a request has a row after its last token and
one after each drafted token; of tokens, a row of what it goes on with.
"""

from __future__ import annotations

import numpy as np

from specq.protocol import Int32Array, IntpArray
from specq.verification import Judgements, StepBatch, ends_of

NO_TOKEN = -1  # where a row of tokens ends; vLLM's own filler
ANY_TOKEN = 0  # what a request "said" that could not be judged; it is dropped before its next step


def judged_rows(batch: StepBatch, order: IntpArray) -> IntpArray | None:
    """Return which rows of vLLM's logits are judged, in the order of the step; None: all, as they are."""
    counts: IntpArray = batch.num_nodes + 1
    if batch.are_judged and bool((order[1:] > order[:-1]).all()):
        return None
    firsts: IntpArray = np.empty(len(batch), np.intp)
    firsts[order] = ends_of(counts[order]) - counts[order]
    counts, firsts = counts[batch.is_judged], firsts[batch.is_judged]
    rows: IntpArray = (firsts - ends_of(counts) + counts).repeat(counts) + np.arange(int(counts.sum()))
    return rows


def said_rows(batch: StepBatch, order: IntpArray, judgements: Judgements) -> Int32Array:
    """Return i32[n, longest]: what each request of vLLM's batch goes on with, for its own books."""
    num_tokens = judgements.num_tokens
    rows = np.empty(len(batch), np.intp)
    rows[order] = np.arange(len(batch))
    judged = rows[batch.is_judged]
    found = np.full((len(batch), max(int(num_tokens.max(initial=0)), 1)), NO_TOKEN, np.int32)
    found[judged, 0] = ANY_TOKEN
    columns = np.arange(len(judgements.token_ids)) - (num_tokens.cumsum() - num_tokens).repeat(num_tokens)
    found[judged.repeat(num_tokens), columns] = judgements.token_ids
    return found
