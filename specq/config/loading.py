"""Configuration: TOML, environment and command line to sections (`specq.config.sections`).

Precedence, weakest first: the sections' defaults, the file, the environment, the command line (`override`).

    SPECQ_CONFIG   configuration file if `--config` is not given
    SPECQ_BROKER   broker that workers and clients connect to
    SPECQ_CACHE    directory of compiled kernels, tokenizers, and fetched or unpacked models
    SPECQ_STATE    directory of the brokers' journals, and of files and batches
    SPECQ_HEALTH   file in which a broker or worker keeps its state, for probes
    NO_COLOR, TERM   whether a terminal gets colours

Rule: this is the only module that reads the environment (`specq.runtime.usage` and the vllm engine write to it).

Renamed keys: files and commands may still use the old name for one version, with a warning. To rename a key, change it
in its section and add a line to `RENAMED`. Remove the line one version later.

Arguments: `specq up` converts sections to command-line arguments for the processes that it starts.

Engine and proposer options: `[target]` holds the options that all engines share. `[target.NAME]` holds the options of
the engine NAME, and `[draft.NAME]` those of the proposer NAME. Each is declared beside its engine or proposer. This
module does not know their names: it keeps such tables until one is chosen. On the command line the same keys are
`--engine-option name=value`. Engines and proposers that ship with specq also have separate options. The command line
wins.
"""

from __future__ import annotations

import os
import socket
import tomllib
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from specq.config import engine_options
from specq.config.engine_options import Options, from_table
from specq.config.options import Section, Tables, Texts, kinds, section_name
from specq.config.sections import (
    SECTIONS,
    BrokerConfig,
    Config,
    DraftConfig,
    ServeConfig,
    TargetConfig,
)
from specq.config.values import check_brokers, read_address
from specq.protocol import ConfigError, did_you_mean, known_names, split_addresses

RENAMED: Mapping[str, Mapping[str, str]] = {  # section, or section of an engine or proposer: old name: new name
    "target": {"backup": "prompt_lookup"},  # since wire version 2
    "draft": {"law_size": "distribution_size"},  # since wire version 2
    "target.vllm": {"tensor_parallel": "tensor_parallel_size"},  # the former --tensor-parallel of `specq bench gpu`
}


