"""What tests of judging share: trees that are written down, and what judgements say."""

from collections.abc import Iterable, Sequence

import numpy as np

from specq.protocol.types import DraftDistributions, Judgement, Tree


def tree_of(
    tokens: Sequence[int], parents: Sequence[int] | None = None, distributions: DraftDistributions | None = None
) -> Tree:
    """Return a tree of these nodes, a chain if no parents are given."""
    above = range(-1, len(tokens) - 1) if parents is None else parents
    arrays = np.array(tokens, np.int32), np.array(above, np.int32), np.zeros(len(tokens), np.float32)
    return Tree(*arrays, distributions)


def said(judgements: Iterable[Judgement]) -> list[tuple[tuple[int, ...], list[int]]]:
    """Return the path and the tokens of each."""
    return [(one.path, one.token_ids.tolist()) for one in judgements]
