"""One thing that the doctor looked at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

OK, NOTE, WRONG = "ok", "note", "wrong"


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, how it is (OK, NOTE or WRONG), what was found, and what to do about it, if anything."""

    name: str
    status: str
    found: str
    advice: str = ""


def is_sound(checks: Iterable[Check]) -> bool:
    """Return whether nothing is wrong."""
    return all(check.status != WRONG for check in checks)


def megabytes(num_bytes: float) -> str:
    """Return a number of bytes in words."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"
