"""Trees that grow on a head's device are those of the host, whichever arithmetic chooses their nodes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specq.drafting.trees import device_trees
from specq.drafting.trees.device_trees import PLANES, RecordedPart, growing, likeliest_on_device, possible_sizes
from specq.drafting.trees.interface import Grown
from specq.drafting.trees.ranked import Ranked, likeliest_nodes
from tests.devices import HAS_CUDA, NEEDS_CUDA, NEEDS_INTERPRETER

CASES = [(1, 7, 10, (5, 4, 4, 4, 4, 4, 3)), (3, 4, 10, (2, 1, 1, 1)), (2, 3, 3, (12, 20, 7)), (4, 2, 5, (1, 1))]
Grow = Callable[[torch.Tensor, torch.Tensor, Sequence[int]], torch.Tensor]


def torch_only(tokens: torch.Tensor, scores: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    return likeliest_on_device(tokens, scores, sizes, torch.tensor(sizes, dtype=torch.int32))


def kernel(tokens: torch.Tensor, scores: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    from specq.drafting.trees.gpu_kernels import grow_ranked

    device = "cuda" if HAS_CUDA else "cpu"
    there = torch.tensor(sizes, dtype=torch.int32, device=device)
    return grow_ranked(tokens.to(device), scores.to(device), sizes, there).cpu()


@pytest.fixture(
    params=[
        pytest.param(torch_only, id="torch"),
        pytest.param(kernel, id="kernel", marks=NEEDS_CUDA if HAS_CUDA else NEEDS_INTERPRETER),
    ]
)
def grow(request: pytest.FixtureRequest) -> Grow:
    found: Grow = request.param
    return found


def predictions(num_trees: int, num_places: int, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(num_trees, num_places, 40, generator=random)
    scores, tokens = logits.log_softmax(-1).topk(count)
    return tokens.to(torch.int32), scores


def read(nodes: torch.Tensor, sizes: Sequence[int]) -> Grown:
    every = np.arange(nodes.shape[1])
    part = RecordedPart(every, nodes[:PLANES].numpy, nodes)
    return growing([part], np.arange(len(sizes)).repeat(sizes)).collect()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_the_nodes_are_those_of_the_host(grow: Grow, case: tuple[int, int, int, tuple[int, ...]], seed: int) -> None:
    """Tokens, parents, scores and their order; a level has no more nodes than there are children."""
    num_trees, num_places, count, level_sizes = case
    tokens, scores = predictions(num_trees, num_places, count, seed)
    sizes = possible_sizes(level_sizes, count)
    found, expected = (
        read(grow(tokens, scores, sizes), sizes),
        likeliest_nodes(Ranked(tokens.numpy(), scores.numpy()), level_sizes),
    )
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("case", CASES)
def test_lines_lead_to_the_root(grow: Grow, case: tuple[int, int, int, tuple[int, ...]]) -> None:
    """By level: the ancestor that the parents lead to, and at its own level the node itself."""
    tokens, scores = predictions(*case[:3], seed=9)
    sizes = possible_sizes(case[3], case[2])
    nodes = grow(tokens, scores, sizes)
    grown, lines = read(nodes, sizes), nodes[PLANES:].numpy()
    for tree, node in np.ndindex(*grown.token_ids.shape):
        at, line = node, list[int]()
        while at >= 0:
            line.insert(0, at)
            at = int(grown.parents[tree, at])
        assert lines[: len(line), tree, node].tolist() == line


@pytest.mark.parametrize("worst", [-np.inf, np.nan])
def test_what_has_no_score_comes_last(grow: Grow, worst: float) -> None:
    """A node below it is none, and has no effect on the others."""
    tokens, scores = predictions(2, 3, 10, seed=4)
    scores[0, 1, :8] = worst
    sizes = (3, 4, 4)
    grown, whole = (read(grow(tokens[own], scores[own], sizes), sizes) for own in (slice(0, 2), slice(1, 2)))
    second, third = grown.reach[0][grown.depths == 1], grown.reach[0][grown.depths == 2]
    assert np.isfinite(second).all(), "six of its children have scores"
    assert np.isfinite(third).all()
    assert set(grown.token_ids[0][grown.depths == 1]) <= set(tokens[0, 1, 8:].tolist())
    np.testing.assert_array_equal(grown.token_ids[1], whole.token_ids[0])
    scores[0, 2] = worst
    last = read(grow(tokens, scores, sizes), sizes)
    assert not np.isfinite(last.reach[0][last.depths == 2]).any()
    assert np.isfinite(last.reach[1]).all()


def test_a_device_with_kernels_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    used = list[Sequence[int]]()
    stand_in = SimpleNamespace(grow_ranked=lambda _tokens, _scores, sizes, _there: used.append(sizes))
    monkeypatch.setitem(sys.modules, "specq.drafting.trees.gpu_kernels", stand_in)  # type: ignore[arg-type]
    monkeypatch.setattr(device_trees, "runs_triton", lambda _device: True)
    torch_only(*predictions(1, 2, 5, 0), (2, 2))
    assert used == [(2, 2)]
