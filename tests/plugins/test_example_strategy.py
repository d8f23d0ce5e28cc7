"""A strategy of another package is judged beside ours, and keeps what it promises."""

import pytest

from specq.testing import StrategyConformance, check_against_naive, oracle


class TestCautious(StrategyConformance):
    @pytest.fixture
    def name(self, plugin):
        return "cautious"


@pytest.mark.usefixtures("plugin")
def test_it_says_what_deterministic_says_one_draft_at_a_time():
    def cautious(step, rows):
        path, tokens = oracle.deterministic(step, rows)
        return path[:1], tokens[:2]

    check_against_naive({"cautious": cautious, "greedy": oracle.greedy})
