"""Choice by table: names to "package.module:object", resolved only when chosen.

So `specq --help`, the broker and the client start without torch, and a new strategy, proposer or engine is one file and
one line in its folder's table.
"""

import importlib
from typing import Any

from specq.protocol import ConfigError


def resolve(kind: str, table: dict[str, str], name: str) -> Any:
    """Return the object that `table` files under `name`; an unknown name raises ConfigError that lists the known."""
    if name not in table:
        raise ConfigError(f"unknown {kind} {name!r}; known are {', '.join(sorted(table))}")
    module, _, attribute = table[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
