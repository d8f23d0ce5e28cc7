"""The statistics of speculation in a result."""

from specq.client.result import Result, internal_counts, speculation_stats
from tests.each import each

SHAPE = {"drafted_rounds": 4, "leaves": 10, "depths": 13}


def test_rates_follow_from_the_counts():
    """Acceptance per verified node, length per round with the target's own token; other counts stand elsewhere."""
    counts = {"rounds": 4, "drafted": 30, "draft_tokens": 8, "accepted_tokens": 6, "hits": 2, "min_accept_probs": 600}
    stats = speculation_stats(counts)
    assert (stats["acceptance_rate"], stats["mean_accepted_length"]) == (0.75, 2.5)
    assert stats["accepted_tokens"] == 6
    derived = {"hit_rate": 0.5, "wasted_rows": 2, "min_accept_prob": 0.15}
    assert internal_counts(counts) == {"drafted": 30, "hits": 2, "min_accept_probs": 600, **derived}


def test_the_shape_of_the_trees():
    """Leaves and depth per round that verified something, not per round."""
    stats = speculation_stats({"rounds": 100, **SHAPE})
    assert (stats["candidates"], stats["depth"]) == (2.5, 3.25)
    assert not set(SHAPE) & set(stats) - {"depth"}


def test_without_drafts_the_acceptance_rate_is_defined():
    """It is 0. There is no division by zero."""
    stats = speculation_stats(dict.fromkeys(("rounds", "draft_tokens", "accepted_tokens", *SHAPE), 0))
    assert {stats[name] for name in ("acceptance_rate", "mean_accepted_length", "candidates", "depth")} == {0.0}


@each("missing", SHAPE)
def test_a_shape_that_was_not_counted(missing):
    """Of a verifier that does not count it nothing is claimed."""
    stats = speculation_stats({name: count for name, count in SHAPE.items() if name != missing})
    assert not {"candidates", "depth"} & set(stats)


def test_a_line_has_an_index_where_there_are_several():
    """Beside the id; a single completion has none."""
    assert list(Result(1, "a", index=0).to_dict())[:3] == ["id", "index", "prompt"]
    assert "index" not in Result(1, "a").to_dict()
