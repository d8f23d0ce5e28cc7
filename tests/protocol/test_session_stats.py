"""Counts by name: the names of the version before are aliases, with a warning."""

from __future__ import annotations

import pytest

from specq.protocol import RenamedCounts
from tests.each import each


def test_an_old_name_is_an_alias_with_a_warning() -> None:
    counts = RenamedCounts({"min_accept_prob": 0.25, "drafted": 3})
    assert counts["drafted"] == 3
    with pytest.warns(FutureWarning, match="worth is now min_accept_prob"):
        assert counts["worth"] == 0.25
    assert (list(counts), counts.get("worth"), "worth" in counts) == (["min_accept_prob", "drafted"], None, False)


@each("name", ["worths", "nonsense"])
def test_what_was_not_counted_is_missing_under_any_name(name: str) -> None:
    with pytest.raises(KeyError, match=name):
        RenamedCounts({"drafted": 3})[name]


def test_stored_counts_are_read_under_new_names() -> None:
    assert RenamedCounts.renamed({"worths": 4, "hits": 1}) == {"min_accept_probs": 4, "hits": 1}
