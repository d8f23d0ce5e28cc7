"""The config.json of heads whose layers are those of a Llama or Qwen3: their common values, and how to read them.

Layers are counted from 0, and their hidden states are their outputs. Heads that `specq train` writes also have the
`num_tokens` and `tokenizer_hash` of their target (see `specq.text`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from specq.checkpoints.draft_form import HASH_LENGTH
from specq.protocol import ConfigError, shown

Forms = dict[str, tuple[str, tuple[int, ...]]]  # number format and shape, by name
Shapes = dict[str, tuple[int, ...]]

MOST_LAYERS = 1024  # of a head: a larger number is no head, and its tensors are too many to list
FLOATS = ("float32", "float16", "bfloat16")
_SCALING = {  # the numbers of each kind of rotary scaling
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """The common content of config.json. Values of the target are 0, "" or () if missing.

    layers          see `Tap`.
    rope_scaling    its kind and that kind's numbers, as in transformers' `rope_parameters`.
    has_head_norms  whether each head's queries and keys are normed, as in Qwen3.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    target_hidden_size: int
    max_position_embeddings: int = 2048
    layers: tuple[int, ...] = ()
    num_tokens: int = 0
    tokenizer_hash: str = ""
    rope_scaling: tuple[tuple[str, Any], ...] = (("rope_type", "default"),)
    has_head_norms: bool = False

    @property
    def rope(self) -> dict[str, Any]:
        """The kind of rotary positions and its numbers; see `specq.engines.native.rotary`."""
        return dict(self.rope_scaling) | {"rope_theta": self.rope_theta}

    def common_config(self) -> dict[str, Any]:
        """Return the common content of config.json."""
        sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        others = ("vocab_size", "rms_norm_eps", "rope_theta", "target_hidden_size", "max_position_embeddings")
        return {
            "model_type": "qwen3" if self.has_head_norms else "llama",
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            **({"rope_scaling": dict(self.rope_scaling)} if len(self.rope_scaling) > 1 else {}),
            **{name: getattr(self, name) for name in (*sizes, *others)},
            **{name: value for name in ("num_tokens", "tokenizer_hash") if (value := getattr(self, name))},
        }

    def layer_shapes(self, prefix: str, num_inputs: int = 1) -> Shapes:
        """Return the shapes of a layer's tensors by name; `num_inputs`: of its attention, in hidden sizes."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        norms = ("q_norm", "k_norm") if self.has_head_norms else ()
        found = {
            **{f"self_attn.{name}": (self.head_dim,) for name in norms},
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (queries, num_inputs * hidden),
            "self_attn.k_proj": (keys, num_inputs * hidden),
            "self_attn.v_proj": (keys, num_inputs * hidden),
            "self_attn.o_proj": (hidden, queries),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        return {f"{prefix}{name}.weight": shape for name, shape in found.items()}


class HeadConfig:
    """A config.json; `kind`: what messages call such a head, such as "an EAGLE-3 head"."""

    def __init__(self, heads: Path, said: Mapping[str, Any], kind: str) -> None:
        self.path, self.said, self._kind = heads / "config.json", said, kind

    @property
    def kinds(self) -> str:
        """What messages call such heads."""
        return f"{self._kind.partition(' ')[2]}s"

    def common(self) -> dict[str, Any]:
        """Return the values of `HeadShape` without `layers`. Raises ConfigError for a value that it cannot have."""
        said = self.said
        hidden, num_heads = self.count("hidden_size"), self.count("num_attention_heads")
        kv_heads, head_dim = self.count("num_key_value_heads", num_heads), self.count("head_dim", hidden // num_heads)
        if num_heads % kv_heads or head_dim % 2:
            raise ConfigError(
                f"{self.path}: {num_heads} attention heads of size {head_dim} cannot share {kv_heads} key-value heads"
            )
        return {
            "hidden_size": hidden,
            "intermediate_size": self.count("intermediate_size"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "vocab_size": self.count("vocab_size"),
            "rms_norm_eps": self.number("rms_norm_eps", 1e-6),
            "rope_theta": self._rope_theta(),
            "rope_scaling": self._scaling(),
            "has_head_norms": said.get("model_type") == "qwen3",
            "target_hidden_size": self.count("target_hidden_size", hidden),
            "num_tokens": self.count("num_tokens") if "num_tokens" in said else 0,
            "tokenizer_hash": self._hash(),
        }

    def check(self, key: str, value: object, *wanted: object) -> None:
        """Raise ConfigError unless a value is one that we compute."""
        if value not in wanted:
            known = " or ".join(map(repr, wanted))
            raise ConfigError(f"{self.path}: {key} is {shown(value)}; {self.kinds} are computed with {known}")

    def count(self, key: str, default: int | None = None) -> int:
        """Return a whole number of at least 1."""
        value = self.said.get(key)
        value = default if value is None else value
        if type(value) is int and 0 < value < 2**31:
            return value
        raise ConfigError(f"{self.path}: {key} is {shown(value)}; {self._kind} needs a whole number of at least 1")

    def num_layers(self) -> int:
        """Return the number of the head's own layers."""
        number = self.count("num_hidden_layers")
        if number <= MOST_LAYERS:
            return number
        raise ConfigError(
            f"{self.path}: num_hidden_layers is {number}; {self._kind} has at most {MOST_LAYERS} layers of its own"
        )

    def layer_types(self, *wanted: str) -> list[str]:
        """Return the type of each of the head's own layers: [] if they are not named; each must be one of `wanted`."""
        types = self.said.get("layer_types") or []
        self.check("the type of layer_types", type(types).__name__, "list")
        for kind in types:
            self.check("layer_types", kind, *wanted)
        return [*types]

    def number(self, key: str, default: float, said: Mapping[str, Any] | None = None) -> float:
        """Return a number above 0; `said`: the object that has it."""
        value = (self.said if said is None else said).get(key, default)
        if type(value) in (int, float) and 0 < value < 1e12:
            return float(value)
        raise ConfigError(f"{self.path}: {key} is {shown(value)}, but must be a number above 0")

    def mask_token_id(self, said: Mapping[str, Any]) -> int:
        """Return the token whose embedding is that of a mask; `said`: the object that names it."""
        value = said.get("mask_token_id")
        if type(value) is int and value >= 0:
            return value
        raise ConfigError(f"{self.path}: mask_token_id is {shown(value)}, but must be a token id")

    def layers(self, key: str, ids: object, *, count: int | None = None, first: int = 0) -> tuple[int, ...]:
        """Return layers of the target from a list that counts from `first`; `count`: how many there must be."""
        if isinstance(ids, list) and ids and (count or len(ids)) == len(ids) and all(type(one) is int for one in ids):
            found = tuple(one - first for one in ids)
            if found[0] >= 0 and all(low < high for low, high in pairwise(found)):
                return found
        wanted = f"{count or 'one or more'} layers, ascending, counted from {first}"
        raise ConfigError(f"{self.path}: {key} is {shown(ids)}, but must be {wanted}")

    def _rope_theta(self) -> float:
        of_rope = self.said.get("rope_parameters")
        has_own = isinstance(of_rope, dict) and "rope_theta" in of_rope
        return self.number("rope_theta", 10_000.0, of_rope if has_own else None)

    def _scaling(self) -> tuple[tuple[str, Any], ...]:
        """Return the kind of rotary scaling and its numbers, as in transformers' `rope_parameters`."""
        found = self.said.get("rope_parameters") or self.said.get("rope_scaling") or {}
        kind = found.get("rope_type", found.get("type", "default")) if isinstance(found, dict) else found
        if not isinstance(found, dict) or not isinstance(kind, str) or kind not in _SCALING:
            raise ConfigError(
                f"{self.path}: rope_scaling is {shown(kind)}; {self.kinds} are computed with {', '.join(_SCALING)}"
            )
        for key, value in found.items():
            if isinstance(value, dict):
                raise ConfigError(f"{self.path}: rope_parameters has {key}; {self.kinds} rotate alike in all layers")
        self.check("partial_rotary_factor", found.get("partial_rotary_factor", 1), 1)
        numbers = {key: self.number(key, 0.0, found) for key in _SCALING[kind]}
        if kind == "llama3" and numbers["low_freq_factor"] >= numbers["high_freq_factor"]:
            raise ConfigError(f"{self.path}: low_freq_factor must be below high_freq_factor")
        return ("rope_type", kind), *numbers.items()

    def _hash(self) -> str:
        value = self.said.get("tokenizer_hash", "")
        if value == "" or (isinstance(value, str) and len(value) == HASH_LENGTH):
            return str(value)
        raise ConfigError(f"{self.path}: tokenizer_hash is {shown(value)}, but must be of {HASH_LENGTH} hex digits")


