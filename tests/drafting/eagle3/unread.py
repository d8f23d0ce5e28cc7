"""Trees of a head that are verified unread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specq.drafting.eagle3.levels import BEAM
from specq.drafting.trees.interface import Grown, TreeHead, TreeRequest
from specq.drafting.trees.source import TreeSource
from specq.testing.growth import lines_of
from specq.testing.toy_drafters import ToyTrees
from specq.verifier import StepCurve
from specq.verifier.sources.unread import UnreadLayout

CURVE = StepCurve([1, 512], [0.005, 0.0051])


COUNTS = [1, 3, 20]


SESSIONS = max(COUNTS)


DEPTH = 6


class Beside(ToyTrees):
    """A toy head that drafts beside the host."""

    runs_beside_host = True


def is_read_as_on_device(head: TreeHead, request: TreeRequest) -> bool:
    """Return whether the device has the trees of a request. If so, check that the host reads the same nodes."""
    (growing,) = head.start([request])
    nodes = growing.on_device()
    if nodes is None:
        return False
    grown = growing.collect()
    assert nodes.token_ids.tolist() == grown.token_ids.tolist()
    assert nodes.token_ids.max() < head.limit_vocab
    levels = np.arange(len(nodes.lines))[:, None, None]
    deep = np.broadcast_to(levels <= grown.depths, nodes.lines.shape)
    assert np.array_equal(nodes.lines.numpy()[deep], lines_of(grown.parents, grown.depths)[deep])
    return True


def noted(source: TreeSource) -> list[int]:
    """Let a source note the nodes that it hangs unread, of each round that has some."""
    found, of_unread = list[int](), source._batch_of_unread

    def note(*given: Any) -> Any:
        batch = of_unread(*given)
        if batch is not None:
            found.append(len(batch.token_ids))
        return batch

    source._batch_of_unread = note  # type: ignore[method-assign]
    return found


def grown_around(
    texts: Sequence[Sequence[int]], level_sizes: Sequence[int], limit: int, rng: np.random.Generator
) -> Grown:
    """Trees in which what texts go on with stands at random places of the levels, down to a random one, below its own;
    other nodes stand anywhere, and some of them have its tokens, too."""
    layout, size = UnreadLayout.of(tuple(level_sizes)), sum(level_sizes)
    token_ids, parents = np.zeros((2, len(texts), size), np.int32)
    firsts = np.cumsum([0, *level_sizes])
    for tree, text in enumerate(texts):
        right, most = -1, rng.integers(0, len(level_sizes) + 1)
        for level, (first, num) in enumerate(zip(firsts, level_sizes, strict=False)):
            below = firsts[level - 1] + np.arange(min(level_sizes[level - 1], BEAM)) if level else np.array([-1])
            tokens, above = token_ids[tree, first : first + num], parents[tree, first : first + num]
            tokens[:], above[:] = (text[level] + 1 + np.arange(num)) % limit, rng.choice(below, num)
            taken = {right}  # nodes with a child of this token, and the one whose child is right
            for i in rng.permutation(num).tolist():
                if above[i] not in taken and rng.random() < 0.7:
                    tokens[i] = text[level]
                    taken.add(int(above[i]))
            place = int(rng.integers(0, min(num, BEAM)))
            if level < most:
                tokens[place], above[place] = text[level], right
                right = first + place
            else:
                right = size  # there is none
    reach = -0.1 - 0.3 * np.broadcast_to(layout.levels + layout.ranks, token_ids.shape).astype(np.float32)
    return Grown(token_ids, np.full(token_ids.shape, -0.3, np.float32), reach, parents, layout.levels)