def with_new_names(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a section under their new names, with a warning for each old name.

    Raises ConfigError for a key that is given under both names.
    """
    names = RENAMED.get(section, {})
    for old in names.keys() & values.keys():
        new = names[old]
        if new in values:
            raise ConfigError(
                f"{section}.{old} and {section}.{new} are both given; remove {old}, the old name of {new}"
            )
        warnings.warn(
            f"{section}.{old} is now {section}.{new}; the next version does not accept the old name",
            FutureWarning,
            stacklevel=2,
        )
    return {names.get(name, name): value for name, value in values.items()}


def to_arguments(section: Section) -> list[str]:
    """Return the command-line options that turn the defaults into this section (see `section_options`)."""
    arguments = []
    for f in fields(section):
        value, flag = getattr(section, f.name), f.name.replace("_", "-")
        if isinstance(section, TargetConfig | DraftConfig) and f.name == "engine_options":
            value = from_table(options_of(section))
        if value == f.default or f.metadata["is_hidden"]:
            continue
        if isinstance(value, bool):
            arguments.append(f"--{'' if value else 'no-'}{flag}")
        elif kinds(type(section))[f.name] in (Options, Texts):
            arguments += [part for option in value for part in (of_one(f"--{flag}"), option)]
        else:
            arguments += [f"--{flag}", ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    return arguments


def of_one(flag: str) -> str:
    """Return the flag for one value of a key that holds several values."""
    return flag.removesuffix("s")


AUTO, AUTO_TABLES = "auto", ("torch", "native", "auto")  # the engine that is one of two, and the tables that it reads
# Keys that moved from the section to that of an engine. Remove in the next version.
MOVED = {
    "target": {
        "helper_cores": "torch",
        **dict.fromkeys(("gpu_memory_utilization", "max_model_len", "tensor_parallel_size", "quantization"), "vllm"),
    },
    "draft": dict.fromkeys(("gpu_memory_utilization", "max_model_len"), "vllm"),
}


@dataclass(frozen=True, slots=True)
class OwnOptions(Section):
    """Base of the options of an engine or proposer: a frozen dataclass with fields made by `option`.

    A class with a field `further` also accepts unknown names.
    """

    LABEL = "options"  # the name in messages

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments for the engine or proposer."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def options_of(config: TargetConfig | DraftConfig) -> dict[str, Any]:
    """Return the options of the chosen engine or proposer, under their new names.

    They come from its section of the file and from the command line.
    """
    section = f"{section_name(type(config))}.{chosen(config)}"
    names = AUTO_TABLES if chosen(config) == AUTO else (chosen(config),)
    tables = [dict(config.own).get(name, ()) for name in names]
    found: dict[str, Any] = {}
    for given in (*tables, config.engine_options):
        found |= with_new_names(section, engine_options.parsed(given))
    return found


def own_options(config: TargetConfig | DraftConfig, kind: type[OwnOptions], known: Collection[str]) -> OwnOptions:
    """Return the checked options of the chosen engine or proposer; `known`: all names that may have a section."""
    for name, _ in config.own:
        if name not in known:
            section = section_name(type(config))
            hint = did_you_mean(name, known)
            end = f"{hint}{' ' if hint else ''}valid sections: {', '.join(sorted(known))}"
            raise ConfigError(f"unknown key {section}.{name}; {end}")
    return read_own(kind, options_of(config), chosen(config))


def read_own(kind: type[OwnOptions], values: Mapping[str, Any], name: str = "") -> OwnOptions:
    """Return checked options. Raises ConfigError for an unknown name and for an invalid value.

    `name` is that of the engine or proposer, used in messages if it has no options.
    """
    names = kinds(kind)
    further = {name: value for name, value in values.items() if name not in names}
    given = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items() if name in names}
    if further and "further" not in names:
        whose = name if name and kind is OwnOptions else kind.LABEL
        unknown = next(iter(further))
        raise ConfigError(f"{whose} has no option {unknown}; {known_names(unknown, names)}")
    return kind(**given, **({"further": engine_options.from_table(further)} if further else {}))


def chosen(config: TargetConfig | DraftConfig) -> str:
    """Return the name of the chosen engine or proposer."""
    return config.engine if isinstance(config, TargetConfig) else config.proposer


def gather_own(
    section: str, values: Mapping[str, Any], known: Collection[str], default: str
) -> tuple[dict[str, Any], Tables]:
    """Split a file's section into its own values and the tables of engines or proposers.

    Keys at former places go to their new tables. `default`: the engine or proposer if the file names none.
    """
    tables: dict[str, dict[str, Any]] = {}
    kept: dict[str, Any] = {}
    holder = str(values.get("engine", values.get("proposer", default)))
    for name, value in values.items():
        if name in MOVED[section]:
            owner = MOVED[section][name]
            _note_move(f"{section}.{name}", f"{section}.{owner}.{name}")
            _add(tables, section, owner, {name: value})
        elif name == "engine_options":
            _note_move(f"the section {section}.{name}", f"{section}.{holder}")
            _add(tables, section, holder, _table(f"{section}.{name}", value))
        elif name not in known and isinstance(value, dict):
            _add(tables, section, name, value)
        else:
            kept[name] = value
    return kept, tuple((name, engine_options.from_table(table, f"{section}.{name}")) for name, table in tables.items())


def _note_move(old: str, new: str) -> None:
    warnings.warn(f"{old} is now {new}; the next version does not accept the old place", FutureWarning, stacklevel=2)


def _table(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{key} is {value!r}; expected a table of options")
    return value


def _add(tables: dict[str, dict[str, Any]], section: str, name: str, values: Mapping[str, Any]) -> None:
    table = tables.setdefault(name, {})
    for key in table.keys() & values.keys():
        raise ConfigError(f"{section}.{name}.{key} is given twice; remove one")
    table.update(values)


def with_own(given: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return a command's values, with those of `names` moved to its engine options. None means not given."""
    own = {name: value for name, value in given.items() if name in names and value is not None}
    kept = {name: value for name, value in given.items() if name not in names}
    if own:
        further: Options = kept.get("engine_options") or ()
        kept["engine_options"] = (*engine_options.from_table(own), *further)
    return kept


S = TypeVar("S", bound=Section)
ALIKE = 0.65  # least similarity for a hint; [draft] lacks "engine", and "engine_options" is not a useful hint


def load(path: str | Path | None = None) -> Config:
    """Read a TOML file (`path`, else SPECQ_CONFIG, else none). Raises ConfigError that names the file and key."""
    path = path or os.environ.get("SPECQ_CONFIG") or None
    try:
        return _load(path)
    except RecursionError:
        raise ConfigError(f"{path} is not a valid configuration: its lists or tables are nested too deeply") from None


def _load(path: str | Path | None) -> Config:
    tables = _read(Path(path)) if path else {}
    try:
        sections: dict[str, Any] = {name: _section(name, tables.pop(name, {})) for name in SECTIONS}
        _refuse_unknown("section ", tables, SECTIONS)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}" if path else str(error)) from None
    return Config(**sections)


