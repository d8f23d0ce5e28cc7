"""The rule by which everything is chosen: most tokens by seconds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specq.verifier.models.goodput import best_by_goodput

POSITIVE = st.floats(0.01, 100.0)


def test_tokens_by_seconds_decide_and_neither_alone() -> None:
    assert best_by_goodput([1.0, 3.0, 4.0], [1.0, 2.0, 4.0]) == (1, 1.5)


def test_of_several_the_first_is_best() -> None:
    assert best_by_goodput([1.0, 2.0, 2.0, 4.0], [1.0, 1.0, 1.0, 2.0]) == (1, 2.0)


def test_whole_numbers_are_no_whole_quotients() -> None:
    assert best_by_goodput([1, 3], np.array([1, 2])) == (1, 1.5)


@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=9))
def test_no_other_choice_has_more_goodput(choices: list[tuple[float, float]]) -> None:
    tokens, seconds = zip(*choices, strict=True)
    best, goodput = best_by_goodput(tokens, seconds)
    rates = [own / other for own, other in choices]
    assert goodput == rates[best] == max(rates)
    assert best == rates.index(max(rates))


@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=9), st.floats(0.1, 10.0))
def test_units_of_time_do_not_change_the_choice(choices: list[tuple[float, float]], factor: float) -> None:
    tokens, seconds = (np.array(one) for one in zip(*choices, strict=True))
    best, goodput = best_by_goodput(tokens, seconds)
    again, scaled = best_by_goodput(tokens, factor * seconds)
    assert scaled * factor == pytest.approx(goodput)
    assert tokens[again] / seconds[again] == pytest.approx(tokens[best] / seconds[best])
