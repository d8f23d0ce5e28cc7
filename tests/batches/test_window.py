"""The completion window, and the priority that follows from it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specq.batches.window import FIRST_PRIORITY, LONGEST_S, priority_of, read_window
from tests.each import each


@each(("text", "seconds"), [("24h", 86_400), ("30m", 1800), ("1s", 1), ("7d", 7 * 86_400), ("30d", LONGEST_S)])
def test_windows(text, seconds):
    assert read_window(text) == seconds


@each("text", ["", "24", "h", "0h", "-1h", "1.5h", "24 h", "24H", "31d", "1w", "٣h", "24h\n", "99999999999h"])
def test_other_texts_are_no_windows(text):
    assert read_window(text) is None


@given(st.floats(1, LONGEST_S), st.floats(0, 1), st.floats(0, 1))
def test_priority_only_rises(window_s, one, other):
    """From FIRST_PRIORITY to 0."""
    early, late = sorted((one, other))
    before, after = priority_of(window_s * (1 - early), window_s), priority_of(window_s * (1 - late), window_s)

    assert FIRST_PRIORITY <= before <= after <= 0


def test_priority_at_both_ends():
    assert priority_of(100, 100) == FIRST_PRIORITY
    assert priority_of(10, 100) == 0
    assert priority_of(0, 100) == 0
    assert priority_of(55, 100) == FIRST_PRIORITY / 2


def test_a_key_with_a_low_limit():
    assert priority_of(0, 100, most=-200) == -200
    assert priority_of(100, 100, most=50) == FIRST_PRIORITY