def override(section: S, **cli_values: Any) -> S:
    """Return the section with the values of the command line applied. None means not given."""
    given = {name: value for name, value in cli_values.items() if value is not None}
    given = with_new_names(section_name(type(section)), given)
    _refuse_unknown(f"option of {section_name(type(section))} ", given, kinds(type(section)))
    return replace(section, **given)


def cache_dir() -> Path:
    """Return the directory for data that can be recreated: SPECQ_CACHE, or specq/ in the user's cache."""
    own = os.environ.get("SPECQ_CACHE")
    shared = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(own) if own else Path(shared) / "specq"


def state_dir() -> Path:
    """Return the directory for persistent data: SPECQ_STATE, or specq/ in the user's state directory."""
    own = os.environ.get("SPECQ_STATE")
    shared = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(own) if own else Path(shared) / "specq"


def health_path() -> Path | None:
    """Return the file in which a broker or worker keeps its state: SPECQ_HEALTH, or None."""
    own = os.environ.get("SPECQ_HEALTH")
    return Path(own) if own else None


def journal_address(config: BrokerConfig) -> str:
    """Return a broker's journal: a path, KIND://URL, or "" for none.

    A broker on any free port has a journal only if the configuration names one.
    """
    if config.journal == "none" or (not config.journal and config.bind.endswith(":*")):
        return ""
    return config.journal or _state_file(config.bind, "journal")


def broker_address(config: BrokerConfig, bound: str) -> str:
    """Return where other machines reach a broker: as configured, or where it listens, under the machine's name."""
    listens = read_address("broker.bind", bound)
    return config.advertise or (listens.at(socket.gethostname()) if listens.is_wildcard else bound)


def batch_store(config: ServeConfig) -> str:
    """Return the path of a gateway's store of batches, or "" for none.

    The default is named after the first broker's address. So the store stays when brokers are added behind it.
    """
    if config.batches == "none":
        return ""
    return config.batches or _state_file(split_addresses(config.broker)[0], "batches")


def _state_file(address: str, kind: str) -> str:
    """Return the file of this kind for a broker's address."""
    name = "".join(c if c.isalnum() or c in ".-" else "-" for c in address.replace("://", "-"))
    return str(state_dir() / f"{name}.{kind}")


def wants_colours() -> bool:
    """Return whether text on a terminal may have colours (https://no-color.org)."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def ray_address() -> str:
    """Return HOST:PORT of the Ray cluster in RAY_ADDRESS, or "" if it has none or another form."""
    found = os.environ.get("RAY_ADDRESS", "")
    return found if ":" in found and "://" not in found else ""


def environment_of_children() -> dict[str, str]:
    """Return the environment for processes that receive their configuration on the command line."""
    not_theirs = ("SPECQ_CONFIG", "SPECQ_BROKER", "SPECQ_HEALTH")
    return {name: value for name, value in os.environ.items() if name not in not_theirs}


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def _section(name: str, values: Any) -> Section:
    if not isinstance(values, dict):
        raise ConfigError(f"{name} is {values!r}; expected a section, [{name}]")
    cls, values = SECTIONS[name], with_new_names(name, values)
    known = {key: kind for key, kind in kinds(cls).items() if kind != Tables}
    own: Tables = ()
    hint = ""
    if issubclass(cls, TargetConfig | DraftConfig):
        values, own = gather_own(name, values, known, chosen(cls()))
        hint = f"; options of {'one engine' if cls is TargetConfig else 'one proposer'} belong in its own table, for "
        hint += f"example [{name}.{chosen(cls())}]"
    _refuse_unknown(f"key {name}.", values, known, hint)
    broker = os.environ.get("SPECQ_BROKER")
    if broker and "broker" in kinds(cls):
        check_brokers("SPECQ_BROKER", broker)
        values = values | {"broker": broker}
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    return cls(**given, **({"own": own} if own else {}))


def _refuse_unknown(what: str, given: dict[str, Any], known: dict[str, Any], hint: str = "") -> None:
    for name in given:
        if name not in known:
            raise ConfigError(f"unknown {what}{name}; {known_names(name, known, ALIKE)}{hint}")
