"""Options of the engines and proposers that come with specq, by section. Others have `--engine-option`."""

from __future__ import annotations

from dataclasses import fields

from specq.config import RENAMED
from specq.drafting import PROPOSERS
from specq.engines import ENGINES

RUNNING = ("engine", "engine_options")  # keys of [target]: what runs the model
OWN = {
    "target": [ENGINES.resolve(name).options for name in ENGINES],
    "draft": [PROPOSERS.resolve(name).options for name in PROPOSERS],
}
OWN_NAMES = {
    name
    for section, types in OWN.items()
    for kind in types
    for name in (*(f.name for f in fields(kind)), *RENAMED.get(f"{section}.{kind.LABEL}", ()))
}
