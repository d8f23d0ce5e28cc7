"""The form of Medusa heads: the content of their config.json, and their tensors.

Heads are a directory with config.json and medusa_lm_head.safetensors or medusa_lm_head.pt, as Medusa's authors write
them (Cai et al. 2024, arXiv 2401.10774). Head i predicts the token i + 1 positions after the next token, from the
target's last hidden state:

- `medusa_num_layers` residual blocks, x + silu(W x + b): `i.j.linear.weight` [hidden, hidden] and `i.j.linear.bias`
  [hidden].
- A matrix to the vocabulary, `i.N.weight` [tokens, hidden], where N is the number of blocks.

The heads that `specq train medusa` writes are smaller in three ways, each optional:

- Without any `i.N.weight`, all heads end in the target's own output matrix.
- The matrices cover only the tokens in `lm_head.token_ids` (int32, ascending).
- A matrix is int8 with a float32 scale for each row, in NAME.scale, as in `draft_form`.

Their config.json names their target: `hidden_size`, `num_tokens` and `tokenizer_hash` (see `specq.text`). Heads that
were trained together with a target fit no other one. They also have `target_fingerprint` (see
`specq.engines.checkpoint`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specq.checkpoints import read_json
from specq.checkpoints.draft_form import HASH_LENGTH, SCALE, TOKEN_IDS
from specq.drafting.head_config import Forms
from specq.protocol import ConfigError, shown

KIND = "Medusa heads"
MODEL_TYPE = "specq-medusa"  # our own heads; Medusa's authors use their target's type
WEIGHTS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")  # the first that exists is read
MOST_HEADS, MOST_LAYERS = 16, 8


@dataclass(frozen=True, slots=True)
class HeadsShape:
    """The content of config.json. Values of the target are 0 or "" if missing."""

    medusa_num_heads: int
    medusa_num_layers: int
    hidden_size: int = 0
    num_tokens: int = 0
    tokenizer_hash: str = ""
    target_fingerprint: str = ""

    def config(self) -> dict[str, Any]:
        """Return the content of config.json."""
        said = {"model_type": MODEL_TYPE, **asdict(self)}
        if not self.target_fingerprint:
            del said["target_fingerprint"]
        return said


def heads_shape(heads: Path) -> HeadsShape:
    """Return the content of a directory's config.json; ConfigError if it holds no Medusa heads."""
    if not (heads / "config.json").is_file():
        raise ConfigError(f"{heads} contains no Medusa heads: it has no config.json")
    said = read_json(heads, "config.json")
    own = said.get("model_type") == MODEL_TYPE
    return HeadsShape(
        _count(heads, said, "medusa_num_heads", MOST_HEADS),
        _count(heads, said, "medusa_num_layers", MOST_LAYERS),
        _count(heads, said, "hidden_size") if own else 0,
        _count(heads, said, "num_tokens") if own else 0,
        _hash(heads, said, "tokenizer_hash") if own else "",
        _hash(heads, said, "target_fingerprint") if own and "target_fingerprint" in said else "",
    )


def _count(heads: Path, said: dict[str, Any], key: str, most: int = 2**31 - 1) -> int:
    value = said.get(key)
    if type(value) is int and 0 < value <= most:
        return value
    raise ConfigError(
        f"{heads / 'config.json'}: {key} is {shown(value)}; Medusa heads need a whole number from 1 to {most}"
    )


def _hash(heads: Path, said: dict[str, Any], key: str) -> str:
    value = said.get(key)
    if isinstance(value, str) and len(value) == HASH_LENGTH:
        return value
    raise ConfigError(f"{heads / 'config.json'}: {key} is {shown(value)}, but must be of {HASH_LENGTH} hex digits")


def block_names(head: int, layer: int) -> tuple[str, str]:
    """Return the names of a residual block's weight and bias."""
    return f"{head}.{layer}.linear.weight", f"{head}.{layer}.linear.bias"


def output_name(shape: HeadsShape, head: int) -> str:
    """Return the name of a head's matrix to the vocabulary."""
    return f"{head}.{shape.medusa_num_layers}.weight"


def reason_against(shape: HeadsShape, found: Forms) -> str:
    """Return the fault of a file's tensors, given the number format and shape of each, or ""."""
    first, _ = block_names(0, 0)
    hidden = shape.hidden_size or (found[first][1][-1] if first in found else 0)
    if not hidden:
        return f"it has no {first}"
    needed = _needed(shape, found, hidden)
    for name in (*needed, *found):
        if name not in found:
            return f"{name} is missing ({sum(other not in found for other in needed)} tensors are)"
        if name.endswith(SCALE) and name.removesuffix(SCALE) in needed:
            continue
        if name not in needed:
            return f"it has {name}, which {shape.medusa_num_heads} heads of {shape.medusa_num_layers} blocks have not"
        if (reason := _reason_against_one(name, needed[name], found)) is not None:
            return reason
    return ""


def _needed(shape: HeadsShape, found: Forms, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return the required shapes of a file's tensors, by name."""
    needed: dict[str, tuple[int, ...]] = {}
    outputs = [output_name(shape, head) for head in range(shape.medusa_num_heads)]
    known = next((found[name][1] for name in outputs if name in found), None)  # None: the target's matrix is shared
    if TOKEN_IDS in found:
        needed[TOKEN_IDS] = (known or found[TOKEN_IDS][1])[:1]
    for head, output in enumerate(outputs):
        for layer in range(shape.medusa_num_layers):
            weight, bias = block_names(head, layer)
            needed |= {weight: (hidden, hidden), bias: (hidden,)}
        if known:
            needed[output] = (known[0], hidden)
    return needed


def _reason_against_one(name: str, needed: tuple[int, ...], found: Forms) -> str | None:
    kind, size = found[name]
    if size != needed:
        return f"{name} has the shape {size}, and should have {needed}"
    if name == TOKEN_IDS:
        return None if kind == "int32" else f"{name} is {kind}, and should be int32"
    if kind == "int8" and len(needed) == 2:
        scale = found.get(name + SCALE)
        return None if scale == ("float32", needed[:1]) else f"{name + SCALE} is {scale or 'missing'}"
    return None if kind in ("float32", "float16", "bfloat16") else f"{name} is {kind}, and should be a float or int8"


def need_torch(heads: Path) -> bool:
    """Return whether heads need torch on a CPU: EAGLE-3 heads, and a pickle of Medusa heads."""
    return not (heads / WEIGHTS[0]).is_file()
