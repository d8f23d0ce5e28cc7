"""Hypothesis strategies for parameters, trees and steps, and a way to make packed logits."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import strategies as st

from specq.protocol.params import SamplingParams
from specq.protocol.types import DraftDistributions, SessionStep, Tree

VOCAB = 12


@st.composite
def sampling_params(draw, strategy="deterministic"):
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.0, 0.3, 0.8, 1.0, 2.5])),
        top_k=draw(st.sampled_from([0, 0, 1, 3, 5, 40])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.05, 0.5, 0.9, 0.999])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.02, 0.3, 1.0])),
        seed=draw(st.integers(0, 2**63 - 1)),
        strategy=strategy,
    ).validate()


@st.composite
def trees(draw, vocab=VOCAB, max_nodes=10):
    parents, tokens, taken = [], [], set()
    for i in range(draw(st.integers(0, max_nodes))):
        parent, token = draw(st.integers(-1, i - 1)), draw(st.integers(0, vocab - 1))
        parent = parent if parent < len(parents) else -1
        if (parent, token) not in taken:
            taken.add((parent, token))
            parents.append(parent)
            tokens.append(token)
    return Tree(np.array(tokens, np.int32), np.array(parents, np.int32), np.zeros(len(parents), np.float32))


@st.composite
def sampled_trees(draw, vocab=VOCAB, **of_trees):
    """Trees some of whose nodes were drawn: each group has a distribution, of which its sampled members have weight."""
    tree = draw(trees(vocab=vocab, **of_trees))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    parents = np.unique(tree.parents)
    size = draw(st.integers(1, vocab))
    ids = np.stack([rng.permutation(vocab)[:size] for _ in parents]) if len(parents) else np.zeros((0, size))
    weights = rng.integers(0, 65536, ids.shape) >> rng.integers(0, 17, ids.shape)
    ids = np.where(weights > 0, ids, -1).astype(np.int32)
    rows = np.searchsorted(parents, tree.parents)
    is_named = (ids[rows] == tree.token_ids[:, None]).any(1) & (rng.random(tree.num_nodes) < 0.8)
    distributions = DraftDistributions(ids, weights.astype(np.uint16), np.where(is_named, rows, -1).astype(np.int32))
    return replace(tree, distributions=distributions)


@st.composite
def steps(draw, params=None, tree=None, **of_trees):
    session_id = draw(st.integers(0, 2**40))
    return SessionStep(
        session_id=session_id,
        start=draw(st.integers(0, 5000)),
        token_ids=np.arange(draw(st.integers(1, 4)), dtype=np.int32),
        params=draw(sampling_params() if params is None else params),
        tree=draw(trees(**of_trees) if tree is None else tree),
        judged=draw(st.sampled_from([True, True, True, False])),
    )


def packed_logits(steps, entropy, *, vocab=VOCAB, coarse=False):
    """Logits [rows, vocab]; `coarse` makes many exact ties."""
    rng = np.random.default_rng(entropy)
    logits = rng.normal(0, 2, (sum(step.num_judged_rows for step in steps), vocab)).astype(np.float32)
    return torch.from_numpy(np.round(logits) if coarse else logits)


def split(steps, logits):
    """Pair each judged step with its own rows as NumPy."""
    first, pairs = 0, []
    for step in steps:
        if step.judged:
            pairs.append((step, logits[first : first + step.num_judged_rows].numpy()))
            first += step.num_judged_rows
    return pairs
