"""How long drafts may keep the host between two steps."""

import pytest

from specq.verifier.sources.mailbox import LEAST_S, WAITED_PART, MailTime

STEP_S, HOST_S = 0.005, 0.002  # a step on the device, and what the host does for one besides


def limit_after(mail: MailTime, num_steps: int, wanted_s: float) -> float:
    """Let steps be launched early while drafts would take so long each time; return what they take in the end."""
    used = 0.0
    for _ in range(num_steps):
        used = min(wanted_s, mail.limit_s)
        host_s = HOST_S + used
        mail.learn(max(STEP_S, host_s), used, max(STEP_S - host_s, 0.0))
    return used


def test_drafts_take_what_the_host_has_to_spare() -> None:
    """However many come: the step takes no longer, and they have a good part of the time in which the host would
    wait."""
    mail = MailTime(overlaps=True)
    used = limit_after(mail, 50, 1.0)
    assert 0.4 * (STEP_S - HOST_S) < used <= STEP_S - HOST_S
    assert limit_after(mail, 50, 0.0) == 0.0
    assert mail.limit_s > 0.15 * STEP_S, "they begin again with a fair part"


def test_drafts_that_make_the_device_wait_have_less_time_at_once() -> None:
    mail = MailTime(overlaps=True)
    mail.learn(0.012, 0.01, 0.0)
    assert mail.limit_s == pytest.approx(0.005)
    for _ in range(20):
        mail.learn(0.005, mail.limit_s, 0.0)
    assert 0 < mail.limit_s < 0.001, "the host alone takes as long as the device"


def test_where_no_step_is_in_flight_a_step_is_the_measure() -> None:
    """Of a device that stands still meanwhile, a part of it."""
    device, host = MailTime(overlaps=True), MailTime(overlaps=False)
    for mail in (device, host):
        mail.learn(0.02, 0.0, None)
    assert (device.limit_s, host.limit_s) == (WAITED_PART * 0.02, 0.02)
    host.learn(0.001, 0.0, None)
    assert host.limit_s == LEAST_S
