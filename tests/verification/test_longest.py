"""Which of the accepted paths the lossy strategies take: the C function does what the plain rule does; planted bugs are
seen."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specq.verification import host_kernels
from specq.verification.judgements import CORRECTION, Judgements
from specq.verification.longest import longest_path, longest_paths
from tests.verification.mutants import mutated_kernels

NEEDS_COMPILER = pytest.mark.skipif(host_kernels.kernels() is None, reason="no C compiler")


@st.composite
def judged_trees(draw):
    """The parents, the accepted nodes and the probabilities of a tree; probabilities are often equal."""
    parents = [draw(st.integers(-1, i - 1)) for i in range(draw(st.integers(0, 12)))]
    accepted = [draw(st.booleans()) for _ in parents]
    probs = [draw(st.sampled_from([0.25, 0.5, 1.0])) for _ in parents]
    return np.array(parents, np.int32), np.array(accepted, np.bool_), np.array(probs)


def of_all(trees):
    """Where each tree's nodes begin, and the arrays of all trees."""
    firsts = np.cumsum([0, *(len(parents) for parents, _, _ in trees)])
    return firsts, *(np.concatenate(parts) for parts in zip(*trees, strict=True))


def is_as_one_by_one(trees):
    firsts, *arrays = of_all(trees)
    found = longest_paths(firsts, *arrays)
    expected = [longest_path(*tree) for tree in trees]
    are_as_long = found.lengths.tolist() == [len(path) for path in expected]
    return are_as_long and found.joined().tolist() == list(sum(expected, ()))


@NEEDS_COMPILER
@settings(max_examples=300, deadline=None)
@given(st.lists(judged_trees(), min_size=1, max_size=5))
def test_paths_of_all_trees_are_those_of_each(trees):
    assert is_as_one_by_one(trees)


def test_without_a_compiler_too(monkeypatch):
    monkeypatch.setattr(host_kernels, "kernels", lambda: None)
    assert is_as_one_by_one(some_trees())


def some_trees():
    rng = np.random.default_rng(5)
    found = []
    for size in rng.integers(0, 12, 200):
        parents = np.array([rng.integers(-1, i) for i in range(size)], np.int32)
        found.append((parents, rng.random(size) < 0.7, rng.choice([0.25, 0.5, 1], size)))
    return found


IN_C = {
    "a path through a rejected node": ("accepted[node] && depths[parent] >= 0", "accepted[node]"),
    "the last of equals": ("likelihoods[i] > likelihoods[best]", "likelihoods[i] >= likelihoods[best]"),
    "the first of the longest": (" || (depths[i] == depths[best] && likelihoods[i] > likelihoods[best])", ""),
    "the likelihood of the last node alone": ("likelihoods[parent] + log(probs[node])", "log(probs[node])"),
}


@pytest.mark.slow
@NEEDS_COMPILER
@pytest.mark.parametrize("name", IN_C)
def test_mutants(name, tmp_path, monkeypatch):
    built = mutated_kernels(tmp_path, monkeypatch, *IN_C[name])
    monkeypatch.setattr(host_kernels, "kernels", lambda: built)
    assert not is_as_one_by_one(some_trees())


def test_judgements_of_paths():
    """Tokens of the accepted nodes, then each session's last one; a session without a tree, one that accepts
    nothing."""
    trees = [
        (np.array([-1, 0, -1], np.int32), np.array([False, True, True]), np.ones(3)),
        (np.zeros(0, np.int32), np.zeros(0, np.bool_), np.zeros(0)),
        (np.array([-1, -1, 1], np.int32), np.array([True, True, True]), np.ones(3)),
        (np.array([-1], np.int32), np.array([False]), np.ones(1)),
    ]
    firsts, *arrays = of_all(trees)
    drafted = np.arange(10, 17)
    found = Judgements.of_paths([4, 5, 6, 7], longest_paths(firsts, *arrays), drafted, np.array([1, 2, 3, 4], np.int32))
    assert [(one.session_id, one.path, one.token_ids.tolist()) for one in found] == [
        (4, (2,), [12, 1]), (5, (), [2]), (6, (1, 2), [14, 15, 3]), (7, (), [4]),
    ]  # fmt: skip
    assert found.nodes[found.num_tokens.cumsum() - 1].tolist() == [CORRECTION] * 4
