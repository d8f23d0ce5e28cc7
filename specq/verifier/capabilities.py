"""What a verifier can do, as it lists it in `Hello.capabilities`.

A verifier builds grammars if the package llguidance can be imported and its model has a tokenizer.json.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from functools import cache

import structlog

from specq.protocol import CAPABILITIES, GRAMMAR_CAPABILITIES

log = structlog.get_logger(__name__)


def capabilities_of(tokenizer_files: Collection[str]) -> tuple[str, ...]:
    """Return the capabilities of a verifier whose model has these tokenizer files."""
    builds_grammars = "tokenizer.json" in tokenizer_files and has_llguidance()
    return (*CAPABILITIES, *GRAMMAR_CAPABILITIES) if builds_grammars else CAPABILITIES


@cache
def has_llguidance() -> bool:
    """Return whether llguidance can be imported. It is compiled code, which may be installed and not fit."""
    try:
        importlib.import_module("llguidance")
    except ImportError as error:
        log.warning("grammars_unavailable", reason=str(error))
        return False
    return True
