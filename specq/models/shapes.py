"""Sizes of decoders that the bundled pair may be inflated to, and changes from the command line.

It does not need torch, so that `specq models inflate --help` can list the shapes. To add one, add a line to `PRESETS`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from specq.protocol import ConfigError


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder; with `qkv_bias` it is a Qwen2, else a Llama."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = True
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        if self.qkv_bias and self.head_dim * self.heads != self.hidden:
            raise ConfigError(f"a Qwen2 needs heads * head_dim = hidden; this is {self}")


PRESETS = {
    "qwen2.5-7b": Shape(3584, 28, 28, 4, 128, 18944, 152064, tied=False, qkv_bias=True),
    "qwen2.5-0.5b": Shape(896, 24, 14, 2, 64, 4864, 151936, tied=True, qkv_bias=True),
    "llama-3.1-8b": Shape(4096, 32, 32, 8, 128, 14336, 128256, tied=False),
    "llama-3.2-1b": Shape(2048, 16, 32, 8, 64, 8192, 128256),
    # On one core of two, the compiled forward takes 20 ms and 2 ms per step. The widths are 4 times tiny's, so that no
    # value is rounded.
    "cpu-target": Shape(1024, 18, 16, 4, 64, 2816, 4096),
    "cpu-draft": Shape(768, 2, 12, 4, 64, 1024, 4096),
}


def parse_shape(name: str, changes: str = "") -> Shape:
    """Return a shape of `PRESETS` with changes such as "hidden=1024,layers=30". ConfigError lists the known names."""
    if name not in PRESETS:
        raise ConfigError(f"unknown shape {name!r}; known: {', '.join(PRESETS)}")
    known = asdict(PRESETS[name])
    changed: dict[str, Any] = {}
    for key, value in _pairs(changes):
        if key not in known:
            raise ConfigError(f"{key!r} is not a size of a shape; known: {', '.join(known)}")
        changed[key] = bool(value) if isinstance(known[key], bool) else value
    return replace(PRESETS[name], **changed)


def _pairs(changes: str) -> list[tuple[str, int]]:
    try:
        return [(key.strip(), int(value)) for key, value in (part.split("=") for part in changes.split(",") if part)]
    except ValueError as error:
        raise ConfigError(f"{changes!r} is not of the form hidden=1024,layers=30") from error


def check_fits(small: Shape, large: Shape) -> None:
    """Raise ConfigError unless the small shape's models can be inflated to the large one."""
    for field in fields(Shape):
        have, want = getattr(small, field.name), getattr(large, field.name)
        if want < have and field.name not in ("tied", "qkv_bias"):
            raise ConfigError(f"{field.name}={want} is less than the small model's {have}")
    if large.head_dim % small.head_dim or large.heads % large.kv_heads:
        raise ConfigError(f"head_dim must be a multiple of {small.head_dim}, and heads one of kv_heads: {large}")
    if large.hidden % large.heads:
        raise ConfigError(f"hidden must be a multiple of heads: {large}")
    if large.heads // large.kv_heads < small.heads // small.kv_heads:
        raise ConfigError(f"a key-value head needs at least {small.heads // small.kv_heads} heads: {large}")
    if small.qkv_bias or (large.tied and not small.tied):
        raise ConfigError("the small model must be a Llama without biases, tied if the large one is")
