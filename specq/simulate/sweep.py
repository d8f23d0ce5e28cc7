"""From a TOML file to scenarios: a list where a key takes one value means each of its values in turn.

    [network]
    rtt_ms = [1, 20, 50]        # three scenarios
    [draft]
    acceptance = [0.9, 0.6]     # one: this key takes a list; [[0.9, 0.6], [0.8]] are two
    [[variant]]                 # each variant in turn, with its settings
    name = "chain"
    draft.fan_out = 1

Several such lists give all combinations. The last list changes fastest.
"""

from __future__ import annotations

import itertools
import tomllib
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specq.protocol import ConfigError, Speculation
from specq.simulate.settings import SECTIONS, Scenario

Tables = dict[str, dict[str, Any]]
Label = str | int | float | bool

VARIANT = "variant"


@dataclass(frozen=True, slots=True)
class Point:
    """One scenario of a sweep; `labels`: the swept keys ("section.key", "variant") and their values here."""

    labels: dict[str, Label]
    scenario: Scenario


def read_tables(path: str | Path) -> dict[str, Any]:
    """Read a TOML file; raises ConfigError that names it."""
    try:
        return tomllib.loads(Path(path).read_text("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read the scenario {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def apply_settings(tables: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Return the tables with each `section.key=value` set; values as in TOML, bare words as strings."""
    result = {name: dict(table) if isinstance(table, dict) else table for name, table in tables.items()}
    for setting in settings:
        name, equals, value = setting.partition("=")
        section, dot, key = name.strip().partition(".")
        if not (equals and dot and key):
            raise ConfigError(f"--set {setting!r} is not of the form section.key=value, as in network.rtt_ms=20")
        result.setdefault(section, {})[key] = _parse(value.strip())
    return result


def _parse(value: str) -> Any:
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return value


def points(tables: dict[str, Any]) -> list[Point]:
    """Return all scenarios of the tables, checked; raises ConfigError for the first invalid one."""
    tables = dict(tables)
    variants = _variants(tables.pop(VARIANT, []))
    return [point for name, override in variants for point in _points(_merged(tables, override), name)]


def _points(tables: dict[str, Any], variant: str) -> Iterator[Point]:
    axes = _axes(tables)
    for values in itertools.product(*axes.values()):
        chosen = {name: dict(table) if isinstance(table, dict) else table for name, table in tables.items()}
        for name, value in zip(axes, values, strict=True):
            section, _, key = name.partition(".")
            chosen[section][key] = value
        labels: dict[str, Label] = {VARIANT: variant} if variant else {}
        labels.update(zip(axes, map(_label, values), strict=True))
        yield Point(labels, Scenario.from_tables(chosen))


def _axes(tables: dict[str, Any]) -> dict[str, list[Any]]:
    """Return "section.key" -> values, for each key that has a list of values."""
    found = {}
    for section, table in tables.items():
        kinds = _kinds(section)
        for key, value in table.items() if isinstance(table, dict) else ():
            if key in kinds and _depth_of_value(value) == _depth_of_kind(kinds[key]) + 1 and value:
                found[f"{section}.{key}"] = value
    return found


def _kinds(section: str) -> dict[str, Any]:
    kind: Any = Speculation if section == "speculation" else SECTIONS.get(section)
    return typing.get_type_hints(kind) if kind else {}


def _depth_of_kind(kind: Any) -> int:
    return 1 + _depth_of_kind(typing.get_args(kind)[0]) if typing.get_origin(kind) is tuple else 0


def _depth_of_value(value: Any) -> int:
    return 1 + _depth_of_value(value[0] if value else None) if isinstance(value, list) else 0


def _label(value: Any) -> Label:
    return value if isinstance(value, (str, int, float, bool)) else str(value)


def _variants(values: Any) -> list[tuple[str, Tables]]:
    """Return (name, tables) of each variant; one without a name if there are no variants."""
    if not isinstance(values, list) or not all(isinstance(value, dict) and value.get("name") for value in values):
        raise ConfigError('variants are tables with a name: [[variant]], name = "chain", and what it sets')
    found = [(str(value["name"]), {key: own for key, own in value.items() if key != "name"}) for value in values]
    return found or [("", {})]


def _merged(tables: dict[str, Any], override: Tables) -> dict[str, Any]:
    result = dict(tables)
    for section, table in override.items():
        if not isinstance(table, dict):
            raise ConfigError(f"variant sets {section}, which is not a section; write section.{section} = ...")
        result[section] = {**result.get(section, {}), **table}
    return result
