"""The conditions that a draft must meet before it is grafted.

A draft that breaks them is dropped as a whole and counted. It never reaches a session's tree. The judge relies on these
conditions. They cannot detect a false draft distribution, from which the tokens were not drawn. A false distribution
would bias the text of `probabilistic`. So the drafts of untrusted drafters are reduced to point masses (`stripped`),
which are always exact.

This module also decides whether a draft model fits a target. It converts draft distributions to the arrays of a `Draft`
or a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from specq.protocol.arrays import Int32Array, UInt16Array
from specq.protocol.bounds import MAX_INT32
from specq.protocol.messages import Draft, Drafts
from specq.protocol.origins import LEAST_OWN_LANE
from specq.protocol.types import NO_TOKENS, NO_WEIGHTS, DraftDistribution, ModelInfo


def fits(draft: ModelInfo, target: ModelInfo) -> bool:
    """Return whether drafts of one model can be hints for the other."""
    return draft.tokenizer_hash in ("", target.tokenizer_hash)


def mismatch(draft: ModelInfo, targets: list[ModelInfo], shared: str = "") -> str:
    """Return why a draft model fits no target, with both names and a remedy.

    `shared`: a text with the number of shared tokens, if known.
    """
    served = ", ".join(f"{t.name} ({t.num_tokens} tokens, tokenizer {t.tokenizer_hash[:12]})" for t in targets)
    return (
        f"draft model {draft.name} ({draft.num_tokens} tokens, tokenizer {draft.tokenizer_hash[:12]}) does not share "
        f"the tokenizer of any target: {served}. Vocabulary, merges and added tokens must be equal, or a way "
        f"chosen by --vocabulary (a draft worker's needs --target): shared drafts only tokens that both have"
        f"{shared and f' ({shared})'}; text turns its drafts into text, and that into tokens of the target"
    )


def pack_distributions(distributions: Sequence[DraftDistribution], rows: Sequence[int]) -> dict[str, Any]:
    """Return the arrays of a `Draft` whose node i was drawn from distributions[rows[i]]. -1: a point mass."""
    if not distributions:
        return {}
    ids, weights = stacked(distributions)
    return {"q_ids": ids.reshape(-1), "q_weights": weights.reshape(-1), "q_rows": np.array(rows, np.int32)}


def stacked(distributions: Sequence[DraftDistribution]) -> tuple[Int32Array, UInt16Array]:
    """Return (ids i32[g, k], weights u16[g, k]), padded to the longest distribution."""
    width = max(len(distribution.ids) for distribution in distributions)
    ids, weights = np.full((len(distributions), width), -1, np.int32), np.zeros((len(distributions), width), np.uint16)
    for row, distribution in enumerate(distributions):
        ids[row, : len(distribution.ids)] = distribution.ids
        weights[row, : len(distribution.ids)] = distribution.weights
    return ids, weights


def reason_against(draft: Draft, vocab_size: int) -> str:
    """Return why a draft is invalid for a target of this vocabulary, or "". Lists are fast here: a draft is small."""
    tokens, parents, scores = draft.token_ids.tolist(), draft.parent_ids.tolist(), draft.scores.tolist()
    if not len(tokens) == len(parents) == len(scores):
        return "its arrays differ in length"
    most = max(draft.base_len, draft.first_id + len(tokens))
    if min(draft.base_len, draft.first_id, draft.lane) < 0 or most > MAX_INT32 or draft.lane >= LEAST_OWN_LANE:
        return "its lane, its position or its ids are out of range"
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        return "a token is outside the vocabulary"
    if not all(score <= 0 for score in scores):  # NaN fails this, too
        return "a score is not a log-probability"
    if any(not -1 <= parent < node_id for node_id, parent in enumerate(parents, draft.first_id)):
        return "a parent does not come before its child"
    has_duplicates = len(set(zip(parents, tokens, strict=True))) < len(tokens)
    return "two siblings have the same token" if has_duplicates else _reason_against_distributions(draft, vocab_size)


def are_valid(drafts: Drafts, vocab_size: int) -> bool:
    """Return whether each of these drafts is valid for a target of this vocabulary; see `reason_against`."""
    tokens, parents, counts = drafts.token_ids, drafts.parent_ids, drafts.num_nodes
    most = np.maximum(drafts.base_lens, drafts.first_ids.astype(np.int64) + counts).max(initial=0)
    are_in_range = most <= MAX_INT32 and drafts.lanes.max(initial=0) < LEAST_OWN_LANE
    if not are_in_range or tokens.max(initial=0) >= vocab_size or not np.all(drafts.scores <= 0):  # NaN fails this, too
        return False
    of_draft = np.arange(len(counts)).repeat(counts)
    if np.any(parents >= (drafts.first_ids - (counts.cumsum() - counts)).repeat(counts) + np.arange(len(tokens))):
        return False
    order = np.lexsort((tokens, parents, of_draft))
    pairs = np.stack((of_draft[order], parents[order], tokens[order]))
    return not np.any(np.all(pairs[:, 1:] == pairs[:, :-1], axis=0))


def _reason_against_distributions(draft: Draft, vocab_size: int) -> str:
    """Return why the draft distributions, or the nodes sampled from them, are invalid, or ""."""
    size = draft.q_size
    if not size:
        return ""
    same_shape = len(draft.q_ids) == len(draft.q_weights) and len(draft.q_rows) == len(draft.token_ids)
    if not same_shape or not 0 < size <= vocab_size or len(draft.q_ids) % size:
        return "the arrays of its draft distributions differ in shape"
    ids, weights, rows = draft.q_ids.reshape(-1, size), draft.q_weights.reshape(-1, size), draft.q_rows
    if np.any(rows < -1) or np.any(rows >= len(ids)):
        return "a node refers to a draft distribution that is not there"
    if np.any(ids < -1) or np.any(ids >= vocab_size) or np.any(weights[ids < 0]):
        return "a draft distribution has a token outside the vocabulary"
    ordered = np.sort(ids, axis=1)
    if np.any((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)):
        return "a draft distribution has a token twice"
    return _reason_against_draws(draft, ids, weights)


def _reason_against_draws(draft: Draft, ids: Int32Array, weights: UInt16Array) -> str:
    """Return why the sampled nodes are invalid, or "". The distributions are ids i32[g, k] and weights u16[g, k]."""
    sampled = np.flatnonzero(draft.q_rows >= 0)
    parents, rows = draft.parent_ids[sampled], draft.q_rows[sampled]
    if np.any(weights[rows].sum(1, np.int64) == 0):
        return "a draft distribution has no weight"
    if not np.all(((ids[rows] == draft.token_ids[sampled, None]) & (weights[rows] > 0)).any(1)):
        return "a token is not in its own draft distribution"
    sibling_groups = set(zip(parents.tolist(), rows.tolist(), strict=True))
    if len({parent for parent, _ in sibling_groups}) < len(sibling_groups) or len(
        {row for _, row in sibling_groups}
    ) < len(sibling_groups):
        return "sampled siblings have different draft distributions, or nodes of different parents have the same"
    return ""


def stripped(draft: Draft) -> Draft:
    """Return the draft without its distributions. All nodes are then point masses."""
    if not draft.q_size:
        return draft
    return replace(draft, q_size=0, q_ids=NO_TOKENS, q_weights=NO_WEIGHTS, q_rows=NO_TOKENS)
