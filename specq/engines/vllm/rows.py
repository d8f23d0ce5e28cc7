"""Rows of logits in the order of a step's sessions and in that of vLLM's persistent batch; and what its requests go on
with. Pure.

`order` i64[n] says which of the n sessions of a step each request of vLLM's batch is. Of logits, a request has a row
after its last token and one after each drafted token.
"""

from __future__ import annotations

import numpy as np

from specq.protocol import Int32Array, IntpArray
from specq.verification import Judgements, StepBatch, places_in_runs, starts_of

# what a request "said" that could not be judged, which is dropped before its next step; and what is not known yet
ANY_TOKEN = 0


def judged_rows(batch: StepBatch, order: IntpArray, even_length: int = 0) -> IntpArray | None:
    """Return which rows of vLLM's logits are judged, in the order of the step; None: all, as they are. `even_length`:
    rows that each session has there, those included that nobody asked for; 0: as many as are judged."""
    is_in_order = batch.are_judged and bool((order[1:] > order[:-1]).all())
    if is_in_order and not even_length:
        return None
    counts: IntpArray = batch.num_nodes + 1
    of_each = np.full_like(counts, even_length) if even_length else counts
    if is_in_order and bool((of_each == counts).all()):
        return None
    firsts: IntpArray = np.empty(len(batch), np.intp)
    firsts[order] = starts_of(of_each[order])
    counts, firsts = counts[batch.is_judged], firsts[batch.is_judged]
    rows: IntpArray = firsts.repeat(counts) + places_in_runs(counts)
    return rows


def are_all(places: IntpArray | Int32Array) -> bool:
    """Return whether these are 0, 1, 2 and so on."""
    return np.array_equal(places, np.arange(len(places)))


def said_tokens(judgements: Judgements) -> tuple[IntpArray, Int32Array]:
    """Return what each judged request goes on with, for vLLM's own tables: how many tokens, i64[judged], and all of
    them, i32[all]."""
    counts: IntpArray = np.maximum(judgements.num_tokens, 1)
    found = np.full(int(counts.sum()), ANY_TOKEN, np.int32)
    found[(judgements.num_tokens > 0).repeat(counts)] = judgements.token_ids
    return counts, found
