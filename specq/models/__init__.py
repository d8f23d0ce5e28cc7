"""The models that specq knows by name, and what a model's name means.

    tiny       a pair that ships with specq, its weights compressed (`packed`); for tests
    smollm2    a small chat model, whose weights a package brings (`packaged`); a draft model, a parallel one
               (smollm2-parallel) and Medusa heads ship with specq

To bundle another: a directory NAME/ROLE in Hugging Face layout (or of the form `checkpoints.draft_form`; as NAME/heads,
of `drafting.medusa.form`; as NAME/parallel, a parallel draft model, which is known as NAME-parallel) beside this file,
and a README.md in NAME or NAME/ROLE that says "licensed under ...". Weights in bfloat16 take a third less when they are
packed (`packed`).

Large stand-ins for the bundled models come from `inflate` (which needs torch) in one of the shapes of `shapes`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from specq.checkpoints import gguf_in, is_gguf, read_text
from specq.drafting.eagle3 import form as eagle_form
from specq.drafting.medusa import form as medusa_form
from specq.models.packaged import PACKAGED, find_packaged, pull
from specq.models.packed import find_unpacked, is_packed, num_bytes, unpacked
from specq.models.shapes import PRESETS, Shape, parse_shape
from specq.protocol import ConfigError, did_you_mean

__all__ = [
    "FALLBACK",
    "HEADS",
    "PACKAGED",
    "PREFERRED",
    "PRESETS",
    "ROLES",
    "SHOWN_PAIR",
    "KnownModel",
    "Shape",
    "could_be_target",
    "default_model",
    "default_pair",
    "draft_for",
    "find_model",
    "known_models",
    "parallel_for",
    "parse_shape",
    "pull",
    "resolve_model",
    "tokenizer_of",
]

ROLES = ("target", "draft")  # of a pair
PARALLEL = "parallel"  # a pair's parallel draft model, whose name is NAME-parallel
HEADS = "heads"  # Medusa heads or an EAGLE-3 head for a target, which lie beside a pair
PREFERRED, FALLBACK = "smollm2", "tiny"  # the default model where it is there, and elsewhere
SHOWN_PAIR = f"{PREFERRED}, or {FALLBACK} where its draft model is not there"  # for help texts
_HOME = Path(__file__).parent
ALIKE = 0.8  # of a name of ours and one that is not: from there on it is taken for a slip, not for a name of the hub's
_LICENCE = re.compile(r"licensed under ([\w.+-]*\w)")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that has a name: one role of a pair, or HEADS.

    path        where it is; None where it is not on this machine. Of a packed model its copy in the cache, once there
                is one
    num_bytes   of all its files, of packed ones as they are when they are unpacked
    """

    name: str
    role: str
    path: Path | None
    num_bytes: int
    licence: str
    source: str


def known_models() -> list[KnownModel]:
    """Return the models that have names, by name, targets first; nothing is fetched or unpacked."""
    return [
        model
        for pair in sorted(path for path in _HOME.iterdir() if path.is_dir())
        for role in (*ROLES, PARALLEL, HEADS)
        if (model := _known(pair, role))
    ]


def _known(pair: Path, role: str) -> KnownModel | None:
    home = pair / role
    if _is_model(home):
        name, role = (f"{pair.name}-{PARALLEL}", "draft") if role == PARALLEL else (pair.name, role)
        path, source = (home, "bundled") if not is_packed(home) else _unpacked_home(home)
        return KnownModel(name, role, path, num_bytes(home), _licence(home), source)
    if role != "target" or pair.name not in PACKAGED:
        return None
    here, source = find_packaged(pair.name) or (None, f"not here: specq models pull {pair.name}")
    return KnownModel(pair.name, role, here, PACKAGED[pair.name].num_bytes, _licence(home), source)


def _unpacked_home(home: Path) -> tuple[Path, str]:
    """Return where a packed model of ours is, and how it lies there."""
    found = find_unpacked(home)
    return (found, "bundled, unpacked") if found else (home, "bundled, packed")


def default_model() -> str:
    """Return the name of the target that is used where none is named."""
    return PREFERRED if find_packaged(PREFERRED) else FALLBACK


def default_pair() -> str:
    """Return the name of the pair that is shown and measured where none is named: its draft model must be there,
    too."""
    name = default_model()
    return name if draft_for(name) else FALLBACK


def draft_for(model: str) -> str:
    """Return the name of the draft model that goes with a target of this name; "" for none."""
    return model if _HUB_NAME.fullmatch(model) and _is_model(_HOME / model / "draft") else ""


