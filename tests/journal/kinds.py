"""Where the tests make a journal of each kind: an address in a folder that is empty at first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

ADDRESSES: dict[str, Callable[[Path], str]] = {
    "sqlite": lambda folder: str(folder / "deep" / "broker.journal"),
}
