"""Prompt lookup: what followed the last tokens when they stood in the text before."""

import math

from hypothesis import given
from hypothesis import strategies as st

from specq.proposers.ngram_index import MAX_MATCH, MAX_PLACES, MIN_MATCH, PREDICTED, NgramIndex


def test_the_longest_match_wins_and_then_the_most_recent() -> None:
    """Three places follow (1, 2); the one before which 9 stands too agrees longest."""
    index = NgramIndex([9, 1, 2, 3, 1, 2, 4, 1, 2, 5, 9, 1, 2])
    assert [index.token_ids[place] for _, place in index.matches()] == [3, 5, 4]
    assert index.followers([], 2)[0][0] == 3
    index.token_ids.append(7)
    assert index.matches() == []
    assert [token for token, _ in index.followers([1, 2], 9)] == [7, 5, 4, 3]


def test_a_text_that_repeats_goes_on_with_itself() -> None:
    """A chain may be longer than what stands in the text."""
    chain, score = NgramIndex([1, 2, 3, 1, 2]).chain(8)
    assert chain == [3, 1, 2, 3, 1, 2, 3, 1]
    assert score < 0


def test_nothing_is_said_of_what_was_never_seen() -> None:
    """Neither of an empty text, nor of a new pair."""
    assert NgramIndex([]).chain(4) == ([], 0.0)
    assert NgramIndex([1, 2, 3]).chain(4) == ([], 0.0)
    assert NgramIndex([1]).followers([2], 3) == []


def _matches(tokens: list[int], beyond: list[int]) -> list[tuple[int, int]]:
    """The same by looking at every place."""
    whole = [*tokens, *beyond]
    found = []
    for place in range(MIN_MATCH, len(tokens)):
        length = 0
        while length < min(MAX_MATCH, place, len(whole)) and tokens[place - 1 - length] == whole[-1 - length]:
            length += 1
        if length >= MIN_MATCH:
            found.append((length, place))
    return sorted(sorted(found, key=lambda match: -match[1])[:MAX_PLACES], reverse=True)


@given(st.lists(st.integers(0, 2), max_size=60), st.lists(st.integers(0, 2), max_size=5), st.integers(1, 60))
def test_the_index_finds_what_a_search_finds(tokens: list[int], beyond: list[int], first: int) -> None:
    """Also when the text grows between two looks."""
    index = NgramIndex(tokens[:first])
    index.matches()
    index.token_ids.extend(tokens[first:])
    assert index.matches(beyond) == _matches(tokens, beyond)
    for token, score in index.followers(beyond, 3):
        assert token in tokens
        assert score <= math.log(max(PREDICTED.values()))
