"""Options: the fields of a section, each with its default, its help text and what its value may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, NewType, TypeVar

from specq.config import engine_options
from specq.config.engine_options import Options
from specq.protocol import ConfigError

MAX_COUNT = 2**31 - 1

T = TypeVar("T")
Cores = tuple[int, ...]
Texts = NewType("Texts", tuple[str, ...])  # of a file: a list; on the command line each by itself
Tables = tuple[tuple[str, Options], ...]  # of a file: the options in the section of each engine or proposer


def option(
    default: T,
    text: str,
    low: float = 0,
    high: float = MAX_COUNT,
    choices: tuple[str, ...] = (),
    check: Callable[[str, T], None] | None = None,
    *,
    is_hidden: bool = False,
) -> T:
    """Return a field with its help text, the range of its numbers or the choice of its words.

    `check` raises ConfigError for a value that is not allowed for another reason; it gets the key and the value.
    """
    limits = {"low": low, "high": high, "choices": choices, "check": check}
    return field(default=default, metadata={"help": text, "is_hidden": is_hidden} | limits)


def hidden() -> tuple[Any, ...]:
    """Return an empty field that is no option of the command line."""
    return option((), "", is_hidden=True)


def check_type(key: str, value: object, kind: Any) -> None:
    """Raise ConfigError unless the value has its key's type; whole numbers do for fractions."""
    if kind == Cores:
        right = isinstance(value, tuple) and all(type(v) is int for v in value)
    elif kind is Texts:
        right = isinstance(value, tuple) and all(type(v) is str for v in value)
    elif kind == Tables:
        right = isinstance(value, tuple)
    elif kind == Options:
        right = isinstance(value, tuple) and all(type(v) is str for v in value)
        engine_options.parsed(value if right else ())  # type: ignore[arg-type]
    else:
        right = type(value) is kind or (kind is float and type(value) is int)
    if not right:
        wanted = {
            str: "a string", int: "a whole number", float: "a number", bool: "true or false", Options: "a table of "
                "options", Texts: "a list of strings"
        }  # fmt: skip
        shown = list(value) if isinstance(value, tuple) else value
        raise ConfigError(f"{key} is {shown!r}; it must be {wanted.get(kind, 'a list of CPU ids')}")


def check_limits(key: str, value: object, metadata: Mapping[str, Any]) -> None:
    """Raise ConfigError unless a number lies in its key's range (NaN does not), a word is a choice, and `check`
    passes."""
    low, high, choices, check = (metadata[name] for name in ("low", "high", "choices", "check"))
    numbers = value if isinstance(value, tuple) else (value,)
    if not all(low <= v <= high for v in numbers if isinstance(v, (int, float))):
        raise ConfigError(f"{key} is {value!r}; it must be from {low} to {high}")
    if choices and value not in choices:
        raise ConfigError(f"{key} is {value!r}; it must be one of {', '.join(choices)}")
    if check:
        check(key, value)
