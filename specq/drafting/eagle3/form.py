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

A P-EAGLE head of `speculators` (method `peagle`) has the same tensors and may have more layers, `layers.1` and so on,
which are plain ones. It predicts several tokens in one pass, as many as `speculators_config` proposes. A row for each
token after the first reads `mask_token_id` and the state that `fc` makes of `mask_hidden`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specq.checkpoints import read_json
from specq.drafting import speculators_form
from specq.drafting.head_config import Forms, HeadConfig, HeadShape, check_layers, fault
from specq.protocol import ConfigError, shown

KIND, PARALLEL_KIND, MTP_KIND = "an EAGLE-3 head", "a P-EAGLE head", "an MTP layer"
ARCHITECTURE = "LlamaForCausalLMEagle3"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # the first that exists is read
EMBEDDING, OUTPUT = speculators_form.EMBEDDING, speculators_form.OUTPUT
TO_TARGET, FROM_TARGET = speculators_form.TO_TARGET, speculators_form.FROM_TARGET
NUM_TAPS = 3
MASK_STATES = "mask_hidden"
_ALIKE = ("norm_before_residual", "eagle_aux_hidden_state_layer_ids")  # keys of `speculators`
_NORMS = ("norm_before_fc", "fc_norm", "norm_output")  # that we do not compute
LAYER, _THEIR_LAYER = "midlayer.", "layers.0."
LEAST_LAYERS = 7  # minimum layers of a target for which the default tapped layers are three different ones


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleShape(HeadShape):
    """The content of config.json.

    Of P-EAGLE heads only:

    num_layers     its own layers.
    num_places     how many tokens a pass predicts.
    mask_token_id  the token of masked rows.

    Of MTP layers only (`specq.drafting.eagle3.mtp_form`):

    is_mtp       whether `fc` joins embedding and state for a plain layer, whose normed output is the next state.
    masks_first  whether the embedding of a text's second token counts as zeros.
    has_biases   whether queries, keys and values have biases.
    """

    draft_vocab_size: int
    norm_before_residual: bool = False
    num_layers: int = 1
    num_places: int = 1
    mask_token_id: int | None = None
    is_mtp: bool = False
    masks_first: bool = False
    has_biases: bool = False

    @property
    def kind(self) -> str:
        """What messages call such a head."""
        return MTP_KIND if self.is_mtp else KIND if self.mask_token_id is None else PARALLEL_KIND

    @property
    def width(self) -> int:
        """How many values of the target's hidden states a row reads."""
        return self.target_hidden_size if self.is_mtp else NUM_TAPS * self.target_hidden_size

    def config(self) -> dict[str, Any]:
        """Return the content of config.json."""
        return {
            "architectures": [ARCHITECTURE],
            "num_hidden_layers": self.num_layers,
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


def is_parallel(heads: Path) -> bool:
    """Return whether a directory's config.json describes a P-EAGLE head."""
    return read_json(heads, "config.json").get(speculators_form.SPECULATORS) == speculators_form.PEAGLE


def own_name(name: str) -> str:
    """Return our name of a tensor that a file may have under that of `speculators`."""
    return LAYER + name.removeprefix(_THEIR_LAYER) if name.startswith(_THEIR_LAYER) else name


def eagle_shape(heads: Path) -> EagleShape:
    """Return the content of a directory's config.json.

    Raises ConfigError if it does not describe an EAGLE-3 head, or describes an unsupported one.
    """
    said = read_json(heads, "config.json")
    if not is_eagle(heads):
        raise ConfigError(f"{heads} does not contain an EAGLE-3 head: its config.json has no draft_vocab_size")
    own: dict[str, Any] = {}
    if is_parallel(heads):
        said, config, own = _parallel(heads, said)
    else:
        said = _flat(heads, said) if speculators_form.SPECULATORS in said else said
        config = HeadConfig(heads, said, KIND)
        config.check("num_hidden_layers", said.get("num_hidden_layers", 1), 1)
    _check_kind(config)
    return EagleShape(
        **config.common(),
        draft_vocab_size=config.count("draft_vocab_size", said.get("vocab_size")),
        norm_before_residual=said.get("norm_before_residual") is True,
        layers=_layers(config),
        **own,
    )


def tapped_layers(shape: EagleShape, num_layers: int) -> tuple[int, ...]:
    """Return the target's layers whose hidden states a head reads, ascending; ConfigError if one is missing."""
    layers = shape.layers or default_layers(num_layers)
    check_layers(layers, num_layers, shape.kind)
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
    found = speculators_form.flat(heads, said, speculators_form.EAGLE3, f"{KIND[3:]}s", _ALIKE)
    _check_norms(heads, said, KIND)
    return {"norm_before_residual": True, **found}


def _parallel(heads: Path, said: dict[str, Any]) -> tuple[dict[str, Any], HeadConfig, dict[str, Any]]:
    """Return the config.json of a P-EAGLE head as SpecForge has it, a reader of it, and the values of its own."""
    kinds, own = f"{PARALLEL_KIND[2:]}s", (*_ALIKE, "mask_token_id", "embed_requires_grad")
    speculators_form.check_keys(heads, said, speculators_form.PEAGLE, (*own, *_NORMS))
    found = speculators_form.flat(heads, said, speculators_form.PEAGLE, kinds, own)
    _check_norms(heads, said, PARALLEL_KIND)
    config = HeadConfig(heads, found, PARALLEL_KIND)
    values = {
        "num_layers": config.num_layers(),
        "num_places": speculators_form.num_proposed(heads, said, kinds),
        "mask_token_id": config.mask_token_id(found),
    }
    return found, config, values


def _check_norms(heads: Path, said: dict[str, Any], kind: str) -> None:
    for key in _NORMS:
        if said.get(key):
            raise ConfigError(
                f"{heads / 'config.json'}: {key} is {shown(said[key])}; {kind.partition(' ')[2]}s are computed without"
            )


def _check_kind(config: HeadConfig) -> None:
    """Raise ConfigError unless the layers are of a kind that we compute."""
    said = config.said
    config.check("hidden_act", said.get("hidden_act", "silu"), "silu")
    config.check("attention_bias", said.get("attention_bias") or False, False)
    full = ["full_attention"] * (said.get("num_hidden_layers") or 1)
    config.check("layer_types", said.get("layer_types") or full, full)


def _layers(config: HeadConfig) -> tuple[int, ...]:
    key, nested = "eagle_aux_hidden_state_layer_ids", config.said.get("eagle_config")
    own = nested.get(key) if isinstance(nested, dict) else None
    ids = own if own is not None else config.said.get(key)
    return () if ids is None else config.layers(key, ids, count=NUM_TAPS, first=0 if own is not None else 1)


def matrix_shapes(shape: EagleShape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that every head has, by name."""
    hidden = shape.hidden_size
    found: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 2 * hidden if shape.is_mtp else shape.width),
        f"{LAYER}hidden_norm.weight": (hidden,),
        **({f"{LAYER}attention_norm.weight": (hidden,)} if shape.is_mtp else {}),
        **shape.layer_shapes(LAYER, num_inputs=1 if shape.is_mtp else 2),
        "norm.weight": (hidden,),
        OUTPUT: (shape.draft_vocab_size, hidden),
    }
    for layer in range(1, shape.num_layers):
        found |= shape.layer_shapes(f"layers.{layer}.")
    if shape.has_biases:
        rows = {name: found[f"{LAYER}self_attn.{name}_proj.weight"][:1] for name in "qkv"}
        found |= {f"{LAYER}self_attn.{name}_proj.bias": size for name, size in rows.items()}
    return found if shape.mask_token_id is None else found | {MASK_STATES: (1, 1, shape.width)}


def reason_against(shape: EagleShape, found: Forms) -> str:
    """Return the fault of a file's tensors, given the number format and shape of each, or ""."""
    needed, tables = matrix_shapes(shape), speculators_form.table_shapes(shape.draft_vocab_size, shape.vocab_size)
    if shape.has_tables:
        needed[TO_TARGET] = tables[TO_TARGET]
    may_be = tables | {EMBEDDING: (shape.vocab_size, shape.hidden_size)}
    known = {own_name(name): form for name, form in found.items()}
    return fault(needed, may_be, speculators_form.TYPES, known, f"{shape.kind.partition(' ')[2]}s")
