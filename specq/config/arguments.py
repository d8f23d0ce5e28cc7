"""Sections as the arguments of a command, and back: what `specq up` hands to the processes that it starts."""

from __future__ import annotations

from dataclasses import fields

from specq.config.engine_options import Options, from_table
from specq.config.options import Texts
from specq.config.own_options import options_of
from specq.config.sections import DraftConfig, Section, TargetConfig, kinds


def to_arguments(section: Section) -> list[str]:
    """Return the options that make this section of the defaults: what `section_options` reads back."""
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
    """Return the flag of a key that holds several values, of which each is given by itself."""
    return flag.removesuffix("s")
