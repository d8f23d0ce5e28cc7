"""Options passed unchanged to an engine, as `name=value`. A value that is not valid JSON is a string."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from specq.protocol import ConfigError

Options = tuple[str, ...]  # each name=value


def from_table(table: Mapping[str, Any], section: str = "") -> Options:
    """Return the options in a section's TOML table. Raises ConfigError for dates and times, which JSON lacks."""
    return tuple(f"{name}={_in_json(f'{section}.{name}', value)}" for name, value in table.items())


def _in_json(key: str, value: Any) -> str:
    try:
        return json.dumps(value)
    except TypeError:
        raise ConfigError(
            f"{key} contains a date or time, which is not supported; write it as a string, in quotes"
        ) from None


def parsed(options: Iterable[str]) -> dict[str, Any]:
    """Return names and values. Raises ConfigError for text that is not name=value, and for a duplicate name."""
    values: dict[str, Any] = {}
    for option in options:
        name, equals, text = option.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"engine option {option!r} is not valid; expected name=value")
        if name in values:
            raise ConfigError(f"engine option {name} is given twice; remove one")
        values[name] = _value(text)
    return values


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
