"""A proposer of another package does what every proposer of our table must do."""

import pytest

from specq.drafting import PROPOSERS
from specq.testing import ProposerConformance


class TestCounting(ProposerConformance):
    @pytest.fixture
    def proposer(self, plugin):
        return PROPOSERS.resolve("counting").make()
