"""What versions of llguidance do differently. Verifiers of one MASK_VERSION give the same masks, or refuse a grammar.

Versions 1.7 to 1.9 give the same masks but for one keyword. Before 1.8, `multipleOf` forbids negative numbers.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import Any

from specq.protocol import JobError

NEGATIVE_MULTIPLES = (1, 8)


@cache
def installed() -> tuple[int, int]:
    """Return the installed version of llguidance."""
    major, minor, *_ = version("llguidance").split(".")
    return int(major), int(minor)


def check_version(schema: Any) -> None:
    """Raise JobError for a JSON schema (or what contains one) that the installed llguidance treats otherwise."""
    if installed() < NEGATIVE_MULTIPLES and _has_negative_multiples(schema):
        has = ".".join(map(str, installed()))
        reason = f"grammar: multipleOf needs a minimum of 0 or more here, since this verifier has llguidance {has}"
        raise JobError(reason, field="grammar")


def _has_negative_multiples(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_has_negative_multiples, value))
    if not isinstance(value, dict):
        return False
    low = value.get("minimum", value.get("exclusiveMinimum"))
    is_open = "multipleOf" in value and not (isinstance(low, int | float) and not isinstance(low, bool) and low >= 0)
    return is_open or any(map(_has_negative_multiples, value.values()))
