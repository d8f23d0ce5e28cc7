"""An engine of another package does what every engine of our table must do."""

import pytest

from specq.engines import ENGINES
from specq.testing import EngineConformance, make_checkpoint


class TestCounting(EngineConformance):
    @pytest.fixture
    def engine(self, plugin, tmp_path):
        return ENGINES.resolve("counting").make(str(make_checkpoint("llama-bf16", tmp_path)), kv_slots=512)
