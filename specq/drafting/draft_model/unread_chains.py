"""Chains that a step verifies before the host has read them: their tokens hang on the trees as handles, and what chains
have promised so far, by level and rank, stands for their own scores.

The step is launched behind the chains, so the device does not wait for the host in between. The price is that nothing
is chosen by what this draft says of its own tokens (`reading_choice`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specq.drafting.worker import LEAST_CHANCE
from specq.protocol import COLOCATED_LANE, Float32Array, Float64Array, Int32Array, IntpArray
from specq.verification import NO_TOKEN, DeviceTokens
from specq.verifier.sources import DraftBatch, Session, UnreadLayout, hung_unread

FADE = 0.05  # of a mean, with each round


class UsualScores:
    """What the tokens of chains have promised in the mean, by level and rank: calibrated acceptance probabilities,
    given the parent's."""

    def __init__(self, depth: int, width: int) -> None:
        """Chains have so many levels of so many tokens each, at most."""
        self._means = np.zeros((depth, width))  # 0 where nothing was seen

    def learn(self, accept_probs: Float64Array, token_ids: Int32Array) -> None:
        """Take in a round's chains: acceptance probabilities and tokens [sessions, depth, width], tokens below 0 where
        there are none."""
        is_there = token_ids >= 0
        counts = is_there.sum(0)
        seen = counts > 0
        sums = np.where(is_there, accept_probs, 0.0).sum(0)
        depth, width = counts.shape
        means = self._means[:depth, :width]
        now = sums[seen] / counts[seen]
        means[seen] = np.where(means[seen] > 0, means[seen] + FADE * (now - means[seen]), now)

    def of(self, depth: int, width: int) -> Float32Array | None:
        """Return the scores of chains of so many levels and ranks, f32[depth, width]; None if some of them were never
        seen."""
        means = self._means[:depth, :width]
        if means.shape != (depth, width) or not means.all():
            return None
        found: Float32Array = np.log(np.maximum(means, LEAST_CHANCE)).astype(np.float32)
        return found


def batch_of_unread(
    sessions: Sequence[Session], drafted: DeviceTokens, counts: IntpArray, scores: Float32Array
) -> DraftBatch:
    """Return chains as a batch.

    drafted     tokens [depth * sessions * width], level by level
    counts      i64[sessions]: how many levels each session takes; 0: none
    scores      f32[depth, width], of every session's
    """
    depth, width = scores.shape
    layout = UnreadLayout.of((width,) * depth)
    places = (layout.levels * len(sessions) + np.arange(len(sessions))[:, None]) * width + layout.ranks
    return hung_unread(sessions, drafted, layout, counts, places, scores.reshape(-1), COLOCATED_LANE)


def distinct(token_ids: Int32Array) -> Int32Array:
    """Return tokens i32[sessions, depth, width] where each that an earlier sibling has is no token: it has a node of
    its own, which must not be accepted beside the other."""
    found = token_ids
    for rank in range(1, token_ids.shape[2]):
        is_double = (token_ids[:, :, :rank] == token_ids[:, :, rank : rank + 1]).any(2)
        if np.count_nonzero(is_double):
            found = found.copy() if found is token_ids else found
            found[:, :, rank][is_double] = NO_TOKEN
    return found
