"""Where the tests make a journal of each kind: an address in a folder that is empty at first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


def _postgres(folder: Path) -> str:
    from tests.journal.cluster import running  # imports psycopg

    return running().new_database().address


ADDRESSES: dict[str, Callable[[Path], str]] = {
    "sqlite": lambda folder: str(folder / "deep" / "broker.journal"),
    "postgresql": _postgres,
}
SHARED = ("postgresql",)  # for several brokers
KINDS = [pytest.param(kind, marks=[pytest.mark.cluster] * (kind in SHARED)) for kind in sorted(ADDRESSES)]
