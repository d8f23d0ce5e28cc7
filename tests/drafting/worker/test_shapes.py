"""Shapes bound a tree: how many children each node gets."""

import pytest

from specq.drafting.worker.shapes import DEFAULT_DEPTH, SYNC_NODES, DraftShape, Path, budget_of, shape_of
from specq.protocol.errors import JobError
from specq.protocol.params import Speculation


def grown(shape: DraftShape, *, hit: bool = False) -> set[Path]:
    """Return the paths of all nodes of a tree that is grown to its bounds."""
    paths: set[Path] = set()
    level: list[Path] = [()]
    while level:
        children = [
            (*p, rank) for p in level if len(p) < shape.max_depth for rank in range(shape.num_children(p, hit=hit))
        ]
        paths.update(children)
        level = children
    return paths


def shape(**speculation: object) -> DraftShape:
    """Return the shape that a job with this speculation gets from a drafter with a fan-out of 3, 32 ahead."""
    return shape_of(Speculation.from_dict(speculation), fan_out=3, max_ahead=32)


def test_candidates_part_at_the_first_token() -> None:
    """N chains of K tokens, 5 if the job does not say."""
    assert grown(shape(num_candidates=2, max_depth=3)) == {(0,), (1,), (0, 0), (1, 0), (0, 0, 0), (1, 0, 0)}
    assert max(map(len, grown(shape(num_candidates=1)))) == DEFAULT_DEPTH


def test_a_static_tree_is_closed() -> None:
    """Prefixes and earlier siblings of its paths belong to it."""
    assert grown(shape(tree=[[1], [0, 0, 1]])) == {(0,), (1,), (0, 0), (0, 0, 0), (0, 0, 1)}


def test_the_drafters_bounds_are_the_default_of_a_job() -> None:
    """Best first, and never beyond the drafter's depth."""
    assert shape().max_depth == 32
    assert shape(max_depth=1000).max_depth == 32
    assert grown(shape(max_depth=2)) == {(a,) for a in range(3)} | {(a, b) for a in range(3) for b in range(3)}


def test_fixed_fan_outs_follow_the_last_rounds_outcome() -> None:
    """A chain with guesses at each of its tokens, each guess with a chain of its own, as long."""
    fixed = shape(fan_out_hit=[1, 2], fan_out_miss=[3], max_depth=2)
    chain = {(0,), (0, 0), (0, 0, 0)}
    assert grown(fixed, hit=True) == chain | {(0, 1), (0, 1, 0), (0, 1, 0, 0)}
    others = {(r, *(0,) * more) for r in (1, 2) for more in range(3)}
    assert grown(fixed, hit=False) == chain | others


def test_a_synchronous_tree_has_a_budget() -> None:
    """What is sent as a whole must end somewhere; fixed shapes end by themselves."""
    assert budget_of(Speculation(mode="sync")) == SYNC_NODES
    assert budget_of(Speculation(mode="sync", num_candidates=2)) == 0
    assert budget_of(Speculation(max_nodes=5)) == 5
    assert budget_of(Speculation()) == 0


@pytest.mark.parametrize(
    ("speculation", "message"),
    [
        ({"mode": "fast"}, "mode is 'fast', but must be one of async, sync, plain"),
        ({"tree": [[0], []]}, "non-empty paths"),
        ({"tree": [[0, -1]]}, "non-empty paths"),
        ({"tree": [[0]], "num_candidates": 2}, "tree and num_candidates are given together"),
        ({"num_candidates": 65}, "num_candidates is 65"),
        ({"candidate_temp": -0.5}, "or -1 for the job's"),
        ({"fan_out_hit": [1, -1]}, "fan_out_hit is"),
        ({"nodes": 3}, "unknown drafting parameter 'nodes'"),
    ],
)
def test_what_is_wrong_is_named(speculation: dict[str, object], message: str) -> None:
    """The name, the value and what is allowed."""
    with pytest.raises(JobError, match=message):
        Speculation.from_dict(speculation)
