"""A drafter of another package does what every drafter of our table must do."""

import pytest

from specq.drafting import DRAFTERS
from specq.testing import DrafterConformance


class TestCounting(DrafterConformance):
    @pytest.fixture
    def drafter(self, plugin):
        return DRAFTERS.resolve("counting").make()
