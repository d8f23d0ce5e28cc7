"""The form of EAGLE-3 heads: the content of their config.json, and their tensors.

A head is a directory with config.json and model.safetensors or pytorch_model.bin. SpecForge writes this form, and vLLM
and SGLang read it (Li et al. 2025, arXiv 2503.01840). Its one decoder layer reads a token and a state of the text
before it.

The library `speculators` writes the same tensors, with `layers.0` instead of `midlayer`. The sizes of the layer are in
`transformer_layer_config`, except where they have the default of their kind. `speculators_config` names the target.

- `fc.weight` [hidden, 3 * target's hidden]: maps hidden states of three target layers to one state.
- `midlayer.*`: a Llama layer whose queries, keys and values are made from [embedding; state], so they have twice the
  columns. Each half has a norm, `input_layernorm` and `hidden_norm`.
- `norm.weight`, `lm_head.weight` [draft tokens, hidden]: map the layer's output to logits. Without the norm the output
  is the next state.
- `d2t` int64[draft tokens]: add this to a row's index to get its token.
- `t2d` bool[vocab]: which tokens have rows. Both may be missing if the head covers all tokens.
- `embed_tokens.weight` [vocab, hidden]: the target's, if missing.

Layers are counted from 0, and their hidden states are their outputs. `eagle_config.eagle_aux_hidden_state_layer_ids`
counts this way. The same key at the top level counts from 1, as in vLLM, which prefers it. Without either key the
layers are 1, n // 2 - 1 and n - 4 of n. Heads that `specq train eagle3` writes also have the `num_tokens` and
`tokenizer_hash` of their target (see `specq.text`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specq.checkpoints import read_json
from specq.checkpoints.draft_form import HASH_LENGTH
from specq.protocol import ConfigError

ARCHITECTURE = "LlamaForCausalLMEagle3"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # the first that exists is read
EMBEDDING, TO_TARGET, FROM_TARGET = "embed_tokens.weight", "d2t", "t2d"
OUTPUT = "lm_head.weight"
NUM_TAPS = 3
SPECULATORS = "speculators_model_type"  # the key that its form has, with the method
_LAYER, _THEIR_LAYER = "midlayer.", "layers.0."
# Sizes that a layer's config.json may leave out: those of transformers' LlamaConfig and Qwen3Config. A layer of Qwen3
# has norms of each head's queries and keys.
_DEFAULTS = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "rms_norm_eps": 1e-6}
_OWN_DEFAULTS = {
    "llama": {"intermediate_size": 11_008, "vocab_size": 32_000},
    "qwen3": {"intermediate_size": 22_016, "vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 32},
}
_OF_SPECULATORS = (
    "draft_vocab_size",
    "target_hidden_size",
    "norm_before_residual",
    "eagle_aux_hidden_state_layer_ids",
    "num_tokens",
    "tokenizer_hash",
)
_SCALING = {  # the numbers of each kind of rotary scaling
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
LEAST_LAYERS = 7  # minimum layers of a target for which the default tapped layers are three different ones

Forms = dict[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class EagleShape:
    """The content of config.json. Values of the target are 0, "" or () if missing.

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
    draft_vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    target_hidden_size: int
    max_position_embeddings: int = 2048
    norm_before_residual: bool = False
    layers: tuple[int, ...] = ()
    num_tokens: int = 0
    tokenizer_hash: str = ""
    rope_scaling: tuple[tuple[str, Any], ...] = (("rope_type", "default"),)
    has_head_norms: bool = False

    @property
    def rope(self) -> dict[str, Any]:
        """The kind of rotary positions and its numbers; see `specq.engines.native.rotary`."""
        return dict(self.rope_scaling) | {"rope_theta": self.rope_theta}

    def config(self) -> dict[str, Any]:
        """Return the content of config.json."""
        sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        others = ("vocab_size", "draft_vocab_size", "rms_norm_eps", "rope_theta", "target_hidden_size")
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "qwen3" if self.has_head_norms else "llama",
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "norm_before_residual": self.norm_before_residual,
            **({"rope_scaling": dict(self.rope_scaling)} if len(self.rope_scaling) > 1 else {}),
            **{name: getattr(self, name) for name in (*sizes, *others, "max_position_embeddings")},
            **{name: value for name in ("num_tokens", "tokenizer_hash") if (value := getattr(self, name))},
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(self.layers), "use_aux_hidden_state": True},
            **({"eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in self.layers]} if self.layers else {}),
        }

    @property
    def has_tables(self) -> bool:
        """Whether the head must have a table of its tokens."""
        return self.draft_vocab_size != self.vocab_size


def is_eagle(heads: Path) -> bool:
    """Return whether a directory's config.json describes an EAGLE-3 head."""
    said = read_json(heads, "config.json")
    return any(key in said for key in ("draft_vocab_size", SPECULATORS)) or "Eagle3" in str(said.get("architectures"))


def target_of(heads: Path) -> str:
    """Return the target that a directory of `speculators` names, or ""."""
    said = read_json(heads, "config.json").get("speculators_config")
    verifier = said.get("verifier") if isinstance(said, dict) else None
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    return name if isinstance(name, str) else ""


def own_name(name: str) -> str:
    """Return our name of a tensor that a file may have under that of `speculators`."""
    return _LAYER + name.removeprefix(_THEIR_LAYER) if name.startswith(_THEIR_LAYER) else name


def eagle_shape(heads: Path) -> EagleShape:
    """Return the content of a directory's config.json.

    Raises ConfigError if it does not describe an EAGLE-3 head, or describes an unsupported one.
    """
    said = read_json(heads, "config.json")
    if not is_eagle(heads):
        raise ConfigError(f"{heads} does not contain an EAGLE-3 head: its config.json has no draft_vocab_size")
    if SPECULATORS in said:
        said = _flat(heads, said)
    _check_kind(heads, said)
    hidden, num_heads = _count(heads, said, "hidden_size"), _count(heads, said, "num_attention_heads")
    optional = {"head_dim": hidden // num_heads, "num_key_value_heads": num_heads, "target_hidden_size": hidden}
    said = {**said, **{key: value for key, value in optional.items() if said.get(key) is None}}
    said.setdefault("draft_vocab_size", said.get("vocab_size"))
    shape = EagleShape(
        hidden_size=hidden,
        intermediate_size=_count(heads, said, "intermediate_size"),
        num_attention_heads=num_heads,
        num_key_value_heads=_count(heads, said, "num_key_value_heads"),
        head_dim=_count(heads, said, "head_dim"),
        vocab_size=_count(heads, said, "vocab_size"),
        draft_vocab_size=_count(heads, said, "draft_vocab_size"),
        rms_norm_eps=_number(heads, said, "rms_norm_eps", 1e-6),
        rope_theta=_number(heads, {**said, **_rope(said)}, "rope_theta", 10_000.0),
        rope_scaling=_scaling(heads, said),
        has_head_norms=said.get("model_type") == "qwen3",
        target_hidden_size=_count(heads, said, "target_hidden_size"),
        norm_before_residual=said.get("norm_before_residual") is True,
        layers=_layers(heads, said),
        num_tokens=_count(heads, said, "num_tokens") if "num_tokens" in said else 0,
        tokenizer_hash=_hash(heads, said),
    )
    if shape.num_attention_heads % shape.num_key_value_heads or shape.head_dim % 2:
        raise ConfigError(
            f"{heads / 'config.json'}: {shape.num_attention_heads} attention heads of size {shape.head_dim} cannot "
            f"share {shape.num_key_value_heads} key-value heads"
        )
    return shape


def tapped_layers(shape: EagleShape, num_layers: int) -> tuple[int, ...]:
    """Return the target's layers whose hidden states a head reads, ascending; ConfigError if one is missing."""
    layers = shape.layers or default_layers(num_layers)
    if max(layers) >= num_layers:
        raise ConfigError(
            f"this EAGLE-3 head reads the hidden states behind layers {', '.join(map(str, layers))}; the target has "
            f"only layers 0 to {num_layers - 1}"
        )
    return layers


def default_layers(num_layers: int) -> tuple[int, ...]:
    """Return the default tapped layers, a low, a middle and a high one; ConfigError for too few layers."""
    if num_layers < LEAST_LAYERS:
        raise ConfigError(
            f"the target has {num_layers} layers; an EAGLE-3 head whose config.json names no layers needs at "
            f"least {LEAST_LAYERS}"
        )
    return 1, num_layers // 2 - 1, num_layers - 4


def _flat(heads: Path, said: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of `speculators` as SpecForge has it. Raises ConfigError for what is not supported."""
    layer = said.get("transformer_layer_config")
    if said[SPECULATORS] != "eagle3" or not isinstance(layer, dict):
        raise ConfigError(
            f"{heads / 'config.json'}: {SPECULATORS} is {said[SPECULATORS]!r} and transformer_layer_config is of the "
            f"type {type(layer).__name__}; of the library speculators specq reads 'eagle3', with an object"
        )
    for key in ("norm_before_fc", "fc_norm", "norm_output"):
        if said.get(key):
            raise ConfigError(f"{heads / 'config.json'}: {key} is {said[key]!r}; EAGLE-3 heads are computed without")
    kind = layer.get("model_type", "llama")
    if kind not in _OWN_DEFAULTS:
        raise ConfigError(
            f"{heads / 'config.json'}: model_type is {kind!r}; EAGLE-3 heads are computed with "
            f"{' or '.join(_OWN_DEFAULTS)}"
        )
    own = {key: value for key, value in said.items() if key in _OF_SPECULATORS and value is not None}
    return {**_DEFAULTS, **_OWN_DEFAULTS[kind], "norm_before_residual": True, **layer, **own}


def _check_kind(heads: Path, said: dict[str, Any]) -> None:
    """Raise ConfigError unless the head is a single layer of a kind that we compute."""
    known = (
        ("num_hidden_layers", said.get("num_hidden_layers", 1), 1),
        ("hidden_act", said.get("hidden_act", "silu"), "silu"),
        ("attention_bias", said.get("attention_bias") or False, False),
        ("layer_types", said.get("layer_types") or ["full_attention"], ["full_attention"]),
    )
    for key, value, wanted in known:
        if value != wanted:
            raise ConfigError(
                f"{heads / 'config.json'}: {key} is {value!r}; EAGLE-3 heads are computed with {wanted!r}"
            )


def _scaling(heads: Path, said: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return the kind of rotary scaling and its numbers, as in transformers' `rope_parameters`."""
    found = said.get("rope_parameters") or said.get("rope_scaling") or {}
    kind = found.get("rope_type", found.get("type", "default")) if isinstance(found, dict) else found
    if not isinstance(found, dict) or kind not in _SCALING:
        raise ConfigError(
            f"{heads / 'config.json'}: rope_scaling is {kind!r}; EAGLE-3 heads are computed with {', '.join(_SCALING)}"
        )
    numbers = {key: _number(heads, found, key, 0.0) for key in _SCALING[kind]}
    if kind == "llama3" and numbers["low_freq_factor"] >= numbers["high_freq_factor"]:
        raise ConfigError(f"{heads / 'config.json'}: low_freq_factor must be below high_freq_factor")
    return ("rope_type", kind), *numbers.items()


def _rope(said: dict[str, Any]) -> dict[str, Any]:
    found = said.get("rope_parameters")
    return {"rope_theta": found["rope_theta"]} if isinstance(found, dict) and "rope_theta" in found else {}


def _count(heads: Path, said: dict[str, Any], key: str) -> int:
    value = said.get(key)
    if type(value) is int and 0 < value < 2**31:
        return value
    raise ConfigError(
        f"{heads / 'config.json'}: {key} is {value!r}; an EAGLE-3 head needs a whole number of at least 1"
    )


def _number(heads: Path, said: dict[str, Any], key: str, default: float) -> float:
    value = said.get(key, default)
    if type(value) in (int, float) and 0 < value < 1e12:
        return float(value)
    raise ConfigError(f"{heads / 'config.json'}: {key} is {value!r}, but must be a number above 0")


def _layers(heads: Path, said: dict[str, Any]) -> tuple[int, ...]:
    key, nested = "eagle_aux_hidden_state_layer_ids", said.get("eagle_config")
    own = nested.get(key) if isinstance(nested, dict) else None
    ids = own if own is not None else said.get(key)
    if ids is None:
        return ()
    if isinstance(ids, list) and len(ids) == NUM_TAPS and all(type(one) is int for one in ids):
        layers = tuple(ids) if own is not None else tuple(one - 1 for one in ids)
        if layers[0] >= 0 and layers[0] < layers[1] < layers[2]:
            return layers
    raise ConfigError(f"{heads / 'config.json'}: {key} is {ids!r}, but must be {NUM_TAPS} layers, ascending")


def _hash(heads: Path, said: dict[str, Any]) -> str:
    value = said.get("tokenizer_hash", "")
    if value == "" or (isinstance(value, str) and len(value) == HASH_LENGTH):
        return str(value)
    raise ConfigError(f"{heads / 'config.json'}: tokenizer_hash is {value!r}, but must be of {HASH_LENGTH} hex digits")


def matrix_shapes(shape: EagleShape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that every head has, by name."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    norms = ("q_norm", "k_norm") if shape.has_head_norms else ()
    return {
        **{f"midlayer.self_attn.{name}.weight": (shape.head_dim,) for name in norms},
        "fc.weight": (hidden, NUM_TAPS * shape.target_hidden_size),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, queries),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        OUTPUT: (shape.draft_vocab_size, hidden),
    }


def reason_against(shape: EagleShape, found: Forms) -> str:
    """Return the fault of a file's tensors, given the number format and shape of each, or ""."""
    found = {own_name(name): form for name, form in found.items()}
    needed = matrix_shapes(shape)
    if shape.has_tables:
        needed |= {TO_TARGET: (shape.draft_vocab_size,)}
    may_be = {
        EMBEDDING: (shape.vocab_size, shape.hidden_size),
        TO_TARGET: (shape.draft_vocab_size,),
        FROM_TARGET: (shape.vocab_size,),
    }
    missing = [name for name in needed if name not in found]
    if missing:
        return f"{missing[0]} is missing ({len(missing)} tensors are)"
    for name, (kind, size) in sorted(found.items()):
        wanted = needed.get(name, may_be.get(name))
        if wanted is None:
            return f"it has {name}, which EAGLE-3 heads have not"
        if size != wanted:
            return f"{name} has the shape {size}, and should have {wanted}"
        kinds = {TO_TARGET: ("int64", "int32"), FROM_TARGET: ("bool",)}.get(name, ("float32", "float16", "bfloat16"))
        if kind not in kinds:
            return f"{name} is {kind}, and should be {' or '.join(kinds)}"
    return ""
