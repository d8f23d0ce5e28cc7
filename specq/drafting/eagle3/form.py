"""The form of EAGLE-3 heads: the content of their config.json, and their tensors.

A head is a directory with config.json and model.safetensors or pytorch_model.bin. SpecForge writes this form, and vLLM
and SGLang read it (Li et al. 2025, arXiv 2503.01840). Its one decoder layer reads a token and a state of the text
before it.

The library `speculators` writes the same tensors, with `layers.0` instead of `midlayer`, and another config.json
(`specq.drafting.speculators_form`).

- `fc.weight` [hidden, 3 * target's hidden]: maps hidden states of three target layers to one state.
- `midlayer.*`: a Llama layer whose queries, keys and values are made from [embedding; state], so they have twice the
  columns. Each half has a norm, `input_layernorm` and `hidden_norm`.
- `norm.weight`, `lm_head.weight` [draft tokens, hidden]: map the layer's output to logits. Without the norm the output
  is the next state.
- `d2t` and `t2d`: the tables of `speculators_form`. Both may be missing if the head covers all tokens.
- `embed_tokens.weight` [vocab, hidden]: the target's, if missing.

`eagle_config.eagle_aux_hidden_state_layer_ids` counts layers from 0. The same key at the top level counts from 1, as in
vLLM, which prefers it. Without either key the layers are 1, n // 2 - 1 and n - 4 of n. `specq.drafting.head_config` has
what other heads have, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specq.checkpoints import read_json
from specq.drafting import speculators_form
from specq.drafting.head_config import Forms, HeadConfig, HeadShape, check_layers, fault
from specq.protocol import ConfigError

KIND = "an EAGLE-3 head"
ARCHITECTURE = "LlamaForCausalLMEagle3"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # the first that exists is read
EMBEDDING, OUTPUT = speculators_form.EMBEDDING, speculators_form.OUTPUT
TO_TARGET, FROM_TARGET = speculators_form.TO_TARGET, speculators_form.FROM_TARGET
NUM_TAPS = 3
_LAYER, _THEIR_LAYER = "midlayer.", "layers.0."
LEAST_LAYERS = 7  # minimum layers of a target for which the default tapped layers are three different ones


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleShape(HeadShape):
    """The content of config.json."""

    draft_vocab_size: int
    norm_before_residual: bool = False

    def config(self) -> dict[str, Any]:
        """Return the content of config.json."""
        return {
            "architectures": [ARCHITECTURE],
            "num_hidden_layers": 1,
            "norm_before_residual": self.norm_before_residual,
            "draft_vocab_size": self.draft_vocab_size,
            **self.common_config(),
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
    return any(key in said for key in ("draft_vocab_size", speculators_form.SPECULATORS)) or "Eagle3" in str(
        said.get("architectures")
    )


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
    if speculators_form.SPECULATORS in said:
        said = _flat(heads, said)
    config = HeadConfig(heads, said, KIND)
    _check_kind(config)
    return EagleShape(
        **config.common(),
        draft_vocab_size=config.count("draft_vocab_size", said.get("vocab_size")),
        norm_before_residual=said.get("norm_before_residual") is True,
        layers=_layers(config),
    )


def tapped_layers(shape: EagleShape, num_layers: int) -> tuple[int, ...]:
    """Return the target's layers whose hidden states a head reads, ascending; ConfigError if one is missing."""
    layers = shape.layers or default_layers(num_layers)
    check_layers(layers, num_layers, KIND)
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
    own = ("norm_before_residual", "eagle_aux_hidden_state_layer_ids")
    found = speculators_form.flat(heads, said, speculators_form.EAGLE3, f"{KIND[3:]}s", own)
    for key in ("norm_before_fc", "fc_norm", "norm_output"):
        if said.get(key):
            raise ConfigError(f"{heads / 'config.json'}: {key} is {said[key]!r}; EAGLE-3 heads are computed without")
    return {"norm_before_residual": True, **found}


def _check_kind(config: HeadConfig) -> None:
    """Raise ConfigError unless the head is a single layer of a kind that we compute."""
    said = config.said
    config.check("num_hidden_layers", said.get("num_hidden_layers", 1), 1)
    config.check("hidden_act", said.get("hidden_act", "silu"), "silu")
    config.check("attention_bias", said.get("attention_bias") or False, False)
    config.check("layer_types", said.get("layer_types") or ["full_attention"], ["full_attention"])


def _layers(config: HeadConfig) -> tuple[int, ...]:
    key, nested = "eagle_aux_hidden_state_layer_ids", config.said.get("eagle_config")
    own = nested.get(key) if isinstance(nested, dict) else None
    ids = own if own is not None else config.said.get(key)
    return () if ids is None else config.layers(key, ids, count=NUM_TAPS, first=0 if own is not None else 1)


def matrix_shapes(shape: EagleShape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that every head has, by name."""
    hidden = shape.hidden_size
    return {
        "fc.weight": (hidden, NUM_TAPS * shape.target_hidden_size),
        f"{_LAYER}hidden_norm.weight": (hidden,),
        **shape.layer_shapes(_LAYER, num_inputs=2),
        "norm.weight": (hidden,),
        OUTPUT: (shape.draft_vocab_size, hidden),
    }


def reason_against(shape: EagleShape, found: Forms) -> str:
    """Return the fault of a file's tensors, given the number format and shape of each, or ""."""
    needed, tables = matrix_shapes(shape), speculators_form.table_shapes(shape.draft_vocab_size, shape.vocab_size)
    if shape.has_tables:
        needed[TO_TARGET] = tables[TO_TARGET]
    may_be = tables | {EMBEDDING: (shape.vocab_size, shape.hidden_size)}
    known = {own_name(name): form for name, form in found.items()}
    return fault(needed, may_be, speculators_form.TYPES, known, f"{KIND[3:]}s")
