"""The one rule against fixed draft lengths."""

import pytest

from tests.simulate.fixed_lengths import SCENARIO, compare

BRIEF = SCENARIO | {"traffic": {"output_tokens": 64, "warm_s": 1, "seconds": 3}}


@pytest.mark.slow
@pytest.mark.parametrize(("sessions", "drafters"), [(1, 1), (8, 2)])
def test_the_rule_is_as_good_as_the_best_fixed_length(sessions, drafters):
    """And no worse than no drafts; the fixed lengths do differ."""
    found = compare(BRIEF, sessions, drafters, lengths=(1, 4, 8))
    assert found["to_best"] >= 0.97
    assert found["to_plain"] >= 0.98
    assert len(set(found["fixed"].values())) == 3
