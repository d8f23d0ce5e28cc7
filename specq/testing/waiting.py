"""Waiting for what other processes and threads do."""

from __future__ import annotations

import time
from collections.abc import Callable

LOOK_S = 0.005


def wait_until(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    """Look until the condition holds; fails after the limit."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it never came about"
        time.sleep(LOOK_S)
