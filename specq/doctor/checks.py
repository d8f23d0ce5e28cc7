"""One check of the doctor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

OK, NOTE, WRONG = "ok", "note", "wrong"


@dataclass(frozen=True, slots=True)
class Check:
    """The subject of a check, its state (OK, NOTE or WRONG), the finding, and any action."""

    name: str
    status: str
    found: str
    advice: str = ""


def is_sound(checks: Iterable[Check]) -> bool:
    """Return whether no check is WRONG."""
    return all(check.status != WRONG for check in checks)


def megabytes(num_bytes: float) -> str:
    """Return a number of bytes as text."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"
