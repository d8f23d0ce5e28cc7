"""Trees of drafts as people write them down: a list of paths of ranks, or a file that holds one.

Medusa's published choices are such lists, as `[(0,), (0, 0), (1,)]` or `[[0], [0, 0], [1]]`; both are read.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from specq.protocol import ConfigError

MOST_BYTES = 1 << 20  # of a file


def read_tree(said: str) -> Any:
    """Return the value that a list of paths spells, or that the file of this name holds; what it must be is checked by
    `Speculation`. Raises ConfigError for what is neither."""
    text = said.strip()
    if not text.startswith(("[", "(")):
        text = _content(Path(said).expanduser())
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise ConfigError(f"{_shown(said)} is not a list of paths such as [[0],[0,0],[1]], nor a file of one") from None


def _content(path: Path) -> str:
    try:
        if path.stat().st_size <= MOST_BYTES:
            return path.read_text("utf-8-sig").strip()
    except (OSError, ValueError):
        raise ConfigError(
            f"{_shown(str(path))} is neither a list of paths such as [[0],[0,0],[1]] nor a file of one"
        ) from None
    raise ConfigError(f"{path} has more than {MOST_BYTES} bytes, which is no tree of drafts")


def _shown(said: str) -> str:
    return repr(said if len(said) <= 80 else said[:77] + "...")
