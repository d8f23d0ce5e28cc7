"""How deep lists and objects of JSON from outside may be nested: what writes it again, or shows it, allows for some 250
levels."""

from __future__ import annotations

from typing import Any

MOST_LEVELS = 100


def is_too_deep(data: bytes, value: Any) -> bool:
    """Return whether JSON, `value` as it was read from `data`, has lists and objects in more than MOST_LEVELS
    levels."""
    if data.count(b"[") + data.count(b"{") <= MOST_LEVELS:
        return False
    level = [value]
    for _ in range(MOST_LEVELS + 1):
        inner = [one for one in level if type(one) in (dict, list)]
        level = [entry for one in inner for entry in (one.values() if type(one) is dict else one)]
        if not inner:
            return False
    return True
