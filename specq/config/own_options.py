"""Options of one engine or proposer: keys of its own, declared beside it, in a section of their own.

`[target]` holds what all engines share, `[target.NAME]` what only the engine NAME knows (and `[draft.NAME]` a
proposer). The configuration does not know their names: it keeps such tables as they are until one is chosen. On the
command line the same keys are `--engine-option name=value`, or options of their own for what comes with specq; the
command line wins.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from specq.config import engine_options
from specq.config.engine_options import Options
from specq.config.options import Tables
from specq.config.renamed import with_new_names
from specq.config.sections import DraftConfig, Section, TargetConfig, kinds, section_name
from specq.protocol import ConfigError, did_you_mean, known_names

# Keys that were in the section itself, and whose they are. To be dropped with the next version.
MOVED = {
    "target": {
        "helper_cores": "torch",
        **dict.fromkeys(("gpu_memory_utilization", "max_model_len", "tensor_parallel_size", "quantization"), "vllm"),
    },
    "draft": dict.fromkeys(("gpu_memory_utilization", "max_model_len"), "vllm"),
}


@dataclass(frozen=True, slots=True)
class OwnOptions(Section):
    """Base of the options of an engine or proposer: a frozen dataclass whose fields are made by `option`. One with a
    field `further` takes names that it does not know, too."""

    LABEL = "options"  # how messages call it

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments that the engine or proposer is made with."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def options_of(config: TargetConfig | DraftConfig) -> dict[str, Any]:
    """Return the options of what is chosen, under their new names: from its section of a file, and the command line."""
    section = f"{section_name(type(config))}.{chosen(config)}"
    in_file, further = dict(config.own).get(chosen(config), ()), config.engine_options
    return with_new_names(section, engine_options.parsed(in_file)) | with_new_names(
        section, engine_options.parsed(further)
    )


def own_options(config: TargetConfig | DraftConfig, kind: type[OwnOptions], known: Collection[str]) -> OwnOptions:
    """Return the checked options of what is chosen; `known`: all names that could have a section."""
    for name, _ in config.own:
        if name not in known:
            section = section_name(type(config))
            hint = did_you_mean(name, known)
            end = f"{hint}{' ' if hint else ''}sections are known for {', '.join(sorted(known))}"
            raise ConfigError(f"unknown key {section}.{name}; {end}")
    return read_own(kind, options_of(config), chosen(config))


def read_own(kind: type[OwnOptions], values: Mapping[str, Any], name: str = "") -> OwnOptions:
    """Return checked options; ConfigError for a name that is unknown, and for a value that is not allowed. `name`: of
    the engine or proposer, for one that has none of its own."""
    names = kinds(kind)
    further = {name: value for name, value in values.items() if name not in names}
    given = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items() if name in names}
    if further and "further" not in names:
        whose = name if name and kind is OwnOptions else kind.LABEL
        unknown = next(iter(further))
        raise ConfigError(f"{whose} has no option {unknown}; {known_names(unknown, names)}")
    return kind(**given, **({"further": engine_options.from_table(further)} if further else {}))


def chosen(config: TargetConfig | DraftConfig) -> str:
    """Return the name of the engine or proposer that is chosen."""
    return config.engine if isinstance(config, TargetConfig) else config.proposer


def gather_own(
    section: str, values: Mapping[str, Any], known: Collection[str], default: str
) -> tuple[dict[str, Any], Tables]:
    """Return a file's values without the sections of engines or proposers and keys at former places, and those.

    `default`: who is chosen if the file does not say.
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
    warnings.warn(f"{old} is now {new}; the old place goes with the next version", FutureWarning, stacklevel=2)


def _table(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{key} is {value!r}; it must be a table of options")
    return value


def _add(tables: dict[str, dict[str, Any]], section: str, name: str, values: Mapping[str, Any]) -> None:
    table = tables.setdefault(name, {})
    for key in table.keys() & values.keys():
        raise ConfigError(f"{section}.{name}.{key} is given twice")
    table.update(values)


def with_own(given: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return a command's values with those of `names` among its engine options; None means not given."""
    own = {name: value for name, value in given.items() if name in names and value is not None}
    kept = {name: value for name, value in given.items() if name not in names}
    if own:
        further: Options = kept.get("engine_options") or ()
        kept["engine_options"] = (*engine_options.from_table(own), *further)
    return kept