def parallel_for(model: str) -> str:
    """Return the name of the parallel draft model that goes with a target of this name; "" for none."""
    return f"{model}-{PARALLEL}" if _HUB_NAME.fullmatch(model) and _is_model(_HOME / model / PARALLEL) else ""


def _home(name: str, role: str) -> Path:
    """Return where a model of ours lies, if there is one of this name."""
    pair, _, kind = name.rpartition("-")
    return _HOME / pair / PARALLEL if pair and (kind, role) == (PARALLEL, "draft") else _HOME / name / role


def resolve_model(name: str, role: str) -> str:
    """Return the directory, GGUF file or hub name to load: for a name of ours the model for `role`, a path as it is. A
    packed model is unpacked into the cache first, which takes a second once.

    Raises ConfigError for a path that holds no model, for what can be neither a path nor a hub name, for a model that
    must be fetched first, for heads whose config.json is not of heads, and for a packed model that cannot be unpacked.
    """
    found = find_model(name, role)
    return str(unpacked(Path(found))) if is_packed(Path(found)) else found


def find_model(name: str, role: str) -> str:
    """Return what `resolve_model` does, of a packed model the directory in which it lies packed; raises what that does
    of names and paths."""
    if _HUB_NAME.fullmatch(name) and _is_model(home := _home(name, role)):
        return str(home)
    path = Path(name).expanduser()
    if role == HEADS:
        return str(_checked_heads(path))
    if path.exists() or not _HUB_NAME.fullmatch(name) or name.startswith(".") or is_gguf(name):
        return str(_checked(path))
    if name in PACKAGED and role == "target":
        return str(_packaged(name))
    if "/" not in name and (_HOME / name).is_dir():
        raise ConfigError(f"the pair {name!r} has no {role} model")
    hint = "" if "/" in name else did_you_mean(name, {model.name for model in known_models()}, ALIKE)
    if hint:
        raise ConfigError(f"there is no model {name!r}; {hint} `specq models` lists the named models")
    return name


def could_be_target(name: str) -> bool:
    """Return whether a verifier, of this machine or another, could load a target by this name: it is one of ours, a
    path, or a hub name with a slash."""
    is_ours = any((model.name, model.role) == (name, "target") for model in known_models())
    return is_ours or "/" in name or is_gguf(name) or Path(name).expanduser().exists()


def tokenizer_of(name: str, role: str) -> str:
    """Return where a model's tokenizer is, as `resolve_model` does, but nothing is unpacked: a draft model of ours may
    have its target's."""
    path = find_model(name, role)
    home = _home(name, role)
    lacks_own, pair = path == str(home) and read_text(Path(path), "tokenizer.json") is None, home.parent.name
    has_target = _is_model(_HOME / pair / "target") or (pair in PACKAGED and find_packaged(pair))
    return find_model(pair, "target") if lacks_own and has_target else path


def _packaged(name: str) -> Path:
    found = find_packaged(name)
    if found is None:
        raise ConfigError(f"{name} is not on this machine; fetch it: specq models pull {name}")
    return found[0]


def _checked(path: Path) -> Path:
    """Return a path that looks like a model, or raise ConfigError that says what is missing."""
    if is_gguf(path) and path.is_file():
        return path
    if not path.is_dir():
        kind = "GGUF file" if is_gguf(path) else "model directory"
        known = ", ".join(sorted({model.name for model in known_models()}))
        raise ConfigError(f"there is no {kind} {path}; named models: {known or 'none'}")
    if file := gguf_in(path):
        return file
    if not _is_model(path):
        raise ConfigError(f"{path} contains no model: it has neither a config.json nor a GGUF file")
    return path


def _checked_heads(path: Path) -> Path:
    """Return a directory whose config.json is of heads, or raise ConfigError that says what is missing."""
    if not path.is_dir():
        known = ", ".join(model.name for model in known_models() if model.role == HEADS)
        raise ConfigError(
            f"there is no directory of heads {path}; `specq train medusa` or `specq train eagle3` makes one; "
            f"named heads exist for: {known}"
        )

    if eagle_form.is_eagle(path):
        eagle_form.eagle_shape(path)
    else:
        medusa_form.heads_shape(path)
    return path


def _is_model(path: Path) -> bool:
    return (path / "config.json").is_file()


def _licence(path: Path) -> str:
    """Return the licence that the model card names, or "unknown"."""
    for card in (path / "README.md", path.parent / "README.md"):
        match = _LICENCE.search(card.read_text("utf-8")) if card.is_file() else None
        if match:
            return match[1]
    return "unknown"
