"""Scenarios from a TOML file, and from measured figures.

In a TOML file, a list where a key takes one value means each of its values in turn.

    [network]
    rtt_ms = [1, 20, 50]        # three scenarios
    [draft]
    acceptance = [0.9, 0.6]     # one: this key takes a list; [[0.9, 0.6], [0.8]] are two
    [[variant]]                 # each variant in turn, with its settings
    name = "chain"
    draft.fan_out = 1

Several such lists give all combinations. The last list changes fastest.

Measured figures become a scenario, so that a simulation matches this hardware and this pair of models.

The JSON has any of these keys (`specq bench calibrate` measures them all):

    step_ms     [[rows, milliseconds], ...] of the target's forward pass
    helped_ms, session_us, context_us   as in EngineSettings
    pass_ms     [[rows, milliseconds], ...] of the draft model's pass
    choices     [[claim, rank], ...]: along the target's own texts, position by position, the drafter's probability of
                its first choice, and the rank of the target's token among its choices, from 0
    acceptance, ranks   instead of `choices`, as in DraftSettings
    host        microseconds, as in HostSettings
    network     as in NetworkSettings
    machine     as in MachineSettings

Times of hardware by load are measured points with straight lines between them."""

from __future__ import annotations

import itertools
import json
import tomllib
import typing
from bisect import bisect_right
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from specq.protocol import ConfigError, Speculation
from specq.simulate.settings import SECTIONS, Scenario, refuse_unknown

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


Points = Sequence[Sequence[float]]  # [[load, milliseconds], ...], with ascending loads


class HardwareCurve:
    """Seconds for a load. Below the first point its time holds; beyond the last point the last line continues."""

    def __init__(self, points: Points) -> None:
        self._loads = [load for load, _ in points]
        self._seconds = [milliseconds / 1000 for _, milliseconds in points]

    def __call__(self, load: float) -> float:
        loads, seconds = self._loads, self._seconds
        if load <= loads[0] or len(loads) == 1:
            return seconds[0]
        i = min(bisect_right(loads, load), len(loads) - 1)
        slope = (seconds[i] - seconds[i - 1]) / (loads[i] - loads[i - 1])
        return max(seconds[i - 1] + slope * (load - loads[i - 1]), 0.0)


NUM_BINS = 12  # of claims, each with its measured acceptance
NUM_RANKS = 7  # ranks after the first that are counted separately


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured figures; None: not measured. See the module's docstring."""

    step_ms: list[list[float]] | None = None
    helped_ms: list[list[float]] | None = None
    session_us: float | None = None
    context_us: float | None = None
    pass_ms: list[list[float]] | None = None
    choices: list[list[float]] | None = None
    acceptance: list[float] | float | None = None
    ranks: list[float] | None = None
    host: dict[str, float] = field(default_factory=dict)
    network: dict[str, float] = field(default_factory=dict)
    machine: dict[str, float] = field(default_factory=dict)

    def applied_to(self, tables: dict[str, Any]) -> dict[str, Any]:
        """Return the tables of a scenario with the measured figures in place of the old ones."""
        own = asdict(self)
        engine = {
            name: own[name] for name in ("step_ms", "helped_ms", "session_us", "context_us") if own[name] is not None
        }
        draft = {name: own[name] for name in ("pass_ms", "acceptance", "ranks") if own[name] is not None}
        if self.choices:
            draft |= drafting(self.choices)
        measured = {"engine": engine, "draft": draft}
        measured |= {name: own[name] for name in ("host", "network", "machine")}
        return tables | {name: {**tables.get(name, {}), **table} for name, table in measured.items() if table}


def read_measured(path: Path) -> Measured:
    """Read measured figures; raises ConfigError that names the file and the key."""
    try:
        values = orjson.loads(path.read_bytes().removeprefix(BOM_UTF8))
    except OSError as error:
        raise ConfigError(f"cannot read the measured figures {path}: {error.strerror}") from None
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    for part in ("results", "measured"):  # where the report of `specq bench calibrate` has them
        if isinstance(values, dict) and isinstance(values.get(part), dict):
            values = values[part]
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is not a JSON object; known keys: {', '.join(Measured.__slots__)}")
    try:
        refuse_unknown("measured", values, Measured.__slots__)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return Measured(**values)


def drafting(choices: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    """Return `acceptance` and `ranks` of DraftSettings from (claim, rank) pairs, position by position.

    A position's acceptance is the calibrated claim: how often the first choice was right where a similar probability
    was claimed. The order is kept, because easy positions come in runs, and drafts depend on runs.
    """
    claims = [min(int(claim * NUM_BINS), NUM_BINS - 1) for claim, _ in choices]
    seen, right = [0] * NUM_BINS, [0] * NUM_BINS
    for claim, (_, rank) in zip(claims, choices, strict=True):
        seen[claim] += 1
        right[claim] += rank == 0
    return {
        "acceptance": [round(right[claim] / seen[claim], 4) for claim in claims],
        "ranks": _ranks([int(rank) for _, rank in choices]),
    }


def _ranks(ranks: Sequence[int]) -> list[float]:
    """Return [i]: how often choice i + 2 is right if all before it are wrong."""
    found = []
    for rank in range(1, NUM_RANKS + 1):
        left = [r for r in ranks if r >= rank]
        if not left:
            break
        found.append(round(left.count(rank) / len(left), 4))
    return found


def to_toml(tables: dict[str, Any]) -> str:
    """Return the tables of a scenario, variants included, as TOML that `specq simulate` reads."""
    lines = []
    for name, table in tables.items():
        for one in table if isinstance(table, list) else [table]:
            lines += [f"[[{name}]]" if isinstance(table, list) else f"[{name}]", *_lines(one), ""]
    return "\n".join(lines)


def _lines(table: dict[str, Any], prefix: str = "") -> list[str]:
    lines = []
    for key, value in table.items():
        nested = isinstance(value, dict)
        lines += _lines(value, f"{prefix}{key}.") if nested else [f"{prefix}{key} = {json.dumps(value)}"]
    return lines
