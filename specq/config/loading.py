"""Configuration: TOML, environment and command line to sections (`specq.config.sections`).

Precedence, weakest first: the sections' defaults, the file, the environment, the command line (`override`).

    SPECQ_CONFIG   the file to read where no `--config` is given
    SPECQ_BROKER   the broker that workers and clients connect to
    SPECQ_CACHE    where compiled kernels, fetched tokenizers, fetched and unpacked models are kept
    SPECQ_STATE    where brokers keep their journals
    NO_COLOR, TERM   whether a terminal gets colours

Rule: this is the only module that reads the environment (`specq.runtime.cpu` and the vllm engine write to it).
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from specq.config.addresses import check_connect
from specq.config.options import Tables
from specq.config.own_options import chosen, gather_own
from specq.config.renamed import with_new_names
from specq.config.sections import (
    SECTIONS,
    BrokerConfig,
    Config,
    DraftConfig,
    Section,
    TargetConfig,
    kinds,
    section_name,
)
from specq.protocol import ConfigError, known_names

S = TypeVar("S", bound=Section)
ALIKE = 0.65  # of an unknown key and a known one: "engine", which [draft] lacks, is not meant for "engine_options"


def load(path: str | Path | None = None) -> Config:
    """Read a TOML file (`path`, else SPECQ_CONFIG, else none); raises ConfigError that names the file and the key."""
    path = path or os.environ.get("SPECQ_CONFIG") or None
    try:
        return _load(path)
    except RecursionError:
        raise ConfigError(f"{path} is no configuration: its lists or tables are nested hundreds deep") from None


def _load(path: str | Path | None) -> Config:
    tables = _read(Path(path)) if path else {}
    try:
        sections: dict[str, Any] = {name: _section(name, tables.pop(name, {})) for name in SECTIONS}
        _refuse_unknown("section ", tables, SECTIONS)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}" if path else str(error)) from None
    return Config(**sections)


def override(section: S, **cli_values: Any) -> S:
    """Return the section with the values that were given on the command line; None means not given."""
    given = {name: value for name, value in cli_values.items() if value is not None}
    given = with_new_names(section_name(type(section)), given)
    _refuse_unknown(f"option of {section_name(type(section))} ", given, kinds(type(section)))
    return replace(section, **given)


def cache_dir() -> Path:
    """Return the directory for what can be made again: SPECQ_CACHE, or specq/ in the user's cache."""
    own = os.environ.get("SPECQ_CACHE")
    shared = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(own) if own else Path(shared) / "specq"


def state_dir() -> Path:
    """Return the directory for what must not be lost: SPECQ_STATE, or specq/ in the user's state."""
    own = os.environ.get("SPECQ_STATE")
    shared = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(own) if own else Path(shared) / "specq"


def journal_address(config: BrokerConfig) -> str:
    """Return where a broker's journal is: a path, or KIND://...; empty for a broker that keeps none.

    A broker that binds any free port has a journal only if the configuration names one.
    """
    if config.journal == "none" or (not config.journal and config.bind.endswith(":*")):
        return ""
    if config.journal:
        return config.journal
    name = "".join(c if c.isalnum() or c in ".-" else "-" for c in config.bind.replace("://", "-"))
    return str(state_dir() / f"{name}.journal")


def wants_colours() -> bool:
    """Tell whether text on a terminal may have colours (https://no-color.org)."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def environment_of_children() -> dict[str, str]:
    """Return the environment for processes that get all of their configuration on the command line."""
    return {name: value for name, value in os.environ.items() if name not in ("SPECQ_CONFIG", "SPECQ_BROKER")}


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def _section(name: str, values: Any) -> Section:
    if not isinstance(values, dict):
        raise ConfigError(f"{name} is {values!r}; it must be a section, [{name}]")
    cls, values = SECTIONS[name], with_new_names(name, values)
    known = {key: kind for key, kind in kinds(cls).items() if kind != Tables}
    own: Tables = ()
    if issubclass(cls, TargetConfig | DraftConfig):
        values, own = gather_own(name, values, known, chosen(cls()))
    _refuse_unknown(f"key {name}.", values, known)
    broker = os.environ.get("SPECQ_BROKER")
    if broker and "broker" in kinds(cls):
        check_connect("SPECQ_BROKER", broker)
        values = values | {"broker": broker}
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    return cls(**given, **({"own": own} if own else {}))


def _refuse_unknown(what: str, given: dict[str, Any], known: dict[str, Any]) -> None:
    for name in given:
        if name not in known:
            raise ConfigError(f"unknown {what}{name}; {known_names(name, known, ALIKE)}")
