"""Waits for other processes and threads."""

from __future__ import annotations

import time
from collections.abc import Callable

LOOK_S = 0.005


def wait_until(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    """Wait until the condition holds.

    Raises AssertionError after `limit_s` seconds.
    """
    end, pause_s = time.monotonic() + limit_s, LOOK_S / 16
    while not condition():
        assert time.monotonic() < end, "it never came about"
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LOOK_S)
