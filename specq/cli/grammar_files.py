"""Grammars and JSON schemas from the command line and from files. `specq.protocol.grammars` checks what they hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specq.protocol import GRAMMAR_KINDS, ConfigError, shown

MOST_BYTES = 1 << 20  # of a file; a grammar has a lower limit of its own


def read_grammar(said: str) -> dict[str, Any]:
    """Return the grammar in `said`, or in the file of this name.

    Raises ConfigError for text that is neither.
    """
    if said.lstrip().startswith("{"):
        return _object(said, "grammar", f"an object with one of {', '.join(GRAMMAR_KINDS)}")
    return _object(_content(said, "grammar"), said, f"an object with one of {', '.join(GRAMMAR_KINDS)}")


def read_schema(name: str) -> dict[str, Any]:
    """Return the JSON schema in a file.

    Raises ConfigError with the place of an error.
    """
    return _object(_content(name, "JSON schema"), name, 'a JSON schema such as {"type": "object", "properties": ...}')


def _object(text: str, where: str, wanted: str) -> dict[str, Any]:
    try:
        found = json.loads(text, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(f"{where} is not valid JSON: {error.msg} at {place}; expected {wanted}") from None
    except (RecursionError, ValueError) as error:  # too deep, or a number with too many digits
        raise ConfigError(f"{where} cannot be read as JSON: {error}; expected {wanted}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{where} is {shown(found)}, but must be {wanted}")
    return found


def _refuse(constant: str) -> None:
    """Refuse NaN and infinities, which other readers of JSON do not know."""
    raise ValueError(f"{constant} is not a number in JSON")


def _content(name: str, what: str) -> str:
    """Return the text of a file of the user."""
    path = Path(name).expanduser()
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise ConfigError(f"{name} has {size} bytes; a {what} has at most {MOST_BYTES}")
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not UTF-8 at byte {error.start}; a {what} is JSON in UTF-8") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{shown(name)} cannot be read: {reason}; expected a file with a {what}") from None
