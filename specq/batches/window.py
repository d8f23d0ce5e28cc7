"""The time that a batch has, and the priority of its jobs that follows from it; pure."""

from __future__ import annotations

import re

FIRST_PRIORITY = -100  # of a batch's jobs at its begin
LAST_PART = 0.1  # of the window: from then on the priority is that of ordinary requests
LONGEST_S = 30 * 86_400
_WINDOW = re.compile(r"([1-9][0-9]{0,8})([smhd])", re.ASCII)
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def read_window(text: str) -> int | None:
    """Return the seconds of a `completion_window`, as 24h, 90m, 7d or 30s. None: it is not one, or is too long."""
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0
    return seconds if 0 < seconds <= LONGEST_S else None


def priority_of(left_s: float, window_s: float, most: int | None = None) -> int:
    """Return the priority of a line that begins now.

    It rises from FIRST_PRIORITY to 0, and is 0 in the last tenth of the window.

    left_s    seconds until the window ends.
    window_s  seconds of the whole window.
    most      the highest priority that the owner may claim; None: any.
    """
    early = min(max((left_s / window_s - LAST_PART) / (1 - LAST_PART), 0.0), 1.0)
    priority = round(FIRST_PRIORITY * early)
    return priority if most is None else min(priority, most)
