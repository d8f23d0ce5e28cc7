"""A proposer of another package does what every proposer of our table must do."""

import pytest

from specq.proposers import PROPOSERS
from tests.proposers.test_conformance import (  # noqa: F401 - they run here with the proposer below
    test_a_correction_starts_anew,
    test_answers_come_in_order_and_within_bounds,
    test_closing_is_quiet_and_allows_opening_again,
    test_descendants_of_the_last_committed_node_stay_valid,
    test_grown_ahead_or_one_commit_at_a_time_gives_the_same_drafts,
    test_siblings_differ,
)


@pytest.fixture
def proposer(plugin):
    return PROPOSERS.resolve("counting").make()
