"""Command-line options from the configuration: one for each key of a section, with its type, help and default.

Engines and proposers that ship with specq also have one option per key. Others use `--engine-option`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import Field, fields
from typing import Any, TypeVar

import click

from specq.config import RENAMED, Cores, Options, OwnOptions, Section, Texts, kinds, of_one, section_name
from specq.drafting import DRAFTERS
from specq.engines import ENGINES
from specq.runtime import Number, OutFile, log

F = TypeVar("F", bound=Callable[..., Any])

MAX_CORE = 65535


class Seconds(Number):
    """A number of seconds within a range."""

    name = "seconds"


def core_list(text: str) -> Cores:
    """Return CPU ids from a list such as `0,2-3`. Raises ValueError, which click reports, for other text."""
    try:
        return tuple(core for part in text.split(",") for core in _span(part))
    except ValueError:
        raise ValueError(f"{text!r} is not a list of CPU ids; expected e.g. 0,2-3, each at most {MAX_CORE}") from None


def _span(part: str) -> range:
    """Return the ids of a part such as `2` or `2-3`. Raises ValueError for an empty range or an id over MAX_CORE."""
    first, dash, last = part.partition("-")
    span = range(int(first), int(last if dash else first) + 1)
    if not span or span[-1] > MAX_CORE:
        raise ValueError(part)
    return span


def config_option(command: F) -> F:
    """Add `--config FILE`."""
    kind = click.Path(dir_okay=False)
    return click.option(
        "--config", "config_file", type=kind, help="TOML configuration file; command-line options override it."
    )(command)


def out_option(**kind: Any) -> Callable[[F], F]:
    """Add `--out`, a file for results or - for standard output; `kind`: further arguments of click.option."""
    return click.option(
        "--out",
        type=OutFile(or_stdout=True),
        default="-",
        show_default=True,
        help="File for the results; - is standard output.",
        **kind,
    )


def key_options(section: type[Section], names: Collection[str]) -> Callable[[F], F]:
    """Add the options of these keys of a section; `section_options` adds all."""

    def decorate(command: F) -> F:
        keys = _keys([(section_name(section), section)])
        for name in reversed([name for name in keys if name in names]):
            kind, owners = keys[name]
            command = _option(name, kind, _help(owners, 1))(command)
        return command

    return decorate


def section_options(
    *sections: type[Section], own: Mapping[str, Sequence[type[OwnOptions]]] | None = None
) -> Callable[[F], F]:
    """Add an option for each key of the sections, and `--config`. An option that is not given is None.

    `own`: see `own_key_options`.
    """

    def decorate(command: F) -> F:
        command = own_key_options(own or {}, len(sections))(command)
        named = [(section_name(section), section) for section in sections]
        for name, (kind, owners) in reversed(_keys(named).items()):
            command = _option(name, kind, _help(owners, len(sections)))(command)
        return config_option(_with_old_names(named, command))

    return decorate


def own_key_options(own: Mapping[str, Sequence[type[OwnOptions]]], num_roles: int = 1) -> Callable[[F], F]:
    """Add an option for each key of certain engines or proposers, by the section that chooses them.

    `num_roles`: number of sections of the command.
    """

    def decorate(command: F) -> F:
        each = [(section, kind) for section, types in own.items() for kind in types]
        for name, (kind, owners) in reversed(_keys(each).items()):
            command = _option(name, kind, _help(owners, num_roles))(command)
        return _with_old_names([(f"{section}.{kind.LABEL}", kind) for section, kind in each], command)

    return decorate


def _keys(sections: Iterable[tuple[str, type[Section]]]) -> dict[str, tuple[Any, dict[str, Field[Any]]]]:
    """Return for each key its type, and its field in each section with it."""
    keys: dict[str, tuple[Any, dict[str, Field[Any]]]] = {}
    for section, cls in sections:
        for f in fields(cls):
            if not f.metadata["is_hidden"]:
                keys.setdefault(f.name, (kinds(cls)[f.name], {}))[1].setdefault(section, f)
    return keys


def _help(owners: Mapping[str, Field[Any]], num_sections: int) -> str:
    """Return the help text of a key, with one text per section if they differ."""
    only = f" (--role {next(iter(owners))} only)" if len(owners) < num_sections else ""
    said = {owner: f"{f.metadata['help']}{only}{_default(f)}" for owner, f in owners.items()}
    texts = set(said.values())
    return texts.pop() if len(texts) == 1 else " ".join(f"--role {owner}: {text}" for owner, text in said.items())


def _default(f: Field[Any]) -> str:
    shown = ("off", "on")[f.default] if isinstance(f.default, bool) else f.default
    return "" if f.default in ("", ()) else f"  [default: {shown}]"


def _with_old_names(sections: Iterable[tuple[str, type[Section]]], command: F) -> F:
    """Add hidden options for the old names of renamed keys."""
    for name, section in sections:
        for old, new in RENAMED.get(name, {}).items():
            command = _option(old, kinds(section)[new], hidden=True)(command)
    return command


def _option(name: str, kind: Any, text: str = "", *, hidden: bool = False) -> Callable[[F], F]:
    """Return the decorator that adds the option of a key under this name."""
    flag = "--" + name.replace("_", "-")
    if kind is bool:
        return click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=text, hidden=hidden)
    if kind == Cores:
        return click.option(flag, name, type=core_list, metavar="LIST", help=text, hidden=hidden)
    if kind in (Options, Texts):
        return click.option(
            of_one(flag),
            name,
            multiple=True,
            callback=lambda _context, _parameter, values: values or None,
            metavar="NAME=VALUE" if kind == Options else None,
            help=text,
            hidden=hidden,
        )
    return click.option(flag, name, type=kind, help=text, hidden=hidden)


def log_options(default: str) -> Callable[[F], F]:
    """Add `--log-level` and `--log-json`, as `log_level` and `log_json`."""

    def decorate(command: F) -> F:
        level = click.option(
            "--log-level",
            type=click.Choice(log.LEVELS),
            default=default,
            show_default=True,
            help="Least severe level to log.",
        )
        as_json = click.option("--log-json", is_flag=True, help="Log JSON, one object per line.")
        return level(as_json(command))

    return decorate


RUNNING = ("engine", "engine_options")  # keys of [target] that choose the engine
OWN = {
    "target": [ENGINES.resolve(name).options for name in ENGINES],
    "draft": [DRAFTERS.resolve(name).options for name in DRAFTERS],
}
OWN_NAMES = {
    name
    for section, types in OWN.items()
    for kind in types
    for name in (*(f.name for f in fields(kind)), *RENAMED.get(f"{section}.{kind.LABEL}", ()))
}
