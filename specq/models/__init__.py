"""The models that ship with specq, and what a model's name means.

To bundle another: a directory NAME/ROLE in Hugging Face layout beside this file, and a README.md in NAME or NAME/ROLE
that says "licensed under ...".

Large stand-ins for the bundled models come from `inflate` (which needs torch) in one of the shapes of `shapes`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from specq.models.shapes import PRESETS, Shape, parse_shape
from specq.protocol import ConfigError

__all__ = ["PRESETS", "ROLES", "BundledModel", "Shape", "bundled", "parse_shape", "resolve_model"]

ROLES = ("target", "draft")
_HOME = Path(__file__).parent
_LICENCE = re.compile(r"licensed under ([\w.+-]*\w)")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class BundledModel:
    """A model in the package: one role of a pair."""

    name: str
    role: str
    path: Path
    num_bytes: int
    licence: str


def bundled() -> list[BundledModel]:
    """Return the models in the package, by name, targets first."""
    return [
        BundledModel(pair.name, role, pair / role, _num_bytes(pair / role), _licence(pair / role))
        for pair in sorted(_HOME.iterdir())
        for role in ROLES
        if _is_model(pair / role)
    ]


def resolve_model(name_or_dir: str, role: str) -> str:
    """Return the directory or hub name to load: of a bundled pair the model for `role`, a directory as it is.

    Raises ConfigError for a directory that holds no model, and for what can be neither a directory nor a hub name.
    """
    if _is_model(_HOME / name_or_dir / role) and _HUB_NAME.fullmatch(name_or_dir):
        return str(_HOME / name_or_dir / role)
    path = Path(name_or_dir).expanduser()
    if path.exists() or not _HUB_NAME.fullmatch(name_or_dir) or name_or_dir.startswith("."):
        return str(_checked(path))
    if "/" not in name_or_dir and (_HOME / name_or_dir).is_dir():
        raise ConfigError(f"the bundled pair {name_or_dir!r} has no {role} model")
    return name_or_dir


def _checked(path: Path) -> Path:
    """Return a path that looks like a model, or raise ConfigError that says what is missing."""
    if not path.is_dir():
        known = ", ".join(sorted({model.name for model in bundled()}))
        raise ConfigError(f"there is no model directory {path}; bundled models are: {known or 'none'}")
    if not _is_model(path):
        raise ConfigError(f"{path} holds no model: config.json is missing")
    return path


def _is_model(path: Path) -> bool:
    return (path / "config.json").is_file()


def _num_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _licence(path: Path) -> str:
    """Return the licence that the model card names, or "unknown"."""
    for card in (path / "README.md", path.parent / "README.md"):
        match = _LICENCE.search(card.read_text("utf-8")) if card.is_file() else None
        if match:
            return match[1]
    return "unknown"
