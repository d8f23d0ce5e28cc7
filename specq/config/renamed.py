"""Old names of keys, which users may still have in files and in commands: each is an alias for one version, with a
warning.

To rename a key: change it in its section and add a line to `RENAMED`; remove the line one version later.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from specq.protocol import ConfigError

RENAMED: Mapping[str, Mapping[str, str]] = {  # section, or section of an engine or proposer: old name: new name
    "target": {"backup": "prompt_lookup"},  # since wire version 2
    "draft": {"law_size": "distribution_size"},  # likewise
    "target.vllm": {"tensor_parallel": "tensor_parallel_size"},  # `specq bench gpu` had it as --tensor-parallel
}


def with_new_names(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a section under their new names; warns of old ones.

    Raises ConfigError for a key that is given under both names.
    """
    names = RENAMED.get(section, {})
    for old in names.keys() & values.keys():
        new = names[old]
        if new in values:
            raise ConfigError(f"{section}.{old} and {section}.{new} are both given; {old} is the old name of {new}")
        warnings.warn(
            f"{section}.{old} is now {section}.{new}; the next version does not know the old name",
            FutureWarning,
            stacklevel=2,
        )
    return {names.get(name, name): value for name, value in values.items()}