def check_layers(layers: tuple[int, ...], num_layers: int, kind: str) -> None:
    """Raise ConfigError if a target of `num_layers` layers does not have all that a head reads."""
    if max(layers) >= num_layers:
        raise ConfigError(
            f"this {kind.partition(' ')[2]} reads the hidden states behind layers {', '.join(map(str, layers))}; the "
            f"target has only layers 0 to {num_layers - 1}"
        )


def fault(needed: Shapes, may_be: Shapes, types: Mapping[str, Collection[str]], found: Forms, kinds: str) -> str:
    """Return what is wrong with a file's tensors, given the number format and shape of each, or "".

    needed, may_be  the shapes of tensors that it must and may have.
    types           number formats of tensors that are not floats.
    """
    missing = [name for name in needed if name not in found]
    if missing:
        return f"{missing[0]} is missing ({len(missing)} tensors are)"
    for name, (kind, size) in sorted(found.items()):
        wanted = needed.get(name, may_be.get(name))
        if wanted is None:
            return f"it has {name}, which {kinds} have not"
        if size != wanted:
            return f"{name} has the shape {size}, and should have {wanted}"
        if kind not in types.get(name, FLOATS):
            return f"{name} is {kind}, and should be {' or '.join(types.get(name, FLOATS))}"
    return ""
