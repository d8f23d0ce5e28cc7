"""The form of the library `speculators`: what its EAGLE-3 heads and its block drafters have alike.

config.json:

- `speculators_model_type`: the method.
- `transformer_layer_config`: the sizes of the layers, except where they have the default of their kind.
- `speculators_config`: names the target, the `verifier`.

model.safetensors has two tables if only some tokens are drafted:

- `d2t` int64[draft tokens]: add this to a row's index to get its token.
- `t2d` bool[vocab]: which tokens have rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from specq.checkpoints import read_json
from specq.drafting.head_config import Shapes
from specq.protocol import ConfigError, shown

SPECULATORS = "speculators_model_type"  # the key that only this form has
EAGLE3, PEAGLE, DFLASH = METHODS = ("eagle3", "peagle", "dflash")  # the methods that we read
EMBEDDING, OUTPUT, TO_TARGET, FROM_TARGET = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"
TYPES = {TO_TARGET: ("int64", "int32"), FROM_TARGET: ("bool",)}
MOST_PROPOSED = 64
_OTHERS = {
    "dspark": "DSpark",
    "dflash2": "DFlash 2",
    "mtp": "layers of a target's own that predict several tokens",
    "eagle": "EAGLE or HASS",
}
# What a layer's config may leave out: values of transformers' LlamaConfig and Qwen3Config. A layer of Qwen3 has norms
# of each head's queries and keys.
_DEFAULTS = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "rms_norm_eps": 1e-6}
_OWN_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 11_008, "vocab_size": 32_000},
    "qwen3": {"intermediate_size": 22_016, "vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 32}
    | {"use_sliding_window": False},
}
_OURS = ("draft_vocab_size", "target_hidden_size", "num_tokens", "tokenizer_hash")
_IGNORED = (  # keys without effect on the drafts
    *("architectures", "auto_map", "dtype", "torch_dtype", "tie_word_embeddings", "max_anchors"),
    *("transformers_version", "speculators_version", "speculators_config", "transformer_layer_config", SPECULATORS),
)


def target_of(heads: Path) -> str:
    """Return the target that a directory of this form names, or ""."""
    said = read_json(heads, "config.json").get("speculators_config")
    verifier = said.get("verifier") if isinstance(said, dict) else None
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    return name if isinstance(name, str) else ""


def flat(heads: Path, said: Mapping[str, Any], method: str, kinds: str, own: Collection[str]) -> dict[str, Any]:
    """Return a config.json of this form with the sizes of the layers at the top level.

    kinds  what messages call heads of this method.
    own    the keys that only this method has.

    Raises ConfigError if it is of another method, or its layers are of a kind that we do not compute.
    """
    path, found, layer = heads / "config.json", said[SPECULATORS], said.get("transformer_layer_config")
    if found != method:
        about = f" ({_OTHERS[str(found)]})" if str(found) in _OTHERS else ""
        raise ConfigError(
            f"{path}: {SPECULATORS} is {shown(found)}{about}; of the library speculators specq reads "
            f"{', '.join(map(repr, METHODS[:-1]))} and {METHODS[-1]!r}, and {kinds} must be {method!r}"
        )
    if not isinstance(layer, dict):
        raise ConfigError(
            f"{path}: transformer_layer_config is of the type {type(layer).__name__}, but must be an object with the "
            "sizes of the layers"
        )
    kind = layer.get("model_type", "qwen3" if method == DFLASH else "llama")
    if str(kind) not in _OWN_DEFAULTS:
        raise ConfigError(
            f"{path}: model_type is {shown(kind)}; {kinds} are computed with {' or '.join(_OWN_DEFAULTS)}"
        )
    top = {key: said[key] for key in (*_OURS, *own) if said.get(key) is not None}
    return {**_DEFAULTS, **_OWN_DEFAULTS[kind], "model_type": kind, **layer, **top}


def check_keys(heads: Path, said: Mapping[str, Any], method: str, own: Collection[str]) -> None:
    """Raise ConfigError if a config.json of this form has a key that drafters of its method do not have."""
    for key, value in said.items():
        if key not in (*own, *_OURS, *_IGNORED) and value:
            raise ConfigError(
                f"{heads / 'config.json'}: {key} is {shown(value)}; drafters of the method {method!r} have no such "
                f"key, but {', '.join(own)}"
            )


def num_proposed(heads: Path, said: Mapping[str, Any], kinds: str) -> int:
    """Return how many tokens a pass proposes, by the default proposal method; ConfigError if none is named."""
    config = said.get("speculators_config")
    methods = config.get("proposal_methods") if isinstance(config, dict) else None
    named = [one for one in methods if isinstance(one, dict)] if isinstance(methods, list) else []
    default = config.get("default_proposal_method") if isinstance(config, dict) else None
    chosen = [one for one in named if one.get("proposal_type") == default] or named
    value = chosen[0].get("speculative_tokens") if chosen else None
    if type(value) is int and 1 <= value <= MOST_PROPOSED:
        return value
    raise ConfigError(
        f"{heads / 'config.json'}: speculative_tokens of speculators_config.proposal_methods is {shown(value)}; "
        f"{kinds} need a whole number from 1 to {MOST_PROPOSED}"
    )


def table_shapes(draft_vocab_size: int, vocab_size: int) -> Shapes:
    """Return the shapes of the tables, by name."""
    return {TO_TARGET: (draft_vocab_size,), FROM_TARGET: (vocab_size,)}
