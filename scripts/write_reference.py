"""Write the generated pages of docs/reference: messages, configuration, commands.

`--check` only lists stale pages.

.venv/bin/python scripts/write_reference.py
"""

from __future__ import annotations

import inspect
import re
import sys
import typing
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import click
import numpy as np

from specq.broker import diagram
from specq.cli import main as specq
from specq.config import (
    BrokerConfig,
    ClientConfig,
    DraftConfig,
    RayConfig,
    Section,
    ServeConfig,
    TargetConfig,
    UpConfig,
)
from specq.config.options import kinds, section_name
from specq.drafting import DRAFTERS
from specq.engines import ENGINES
from specq.protocol import ModelInfo
from specq.protocol.bounds import SAMPLING, SPECULATION
from specq.protocol.messages import MESSAGES, Message, hot_path, to_broker, to_client, to_worker
from specq.protocol.params import SamplingParams, Speculation
from specq.protocol.versions import CAPABILITIES, GRAMMAR_CAPABILITIES, OLDEST_VERSION, PROTOCOL_VERSION, since_of

HOME = Path(__file__).parent.parent / "docs" / "reference"
SECTIONS = (BrokerConfig, TargetConfig, DraftConfig, UpConfig, RayConfig, ServeConfig, ClientConfig)
OWN: dict[type[Section], tuple[Any, str]] = {TargetConfig: (ENGINES, "engine"), DraftConfig: (DRAFTERS, "proposer")}
FOLDERS = {
    to_broker: "To the broker",
    to_worker: "From the broker to workers",
    hot_path: "In each round",
    to_client: "To clients",
}
MADE = "<!-- Written by scripts/write_reference.py: change the code instead. -->\n\n"

PROTOCOL = """# Protocol

Clients, broker, verifiers and drafters exchange these messages over ZeroMQ. Clients and workers connect DEALER sockets
to the broker's ROUTER. The broker connects one DEALER to each verifier's ROUTER. [Architecture](../architecture.md)
describes the order of messages.

A message is a list of frames:

1. **key**: 8 bytes, little-endian: the message's `session_id` or `job_id`, else 0.
2. **header**: a JSON object with the version `v`, the `type`, and the scalar fields that differ from their defaults.
3. One frame for **each array**, little-endian, in the order below. Empty arrays at the end are left out.

Every value has a bound. A peer refuses a value out of bounds with a message that names the allowed values. `x` in the
last column marks a required field.

The current version is {version}. Version {oldest} is also valid. `v` is the oldest version with all fields of the
message: "since {version}" in the last column marks a field that {oldest} does not have. A peer refuses other versions,
and replies with the versions that it supports. A worker lists its capabilities beyond version {oldest} in `Hello`, and
the broker in `Welcome` ([decision 17](../decisions/0017-versions-on-the-wire.md)). Today these are: {capabilities}. The
broker, and verifiers that build grammars, also list the kinds of grammars: {grammars}.

Positions count from the start of the context, which includes the prompt.
"""
STATES = """
## States of a job

Generated from the table in `specq/broker/state/job.py`, the only place that changes a state.

```mermaid
{}
```
"""
CONFIGURATION = """# Configuration

A TOML file has the sections below. Each key is also an option of the section's command: `kv_slots` of `[target]` is
`specq worker --role target --kv-slots`. `specq up` has only the common options, and reads the others from a file.

The command line overrides the environment, and the environment overrides the file. Options of one engine or proposer
are in a separate section, such as `[target.vllm]`. [configs/](../../configs) has example files.

| variable | meaning |
|---|---|
| `SPECQ_CONFIG` | Configuration file if `--config` is not given. |
| `SPECQ_BROKER` | Broker that workers and clients connect to, or several, separated by commas. |
| `SPECQ_STATE` | Directory of the brokers' journals, and of files and batches. Default: `~/.local/state/specq`. |
| `SPECQ_CACHE` | Directory of tokenizers, models, kernels, step times, repacked weights. Default: `~/.cache/specq`. |
| `SPECQ_HEALTH` | File in which a broker or worker keeps its state, such as `ready`, for probes. Default: none. |
"""
COMMANDS = """# Commands

This page has the `--help` text of each command. The exit status is:

- 0 for success;
- 2 for wrong options, files or input, and for output that cannot be written, with one line on standard error;
- 1 for other failures. If the reader of a pipe is gone, there is no message.
"""


def pages() -> dict[str, str]:
    """Return the text of each page by its name."""
    return {
        "protocol.md": MADE
        + PROTOCOL.format(
            version=PROTOCOL_VERSION,
            oldest=OLDEST_VERSION,
            capabilities=_listed(CAPABILITIES),
            grammars=_listed(GRAMMAR_CAPABILITIES),
        )
        + "".join(_protocol())
        + STATES.format(diagram()),
        "configuration.md": MADE + CONFIGURATION + "".join(text for cls in SECTIONS for text in _sections(cls)),
        "commands.md": MADE + COMMANDS + "".join(_commands(specq, "specq")),
    }


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


# --- messages ---------------------------------------------------------------------------------------------------------


