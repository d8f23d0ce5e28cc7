"""The models that specq knows by name, and the meaning of a model's name.

- tiny: a pair that ships with specq, its weights compressed (`packed`); for tests.
- smollm2: a small chat model, whose weights come in a package (`packaged`). A draft model, a parallel one
  (smollm2-parallel) and Medusa heads ship with specq.

To bundle another, add a directory NAME/ROLE beside this file. It has Hugging Face layout or the form
`checkpoints.draft_form`. NAME/heads has the form of `drafting.medusa.form`. NAME/parallel is a parallel draft model,
known as NAME-parallel. A README.md in NAME or NAME/ROLE must contain "licensed under ...". Packed bfloat16 weights
(`packed`) take a third less space.

`draft_choice` finds a draft model for a GGUF file.

`inflate` makes large stand-ins for the bundled models, in one of the shapes of `shapes`. It needs torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from specq.checkpoints import gguf_in, is_gguf, read_text
from specq.drafting.head_kinds import kind_of
from specq.models.packaged import PACKAGED, find_packaged, pull
from specq.models.packed import find_unpacked, is_packed, num_bytes, unpacked
from specq.models.shapes import PRESETS, Shape, parse_shape
from specq.protocol import MEDUSA, ConfigError, did_you_mean

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
HEADS = "heads"  # Medusa heads, an EAGLE-3 head or a block drafter for a target, beside a pair
PREFERRED, FALLBACK = "smollm2", "tiny"  # the default model if available, and the default otherwise
SHOWN_PAIR = f"{PREFERRED}, or {FALLBACK} where its draft model is not there"  # for help texts
_HOME = Path(__file__).parent
ALIKE = 0.8  # similarity to a known name from which an unknown name counts as a typing error, not as a hub name
_LICENCE = re.compile(r"licensed under ([\w.+-]*\w)")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that has a name: one role of a pair, or HEADS.

    - path: where it is; None if it is not on this machine. For a packed model, its copy in the cache if that exists.
    - num_bytes: size of all its files, unpacked.
    """

    name: str
    role: str
    path: Path | None
    num_bytes: int
    licence: str
    source: str


def known_models() -> list[KnownModel]:
    """Return the models that have names, by name, targets first. It fetches and unpacks no files."""
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
    """Return where a packed model of ours is, and in which form."""
    found = find_unpacked(home)
    return (found, "bundled, unpacked") if found else (home, "bundled, packed")


def default_model() -> str:
    """Return the name of the default target."""
    return PREFERRED if find_packaged(PREFERRED) else FALLBACK


def default_pair() -> str:
    """Return the name of the default pair for demos and measurements. Its draft model must be available too."""
    name = default_model()
    return name if draft_for(name) else FALLBACK


def draft_for(model: str) -> str:
    """Return the name of the draft model for this target; "" for none."""
    return model if _HUB_NAME.fullmatch(model) and _is_model(_HOME / model / "draft") else ""


def parallel_for(model: str) -> str:
    """Return the name of the parallel draft model for this target; "" for none."""
    return f"{model}-{PARALLEL}" if _HUB_NAME.fullmatch(model) and _is_model(_HOME / model / PARALLEL) else ""


def _home(name: str, role: str) -> Path:
    """Return the directory of the bundled model of this name and role. It may not exist."""
    pair, _, kind = name.rpartition("-")
    return _HOME / pair / PARALLEL if pair and (kind, role) == (PARALLEL, "draft") else _HOME / name / role


def resolve_model(name: str, role: str) -> str:
    """Return the directory, GGUF file or hub name to load. A name of ours gives its model for `role`.

    A packed model is first unpacked into the cache, which takes a second once. Raises ConfigError in these cases:

    - the path has no model, or the name can be neither a path nor a hub name;
    - the model must be fetched first;
    - the config.json of heads is not of heads;
    - a packed model cannot be unpacked.
    """
    found = find_model(name, role)
    return str(unpacked(Path(found))) if is_packed(Path(found)) else found


def find_model(name: str, role: str) -> str:
    """Return the result of `resolve_model`, but for a packed model its packed directory.

    Raises the same errors about names and paths.
    """
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
    """Return whether a verifier, here or elsewhere, could load a target by this name.

    It must be one of ours, a path, or a hub name with "/".
    """
    is_ours = any((model.name, model.role) == (name, "target") for model in known_models())
    return is_ours or "/" in name or is_gguf(name) or Path(name).expanduser().exists()


def tokenizer_of(name: str, role: str) -> str:
    """Return where a model's tokenizer is, like `resolve_model`, but without unpacking.

    A bundled draft model may use its target's tokenizer.
    """
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
    """Return a path that looks like a model. Raises ConfigError that names what is missing."""
    if is_gguf(path) and path.is_file():
        return path
    if not path.is_dir():
        kind = "GGUF file" if is_gguf(path) else "model directory"
        known = ", ".join(sorted({model.name for model in known_models()}))
        raise ConfigError(f"there is no {kind} {path}; named models: {known or 'none'}")
    if file := gguf_in(path):
        return file
    if (heads := kind_of(path)).source != MEDUSA and not heads.is_target:
        raise ConfigError(f"{path} contains {heads.called}, not a model; its target is the model, and it the heads")
    if not _is_model(path):
        raise ConfigError(f"{path} contains no model: it has neither a config.json nor a GGUF file")
    return path


def _checked_heads(path: Path) -> Path:
    """Return a directory whose config.json is of heads. Raises ConfigError that names what is missing."""
    if not path.is_dir():
        known = ", ".join(model.name for model in known_models() if model.role == HEADS)
        raise ConfigError(
            f"there is no directory of heads {path}; `specq train medusa`, `specq train eagle3` or "
            f"`specq train block` makes one; named heads exist for: {known}"
        )
    kind_of(path).check(path)
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
