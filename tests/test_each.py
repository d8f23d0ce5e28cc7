"""Rows in one case check as much as cases of their own."""

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.each import each


def test_each_row_that_fails_is_reported_and_has_files_and_patches_of_its_own(tmp_path, monkeypatch):
    @each(("left", "right"), [(1, 1), (1, 2), (2, 2), (2, 3)])
    def rows(left, right, tmp_path, monkeypatch):
        (tmp_path / "a").touch(exist_ok=False)
        monkeypatch.setattr(inspect, "of_a_row", left, raising=False)
        with pytest.raises(ZeroDivisionError):
            _ = 1 / (left - right)

    with pytest.raises(BaseExceptionGroup, match="2 of 4 rows of rows") as raised:
        rows(tmp_path=tmp_path, monkeypatch=monkeypatch)
    notes = [error.__notes__ for error in raised.value.exceptions]
    assert notes == [["row 1: {'left': 1, 'right': 2}"], ["row 3: {'left': 2, 'right': 3}"]]
    assert not hasattr(inspect, "of_a_row")


def test_marks_and_fixtures_are_kept():
    @each("value", [1])
    @pytest.mark.slow
    @given(st.none())
    def rows(self, value, tmp_path, nothing):
        """Say nothing."""

    assert [mark.name for mark in rows.pytestmark] == ["slow", "hypothesis"]
    assert list(inspect.signature(rows).parameters) == ["self", "tmp_path"]
    assert (rows.__name__, rows.__doc__) == ("rows", "Say nothing.")


def test_time_that_is_over_ends_all_rows():
    seen = []

    @each("value", [1, 2])
    def rows(value):
        seen.append(value)
        pytest.fail("Timeout (>120.0s) from pytest-timeout.")

    with pytest.raises(pytest.fail.Exception, match="Timeout"):
        rows()
    assert seen == [1]
