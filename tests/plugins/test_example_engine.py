"""An engine of another package does what every engine of our table must do."""

import pytest

from specq.engines import ENGINES
from specq.testing.checkpoints import make_checkpoint
from tests.engines.test_conformance import (  # noqa: F401 - they run here with the engine below
    test_a_session_opens_once_and_closes_quietly,
    test_a_step_of_only_prefill_judges_nothing,
    test_drafts_change_speed_and_never_text,
    test_free_slots_come_back,
    test_open_leaves_at_least_the_last_token_to_compute,
    test_step_times_has_one_time_a_size,
    test_too_many_rows_are_refused_with_nothing_changed,
)


@pytest.fixture
def engine(plugin, tmp_path):
    return ENGINES.resolve("counting").make(str(make_checkpoint("llama-bf16", tmp_path)), kv_slots=512)
