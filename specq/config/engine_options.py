"""Options that are handed on to an engine as they are: `name=value`, the value in JSON, or else a string."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from specq.protocol import ConfigError

Options = tuple[str, ...]  # each name=value


def from_table(table: Mapping[str, Any], section: str = "") -> Options:
    """Return the options that a TOML table, that of a section, holds; ConfigError for dates and times, which JSON does
    not have."""
    return tuple(f"{name}={_in_json(f'{section}.{name}', value)}" for name, value in table.items())


def _in_json(key: str, value: Any) -> str:
    try:
        return json.dumps(value)
    except TypeError:
        raise ConfigError(f"{key} is or holds a date or time; such a value must be a string, in quotes") from None


def parsed(options: Iterable[str]) -> dict[str, Any]:
    """Return names and values; ConfigError for what is no name=value, and for a name that comes twice."""
    values: dict[str, Any] = {}
    for option in options:
        name, equals, text = option.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"engine option {option!r} is not of the form name=value")
        if name in values:
            raise ConfigError(f"engine option {name} is given twice")
        values[name] = _value(text)
    return values


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
