"""Is a drafted tree, with the laws that it claims to be sampled from, one that `probabilistic` can judge?

What breaks these rules is dropped as a whole and counted, before it reaches a session's tree; the judge relies on them.
They say nothing about honesty: a law that the tokens were not drawn from biases the text, which is why lanes of
untrusted drafters are stripped to point masses (`stripped`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from specq.types import DraftLaws, Tree


def reason_against(tree: Tree, vocab_size: int) -> str:
    """Return what is wrong with a tree of draft nodes, or ""."""
    num_nodes = len(tree.token_ids)
    if len(tree.parents) != num_nodes or len(tree.scores) != num_nodes:
        return "its arrays differ in length"
    if np.any(tree.parents < -1) or np.any(tree.parents >= np.arange(num_nodes)):
        return "a parent does not come before its child"
    if np.any(tree.token_ids < 0) or np.any(tree.token_ids >= vocab_size):
        return "a token lies outside the vocabulary"
    edges = tree.parents.astype(np.int64) * vocab_size + tree.token_ids
    if len(np.unique(edges)) != num_nodes:
        return "two siblings bear the same token"
    return "" if tree.laws is None else _reason_against_laws(tree, tree.laws, vocab_size)


def _reason_against_laws(tree: Tree, laws: DraftLaws, vocab_size: int) -> str:
    if laws.ids.ndim != 2 or laws.ids.shape != laws.weights.shape or len(laws.rows) != tree.num_nodes:
        return "the arrays of its laws differ in shape"
    if np.any(laws.rows < -1) or np.any(laws.rows >= len(laws.ids)):
        return "a node names a law that is not there"
    if np.any(laws.ids < -1) or np.any(laws.ids >= vocab_size) or np.any(laws.weights[laws.ids < 0]):
        return "a law names a token outside the vocabulary"
    ordered = np.sort(laws.ids, axis=1)
    if np.any((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)):
        return "a law names a token twice"
    return _reason_against_draws(tree, laws)


def _reason_against_draws(tree: Tree, laws: DraftLaws) -> str:
    sampled = np.flatnonzero(laws.rows >= 0)
    parents, rows = tree.parents[sampled], laws.rows[sampled]
    if np.any(laws.weights[rows].sum(1, np.int64) == 0):
        return "a law has no weight"
    if not np.all(((laws.ids[rows] == tree.token_ids[sampled, None]) & (laws.weights[rows] > 0)).any(1)):
        return "a token was not drawn from its own law"
    if len(np.unique(parents)) != np.unique(np.stack([parents, rows]), axis=1).shape[1]:
        return "sampled siblings name different laws"
    return ""


def stripped(tree: Tree) -> Tree:
    """Return the tree with all nodes as point masses: exact whatever the drafter claims."""
    return replace(tree, laws=None, waits=None)
