"""Hypothesis strategies for parameters, trees and steps. Also logits for steps, and a comparison with naive judges."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specq.protocol import DraftDistributions, Float32Array, SamplingParams, SessionStep, Tree
from specq.testing.oracle import Outcome
from specq.verification.judge import judge

VOCAB = 12

# Made once, since making and checking a Hypothesis strategy takes longer than a draw.
_TEMPERATURES = st.sampled_from([0.0, 0.0, 0.3, 0.8, 1.0, 2.5])
_TOP_KS = st.sampled_from([0, 0, 1, 3, 5, 40])
_TOP_PS = st.sampled_from([1.0, 1.0, 0.05, 0.5, 0.9, 0.999])
_MIN_PS = st.sampled_from([0.0, 0.0, 0.02, 0.3, 1.0])
_SEEDS = st.integers(0, 2**63 - 1)
_BARS = st.sampled_from([0.0, 0.02, 0.1, 0.3, 1.0])
_ENTROPIES = st.integers(0, 2**32)
_SESSION_IDS = st.integers(0, 2**40)
_STARTS = st.integers(0, 5000)
_NUM_TOKENS = st.integers(1, 4)
_IS_JUDGED = st.sampled_from([True, True, True, False])

Naive = Callable[[SessionStep, Float32Array], Outcome]


@st.composite
def sampling_params(draw: st.DrawFn, /, strategy: str = "deterministic") -> SamplingParams:
    """Draw parameters of one strategy."""
    return SamplingParams(
        temperature=draw(_TEMPERATURES),
        top_k=draw(_TOP_KS),
        top_p=draw(_TOP_PS),
        min_p=draw(_MIN_PS),
        seed=draw(_SEEDS),
        strategy=strategy,
    ).validate()


@st.composite
def params_of(draw: st.DrawFn, /, names: Sequence[str]) -> SamplingParams:
    """Draw parameters of one of the named strategies, with the parameters of single strategies."""
    params = draw(sampling_params(strategy=draw(st.sampled_from(names))))
    return replace(params, threshold=draw(_BARS), typical_eps=draw(_BARS))


@cache
def _nodes(vocab: int, max_nodes: int) -> st.SearchStrategy[list[int]]:
    """Return the Hypothesis strategy for lists of nodes. A node is a parent place and a token, as one number."""
    return st.lists(st.integers(0, (max_nodes + 1) * vocab - 1), max_size=max_nodes)


@cache
def _up_to(largest: int) -> st.SearchStrategy[int]:
    return st.integers(1, largest)


@st.composite
def trees(draw: st.DrawFn, /, vocab: int = VOCAB, max_nodes: int = 10) -> Tree:
    """Draw trees without distributions."""
    parents, tokens = list[int](), list[int]()
    for node in draw(_nodes(vocab, max_nodes)):
        parent, token = node // vocab % (len(parents) + 1) - 1, node % vocab
        if (parent, token) not in zip(parents, tokens, strict=True):
            parents.append(parent)
            tokens.append(token)
    return Tree(np.array(tokens, np.int32), np.array(parents, np.int32), np.zeros(len(parents), np.float32))


@st.composite
def sampled_trees(draw: st.DrawFn, /, vocab: int = VOCAB, **of_trees: Any) -> Tree:
    """Draw trees with some sampled nodes. Each group has a distribution that gives its sampled members weight."""
    tree = draw(trees(vocab=vocab, **of_trees))
    rng = np.random.default_rng(draw(_ENTROPIES))
    parents = np.unique(tree.parents)
    size = draw(_up_to(vocab))
    drawn = [rng.permutation(vocab)[:size] for _ in parents]
    ids = np.array(drawn, np.int32).reshape(len(parents), size)
    weights = rng.integers(0, 65536, ids.shape) >> rng.integers(0, 17, ids.shape)
    ids = np.where(weights > 0, ids, -1).astype(np.int32)
    rows = np.searchsorted(parents, tree.parents)
    is_named = (ids[rows] == tree.token_ids[:, None]).any(1) & (rng.random(tree.num_nodes) < 0.8)
    distributions = DraftDistributions(ids, weights.astype(np.uint16), np.where(is_named, rows, -1).astype(np.int32))
    return replace(tree, distributions=distributions)


@st.composite
def steps(
    draw: st.DrawFn,
    /,
    params: st.SearchStrategy[SamplingParams] | None = None,
    tree: st.SearchStrategy[Tree] | None = None,
    **of_trees: Any,
) -> SessionStep:
    """Draw a session's part in a forward pass."""
    return SessionStep(
        session_id=draw(_SESSION_IDS),
        start=draw(_STARTS),
        token_ids=np.arange(draw(_NUM_TOKENS), dtype=np.int32),
        params=draw(sampling_params() if params is None else params),
        tree=draw(trees(**of_trees) if tree is None else tree),
        judged=draw(_IS_JUDGED),
    )


def packed_logits(
    steps: Sequence[SessionStep], entropy: int, *, vocab: int = VOCAB, coarse: bool = False
) -> torch.Tensor:
    """Return logits [rows, vocab]. `coarse` makes many exact ties."""
    rng = np.random.default_rng(entropy)
    logits = rng.normal(0, 2, (sum(step.num_judged_rows for step in steps), vocab)).astype(np.float32)
    return torch.from_numpy(np.round(logits) if coarse else logits)


def split(steps: Sequence[SessionStep], logits: torch.Tensor) -> list[tuple[SessionStep, Float32Array]]:
    """Pair each judged step with its own rows as NumPy."""
    first, pairs = 0, []
    for step in steps:
        if step.judged:
            pairs.append((step, logits[first : first + step.num_judged_rows].numpy()))
            first += step.num_judged_rows
    return pairs


def check_against_naive(naive: Mapping[str, Naive], max_examples: int = 100) -> None:
    """Judge mixed batches of the named strategies, and compare each session with its naive judge."""

    @settings(max_examples=max_examples, deadline=None)
    @given(st.lists(steps(params=params_of([*naive]), tree=sampled_trees()), max_size=4), st.integers(0, 2**32))
    def check(batch: list[SessionStep], entropy: int) -> None:
        logits = packed_logits(batch, entropy)
        expected = [naive[step.params.strategy](step, rows) for step, rows in split(batch, logits)]
        actual = [(j.path, j.token_ids.tolist()) for j in judge(batch, logits)]
        assert [(tuple(path), [int(token) for token in tokens]) for path, tokens in expected] == actual

    check()
