"""The choice of a draft model for a target, if the user names none.

A named target has its own (`draft_for`). For a GGUF file, a model with the same tokenizer is searched: first among the
GGUF files beside it, then among the models of `specq models` that are on this machine. The smallest one is used, since
on a processor the time of a draft grows with its size. It has at most SMALLER of the target's bytes.

Rule: a choice must not keep a deployment from starting. A file whose header cannot be read, or names something that is
not supported, is not chosen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from specq.checkpoints import (
    GgufFile,
    check_tensors,
    draft_form,
    forget_gguf,
    gguf_name,
    is_gguf,
    num_gguf_tokens,
    read_gguf,
    same_tokenizer,
    weight_bytes,
)
from specq.engines import read_info
from specq.models import PARALLEL, ROLES, draft_for, find_model, known_models
from specq.protocol import ConfigError

SMALLER = 0.5  # of the target's bytes: a larger draft model costs too much of a step
MOST_READ = 8  # files beside the target; to read one takes up to half a second


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """A draft model, as a name or path for `find_model`, and why it was chosen. "": none, and why there is none."""

    model: str = ""
    reason: str = ""


def choose_draft(target: str) -> DraftChoice:
    """Return the draft model for a target. The reason is "" if the target has its own, or is not a GGUF file."""
    try:
        own, path = draft_for(target), Path(find_model(target, "target"))
        if own or not is_gguf(path):
            return DraftChoice(own)
        path = path.absolute()
        return _chosen(path, (path.stat().st_mtime_ns, path.parent.stat().st_mtime_ns))
    except (ConfigError, OSError):
        return DraftChoice()  # whoever loads the target reports it


@lru_cache(maxsize=4)
def _chosen(path: Path, _changed: tuple[int, int]) -> DraftChoice:
    most, target = int(SMALLER * weight_bytes(path)), read_gguf(path)
    try:
        for found, reason in (*_beside(path, most), *_known(most)):
            if _fits(found, target):
                return DraftChoice(found, f"{reason} with the tokenizer of {path.name}")
    finally:
        forget_gguf()
    return DraftChoice(
        "", f"no model with its tokenizer and at most {SMALLER:.0%} of its size is beside it or in `specq models`"
    )


def _beside(target: Path, most: int) -> Iterator[tuple[str, str]]:
    """Yield the GGUF models in the target's directory with at most that many bytes, the smallest first."""
    paths = sorted(path for path in target.parent.iterdir() if is_gguf(path) and path.is_file())
    sizes = Counter[str]()
    for path in paths:
        sizes[gguf_name(path)] += path.stat().st_size
    first = {gguf_name(path): path for path in reversed(paths) if gguf_name(path) != gguf_name(target)}
    small = sorted((sizes[name], path) for name, path in first.items() if sizes[name] <= most)
    for size, path in small[:MOST_READ]:
        yield str(path), f"the smallest GGUF file beside it ({size / 1e6:.0f} MB)"


def _known(most: int) -> list[tuple[str, str]]:
    """Return the named models on this machine with at most that many bytes, the smallest first."""
    found = [
        (model.num_bytes, model.name if model.role == "draft" else str(model.path))
        for model in known_models()
        if model.path and model.role in ROLES and not model.name.endswith(f"-{PARALLEL}")
    ]
    return [
        (name, f"the smallest of `specq models` ({size / 1e6:.0f} MB)") for size, name in sorted(found) if size <= most
    ]


def _fits(name: str, target: GgufFile) -> bool:
    """Return whether a model has the target's tokenizer, and can be loaded."""
    try:
        path = Path(find_model(name, "draft"))
        if is_gguf(path):
            file = read_gguf(path)
            if not same_tokenizer(file, target):
                return False
            check_tensors(file)
            return bool(read_info(path).tokenizer_hash)
        shape = draft_form.draft_shape(path)
        if shape is None or shape.num_tokens != num_gguf_tokens(target):
            return False
        return shape.tokenizer_hash == read_info(target.path).tokenizer_hash
    except (ConfigError, OSError):
        return False
