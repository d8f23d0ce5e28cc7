"""Sections, and their fields, the options: each has a default, help text and allowed values."""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, NewType, TypeVar

from specq.config import engine_options
from specq.config.engine_options import Options
from specq.protocol import ConfigError

MAX_COUNT = 2**31 - 1

T = TypeVar("T")
Cores = tuple[int, ...]
Texts = NewType("Texts", tuple[str, ...])  # a list in a file; a repeated option on the command line
Tables = tuple[tuple[str, Options], ...]  # from a file: the options in the section of each engine or proposer


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
    """Return a dataclass field with its help text, range of numbers or choices.

    `check` receives the key and the value. It raises ConfigError for a value that breaks another rule.
    """
    limits = {"low": low, "high": high, "choices": choices, "check": check}
    return field(default=default, metadata={"help": text, "is_hidden": is_hidden} | limits)


def hidden() -> tuple[Any, ...]:
    """Return an empty field that the command line does not show."""
    return option((), "", is_hidden=True)


def check_type(key: str, value: object, kind: Any) -> None:
    """Raise ConfigError unless the value has the type `kind`. An int is accepted for a float."""
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
        raise ConfigError(f"{key} is {shown!r}, but must be {wanted.get(kind, 'a list of CPU ids')}")


def check_limits(key: str, value: object, metadata: Mapping[str, Any]) -> None:
    """Raise ConfigError for a number out of range (NaN included), an unknown choice, or a failed `check`."""
    low, high, choices, check = (metadata[name] for name in ("low", "high", "choices", "check"))
    numbers = value if isinstance(value, tuple) else (value,)
    if not all(low <= v <= high for v in numbers if isinstance(v, (int, float))):
        raise ConfigError(f"{key} is {value!r}, but must be from {low} to {high}")
    if choices and value not in choices:
        raise ConfigError(f"{key} is {value!r}, but must be one of {', '.join(choices)}")
    if check:
        check(key, value)


@dataclass(frozen=True, slots=True)
class Section:
    """Base of the sections. Checks each value's type, range and the further rules of its option."""

    def __post_init__(self) -> None:
        is_own = hasattr(self, "LABEL")  # of an engine or proposer, whose section may have another's name
        for f in fields(self):
            key = f"--{f.name.replace('_', '-')}" if is_own else f"{section_name(type(self))}.{f.name}"
            value = getattr(self, f.name)
            check_type(key, value, kinds(type(self))[f.name])
            check_limits(key, value, f.metadata)


def section_name(section: type[Section]) -> str:
    """Return the section's name in a TOML file: `target` for TargetConfig, or the class's LABEL."""
    label: str = getattr(section, "LABEL", section.__name__.removesuffix("Config").lower())
    return label


def kinds(section: type) -> dict[str, Any]:
    """Return the type of each key of a section, or of each section of a configuration."""
    hashable: Any = section  # a type always is, whatever mypy thinks of those whose values are not
    return _hints(hashable)


@cache  # it is asked for each key of a section, and takes as long as all of them
def _hints(section: Any) -> dict[str, Any]:
    return typing.get_type_hints(section)
