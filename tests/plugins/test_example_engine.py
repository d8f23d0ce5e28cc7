"""An engine of another package does what every engine of our table must do."""

import pytest

from specq.drafting import DRAFTERS
from specq.engines import ENGINES
from specq.testing import EngineConformance, World, make_checkpoint


class TestCounting(EngineConformance):
    @pytest.fixture
    def engine(self, plugin, tmp_path):
        return ENGINES.resolve("counting").make(str(make_checkpoint("llama-bf16", tmp_path)), kv_slots=512)


@pytest.mark.usefixtures("plugin")
def test_it_serves_jobs_with_the_proposer_and_strategy_of_its_package(tmp_path):
    """The text counts, and most of it was drafted."""
    world = World(pass_s=0.0001)
    world.add_verifier(engine=ENGINES.resolve("counting").make(str(make_checkpoint("llama-bf16", tmp_path))))
    world.add_drafter(proposer=DRAFTERS.resolve("counting").make())
    job = world.submit(1, [5], max_tokens=40, strategy="cautious")
    world.run_until(lambda: job.finish)
    assert job.token_ids == list(range(6, 46))
    assert job.stats["accepted_tokens"] > 20
