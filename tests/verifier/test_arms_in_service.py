"""Which sources of drafts a verifier uses, where steps and drafts take time: by a virtual clock, with a device beside the host."""

from __future__ import annotations

import pytest

from specq.verifier.arms import COLOCATED
from tests.verifier.timed_service import TimedService, gpu


def rate_of(service: TimedService, mode: str, num_sessions: int) -> float:
    """Return the tokens a second of a mode that measures nothing, once it has settled."""
    service.mode = mode
    service.serve(0.3, num_sessions)
    return service.serve(max(1.0, 6 / num_sessions), num_sessions).rate


@pytest.mark.parametrize("num_sessions", [1, 8, 32])
def test_drafts_that_pay_more_than_overlapped_steps_are_used(num_sessions: int) -> None:
    """Plain steps overlap and drafted ones do not; after 3 s the default is what forced drafts are. What overlapped steps take says nothing of
    what a node costs: otherwise drafts become shallow after each plain window, and lose."""
    service = gpu(suffix=0)
    plain, forced = (rate_of(service, mode, num_sessions) for mode in ("plain", "sync"))
    assert forced > 1.05 * plain
    service.mode = "async"
    service.serve(3.0, num_sessions)
    served = service.serve(max(1.5, 6 / num_sessions), num_sessions)
    assert served.rate > 0.93 * forced
    assert served.share(COLOCATED) > 0.9


@pytest.mark.parametrize("num_sessions", [8, 64])
def test_drafts_that_lose_to_overlapped_steps_fall_silent(num_sessions: int) -> None:
    """Of which two thirds are wrong: within 3 s, and from then on the default is plain decoding."""
    service = gpu(chance=0.3, suffix=0)
    plain = rate_of(service, "plain", num_sessions)
    service.mode = "async"
    service.serve(3.0, num_sessions)
    assert service.serve(1.5, num_sessions).rate > 0.97 * plain
