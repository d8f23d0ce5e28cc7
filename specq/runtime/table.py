"""Choice by table: names to "package.module:object", imported only when chosen.

So `specq --help`, the broker and the client start without torch. A new strategy, proposer or engine is one file and one
line in its package's table. `resolve` is for closed tables. A `Table` is open. It also has what another package
registers as an entry point of the table's group. That package's pyproject.toml has, for example:

    [project.entry-points."specq.strategies"]
    cautious = "their_package.module:Cautious"

Rule: our own names come first, and an entry point cannot replace them.

The module also lists optional packages and the extras of specq that install them. To add one, add a line to `EXTRAS`
and the extra to pyproject.toml.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import structlog

from specq.protocol import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

EXTRAS = {  # package -> extra
    **dict.fromkeys(("torch", "transformers"), "torch"),
    "vllm": "vllm",
    "matplotlib": "plots",
    "wandb": "wandb",
    "psycopg": "postgres",
    "ray": "ray",
}


def how_to_install(package: str) -> str:
    """Return the message for a package that is not installed."""
    extra = EXTRAS.get(package)
    hint = f"; in a clone of specq: .venv/bin/pip install -e '.[{extra}]'" if extra else ""
    if extra == "vllm":  # it brings its own torch
        hint = f"; in a clone of specq: python3 -m venv .venv-vllm && .venv-vllm/bin/pip install -e '.[{extra}]'"
    return f"this needs {package}, which is not installed{hint}"


log = structlog.get_logger(__name__)


def resolve(kind: str, table: Mapping[str, str], name: str) -> Any:
    """Return the object that `table` has under `name`. An unknown name raises ConfigError with the known names."""
    if name not in table:
        raise _unknown(kind, name, table)
    module, _, attribute = table[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


class Table(dict[str, str]):
    """Our own names to "package.module:object".

    `resolve` and `names` also include the entry points of `group`, and of that group's `former` name.
    """

    def __init__(self, kind: str, group: str, own: Mapping[str, str], former: str = "") -> None:
        super().__init__(own)
        self.kind, self.groups = kind, (group, former) if former else (group,)

    @cached_property
    def third_party(self) -> dict[str, EntryPoint]:
        """The objects that other packages registered, by name; read once, at first use."""
        from importlib.metadata import entry_points  # takes 20 ms, which a process with only our own names saves

        found: dict[str, EntryPoint] = {}
        for point in chain.from_iterable(entry_points(group=group) for group in self.groups):
            if point.name in found and point.value == found[point.name].value:
                continue  # a package that supports this version and the previous one registers it in both groups
            if point.name in self or point.name in found:
                log.warning("entry_point_ignored", group=point.group, name=point.name, value=point.value)
            else:
                found[point.name] = point
        return found

    def names(self) -> list[str]:
        """Return all names that can be resolved, our own first."""
        return [*self, *sorted(self.third_party)]

    def resolve(self, name: str) -> Any:
        """Return the object of that name.

        Raises ConfigError for an unknown name, and for an entry point that cannot be loaded.
        """
        if name in self:
            return resolve(self.kind, self, name)
        point = self.third_party.get(name)
        if point is None:
            raise _unknown(self.kind, name, self.names())
        try:
            return point.load()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"the {self.kind} {name!r} ({point.value}) cannot be loaded: {reason}") from error


def _unknown(kind: str, name: str, known: Mapping[str, str] | list[str]) -> ConfigError:
    return ConfigError(f"unknown {kind} {name!r}; known: {', '.join(sorted(known))}")
