"""Convert between the order of a step's sessions and that of vLLM's persistent batch. Pure.

`order`, i64[n], is the session of a step for each request of vLLM's batch. A request has logits after its last token
and after each draft token.
"""

from __future__ import annotations

import numpy as np

from specq.engines.vllm.padding import row_counts
from specq.protocol import Int32Array, IntpArray
from specq.verification import Judgements, StepBatch, places_in_runs, starts_of

# the token of a request that could not be judged, which is dropped before its next step; also an unknown token
ANY_TOKEN = 0


def judged_rows(batch: StepBatch, order: IntpArray, even_length: int = 0) -> IntpArray | None:
    """Return which rows of vLLM's logits are judged, in the order of the step. None: all, in their own order.

    `even_length`: rows of each session in vLLM's batch, including padding rows; 0: not padded.
    """
    is_in_order = batch.are_judged and bool((order[1:] > order[:-1]).all())
    if is_in_order and not even_length:
        return None
    counts: IntpArray = batch.num_nodes + 1
    of_each = np.full_like(counts, even_length) if even_length else counts
    if is_in_order and bool((of_each == counts).all()):
        return None
    firsts = first_rows(of_each, order)
    counts, firsts = counts[batch.is_judged], firsts[batch.is_judged]
    rows: IntpArray = firsts.repeat(counts) + places_in_runs(counts)
    return rows


def first_rows(sizes: IntpArray, order: IntpArray) -> IntpArray:
    """Return where each request's rows begin, i64[n], from their numbers of rows i64[n] and their order."""
    firsts: IntpArray = np.empty_like(sizes)
    firsts[order] = starts_of(sizes[order])
    return firsts


def scored_rows(batch: StepBatch, order: IntpArray, even_length: int) -> IntpArray:
    """Return which rows of vLLM's hidden states are scored (`ScoredRows`), i64[any], in the order of the step.

    `even_length` as for `judged_rows`. At least one session has such rows.
    """
    firsts = first_rows(row_counts(batch, even_length), order)
    return np.concatenate([firsts[place] + np.arange(own.num_rows) for place, own in batch.scored.items()])


def are_all(places: IntpArray | Int32Array) -> bool:
    """Return whether these are 0, 1, 2 and so on."""
    return np.array_equal(places, np.arange(len(places)))


def said_tokens(judgements: Judgements) -> tuple[IntpArray, Int32Array]:
    """Return the next tokens of each judged request, for vLLM's own tables.

    Returns the number of tokens, i64[judged], and all tokens, i32[all].
    """
    counts: IntpArray = np.maximum(judgements.num_tokens, 1)
    found = np.full(int(counts.sum()), ANY_TOKEN, np.int32)
    found[(judgements.num_tokens > 0).repeat(counts)] = judgements.token_ids
    return counts, found