def _protocol() -> Iterator[str]:
    for module, title in FOLDERS.items():
        yield f"\n## {title}\n"
        for cls in MESSAGES.values():
            if cls.__module__ == module.__name__:
                yield _message(cls)
    yield "\n## Values in messages\n"
    for values in (SamplingParams, Speculation, ModelInfo):
        yield f"\n### {values.__name__}\n\n{_doc(values)}\n\n{_table(values)}"


def _message(cls: type[Message]) -> str:
    return f"\n### `{cls.TYPE}` ({cls.__name__})\n\n{_doc(cls)}\n\n{_table(cls)}"


def _table(cls: type[Any]) -> str:
    hints = typing.get_type_hints(cls, include_extras=True)
    rows = [f"| `{f.name}` | {_kind(hints[f.name], f.name)} | {_since(f)} |" for f in fields(cls)]
    return "\n".join(("| field | type | |", "|---|---|---|", *rows)) + "\n"


def _since(f: Field[Any]) -> str:
    """Return "x" for a required field, or the version that added a newer field."""
    is_required = f.default is MISSING and f.default_factory is MISSING
    return "x" if is_required else f"since {since_of(f)}" if since_of(f) > OLDEST_VERSION else ""


def _kind(hint: Any, name: str) -> str:
    """Return the type and the bound of a field in words."""
    if typing.get_origin(hint) is not typing.Annotated:
        return f"`{getattr(hint, '__name__', hint)}`{_own_bound(name)}"
    first, *rest = hint.__metadata__
    if isinstance(first, str):
        return f"array of {np.dtype(first).name}: {_cell(rest[1].allowed)}"
    kind = getattr(hint.__origin__, "__name__", "") if typing.get_args(hint.__origin__) == () else "list"
    kind = "object" if typing.get_origin(hint.__origin__) is dict else kind
    return f"{kind} {_cell(first.allowed)}"


def _own_bound(name: str) -> str:
    bound = SAMPLING.get(name) or SPECULATION.get(name)
    return f" {_cell(bound.allowed)}" if bound else ""


def _doc(cls: type[Any]) -> str:
    """Return a docstring, with aligned lists unchanged."""
    said = inspect.cleandoc(cls.__doc__ or "")
    head, _, rest = said.partition("\n\n")
    return head if not rest else f"{head}\n\n```text\n{rest}\n```"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")


# --- configuration ----------------------------------------------------------------------------------------------------


def _sections(cls: type[Section]) -> Iterator[str]:
    """Yield the text of a section, and of the sections of its engines or proposers."""
    yield _section(cls, section_name(cls), (cls.__doc__ or "").strip())
    table, what = OWN.get(cls, ({}, ""))
    for name in table:
        own = table.resolve(name).options
        if any(not f.metadata["is_hidden"] for f in fields(own)):
            further = " Other keys are arguments of vLLM's `EngineArgs`." if "further" in kinds(own) else ""
            yield _section(own, f"{section_name(cls)}.{name}", f"Options of the {what} `{name}`.{further}")


def _section(cls: type[Section], name: str, about: str) -> str:
    rows = [
        f"| `{f.name}` | {_default(f)} | {_cell(f.metadata['help'])}{_choices(f)} |"
        for f in fields(cls)
        if not f.metadata["is_hidden"]
    ]
    return "\n".join((f"\n## [{name}]\n\n{about}\n", "| key | default | meaning |", "|---|---|---|", *rows)) + "\n"


def _default(f: Field[Any]) -> str:
    if f.default in ("", ()):
        return ""
    return f"`{str(f.default).lower() if isinstance(f.default, bool) else f.default}`"


def _choices(f: Field[Any]) -> str:
    choices = f.metadata["choices"]
    return f" One of {', '.join(choices)}." if choices else ""


# --- commands ---------------------------------------------------------------------------------------------------------


def _commands(command: click.Command, name: str) -> Iterator[str]:
    """Yield the help text of a command and of its subcommands."""
    settings = {**command.context_settings, "info_name": name, "max_content_width": 110, "terminal_width": 110}
    context = click.Context(command, **settings)
    if isinstance(command, click.Group):
        found = [(one, command.get_command(context, one)) for one in command.list_commands(context)]
        if name != "specq":
            yield _help(command, context, name)
        for one, below in found:
            if below is not None and not below.hidden:
                yield from _commands(below, f"{name} {one}")
    else:
        yield _help(command, context, name)


def _help(command: click.Command, context: click.Context, name: str) -> str:
    text = re.sub(r"[ \t]+$", "", command.get_help(context), flags=re.MULTILINE)
    return f"\n## {name}\n\n```text\n{text}\n```\n"


def main() -> int:
    """Write the pages. With `--check`, return 1 if a page is stale."""
    stale = [name for name, text in pages().items() if not _is_written(name, text)]
    if "--check" in sys.argv[1:]:
        sys.stdout.write(
            "".join(f"docs/reference/{name} is out of date: run scripts/write_reference.py\n" for name in stale)
        )
        return 1 if stale else 0
    for name in stale:
        (HOME / name).write_text(pages()[name], "utf-8")
    return 0


def _is_written(name: str, text: str) -> bool:
    path = HOME / name
    return path.exists() and path.read_text("utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
