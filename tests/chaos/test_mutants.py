"""Each planted bug is caught by a schedule: the seeds below do; if the code moves on and they no longer do, others
must."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from specq.protocol.errors import EngineError
from tests.chaos.mutants import MUTANTS
from tests.chaos.schedule import play

CATCHING = {
    "no_fencing_by_epoch": (41, 50, 52),
    "late_verdict_of_an_expired_verifier": (2, 5),
    "no_resend": (2, 5),
    "no_reopening": (129, 138),
    "no_replay_of_a_lost_verdict": (23, 45),
    "dead_verifiers_keep_their_sessions": (2, 5),
    "open_keeps_the_old_session": (158, 293),
}
MOST_SEEDS = 100


@pytest.mark.parametrize("plant", MUTANTS, ids=lambda plant: plant.__name__)
def test_planted_bugs_are_caught(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the bug the same schedules go well: see test_schedules.py and `make chaos`."""
    seeds = dict.fromkeys([*CATCHING.get(plant.__name__, ()), *range(MOST_SEEDS)])
    plant(monkeypatch)
    for seed in seeds:
        try:
            play(seed)
        except (AssertionError, EngineError):
            return
    pytest.fail(f"{plant.__name__} is not caught by {len(seeds)} schedules")
