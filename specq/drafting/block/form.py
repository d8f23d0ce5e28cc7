"""The form of block drafters: the content of their config.json, and their tensors.

A block drafter is a directory with config.json and model.safetensors. DFlash's authors write this form (arXiv
2602.06036):

- `fc.weight` [hidden, n * hidden]: maps the hidden states of n target layers to a feature, which has a norm,
  `hidden_norm.weight`.
- `layers.*`: layers of a Qwen3. A layer makes keys and values of the features, too, with the matrices of its rows.
- `norm.weight`: the norm before the target's output matrix.

`dflash_config` has `target_layer_ids`, counted from 0, and `mask_token_id`, the token whose embedding is the mask's.
`block_size` counts the anchor and the masks. Embedding and output matrix are the target's.

The drafters that `specq train block` writes differ in three ways, each optional:

- `dflash_config.norms_states`: the hidden states of each layer are normed before `fc`, without weights.
- `mask_embedding` [hidden]: the mask's own embedding, instead of `mask_token_id`.
- Only the tokens in `lm_head.token_ids` (int32, ascending) are drafted.

The library `speculators` writes the same tensors, and another config.json (`specq.drafting.speculators_form`). It
counts layers from 1. If only some tokens are drafted, the file has their output matrix, `lm_head.weight`, and the
tables. A layer with a sliding window reads the last features before the anchor. There a row of the block reads only
rows before it, without `sliding_window_non_causal`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specq.checkpoints import read_json
from specq.checkpoints.draft_form import TOKEN_IDS
from specq.drafting import speculators_form
from specq.drafting.head_config import Forms, HeadConfig, HeadShape, Shapes, fault
from specq.drafting.speculators_form import DFLASH, OUTPUT, SPECULATORS, TO_TARGET
from specq.protocol import ConfigError, shown

KIND = "a block drafter"
ARCHITECTURE = "DFlashDraftModel"
OWN = "dflash_config"  # the key that its form has
WEIGHTS = ("model.safetensors",)
MASK = "mask_embedding"
MOST_BLOCK = 64
_FULL, _SLIDING = "full_attention", "sliding_attention"
# The keys of config.json that only this method of `speculators` has.
_READ = ("block_size", "mask_token_id", "aux_hidden_state_layer_ids", "sliding_window_non_causal", "sample_from_anchor")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape(HeadShape):
    """The content of config.json.

    num_layers     its own layers.
    block_size     the anchor and the masks.
    mask_token_id  the token whose embedding is the mask's. None: the file has the mask's own.
    norms_states   whether hidden states are normed before they are fused.

    Of the form of `speculators` only:

    draft_vocab_size  how many tokens are drafted. 0: another form.
    windows           how many features each layer reads, at most. 0: all. (): each layer reads all.
    is_causal         whether a row reads only rows of the block before it, in layers with such a maximum.
    """

    num_layers: int
    block_size: int
    mask_token_id: int | None = None
    norms_states: bool = False
    has_head_norms: bool = True
    draft_vocab_size: int = 0
    windows: tuple[int, ...] = ()
    is_causal: bool = False

    @property
    def num_places(self) -> int:
        """How many tokens a pass predicts."""
        return self.block_size - 1

    @property
    def has_output(self) -> bool:
        """Whether the file has the output matrix of its tokens."""
        return self.draft_vocab_size not in (0, self.vocab_size)

    def config(self) -> dict[str, Any]:
        """Return the content of config.json."""
        mask = {} if self.mask_token_id is None else {"mask_token_id": self.mask_token_id}
        return {
            "architectures": [ARCHITECTURE],
            "num_hidden_layers": self.num_layers,
            "block_size": self.block_size,
            **self.common_config(),
            OWN: {"target_layer_ids": list(self.layers), "norms_states": self.norms_states, **mask},
        }


def is_block(heads: Path) -> bool:
    """Return whether a directory's config.json describes a block drafter, of this form or of a similar one."""
    said = read_json(heads, "config.json")
    return OWN in said or said.get(SPECULATORS) == DFLASH or "DFlash" in str(said.get("architectures"))


def block_shape(heads: Path) -> BlockShape:
    """Return the content of a directory's config.json.

    Raises ConfigError if it does not describe a block drafter, or describes an unsupported one.
    """
    said = read_json(heads, "config.json")
    if SPECULATORS in said:
        return _of_speculators(heads, said)
    config, own = HeadConfig(heads, said, KIND), said.get(OWN)
    if not isinstance(own, dict):
        raise ConfigError(f"{heads} does not contain a block drafter: its config.json has no object {OWN}")
    _check_kind(config, own)
    return BlockShape(
        **config.common(),
        num_layers=config.num_layers(),
        block_size=_block_size(config, own),
        mask_token_id=None if own.get("mask_token_id") is None else config.mask_token_id(own),
        norms_states=own.get("norms_states") is True,
        layers=config.layers("target_layer_ids", own.get("target_layer_ids")),
    )


def _of_speculators(heads: Path, said: dict[str, Any]) -> BlockShape:
    """Return the content of a config.json of `speculators`."""
    flat = speculators_form.flat(heads, said, DFLASH, f"{KIND[2:]}s", _READ)
    config = HeadConfig(heads, flat | {"model_type": "qwen3"}, KIND)  # its layers are Qwen3's, whatever their kind
    speculators_form.check_keys(heads, said, DFLASH, _READ)
    _check_layers(config)
    config.check("sample_from_anchor", flat.get("sample_from_anchor", False), False)
    return BlockShape(
        **config.common(),
        num_layers=config.num_layers(),
        block_size=_block_size(config, flat),
        mask_token_id=config.mask_token_id(flat),
        layers=config.layers("aux_hidden_state_layer_ids", flat.get("aux_hidden_state_layer_ids"), first=1),
        draft_vocab_size=config.count("draft_vocab_size"),
        windows=_windows(config),
        is_causal=flat.get("sliding_window_non_causal") is not True,
    )


def _windows(config: HeadConfig) -> tuple[int, ...]:
    """Return how many features each layer reads, at most; 0: all."""
    num_layers, is_sliding = config.num_layers(), config.said.get("use_sliding_window", True)
    types = config.layer_types(_FULL, _SLIDING) or [_FULL] * num_layers
    config.check("the number of layer_types", len(types), num_layers)
    if _SLIDING not in types:
        return ()
    config.check("use_sliding_window", is_sliding, True)
    return tuple(config.count("sliding_window") if kind == _SLIDING else 0 for kind in types)


def _check_kind(config: HeadConfig, own: dict[str, Any]) -> None:
    """Raise ConfigError unless the layers are of a kind that we compute."""
    config.check("model_type", config.said.get("model_type"), "qwen3")
    _check_layers(config)
    config.layer_types(_FULL)
    for key in ("fc_layernorm", "causal"):
        config.check(f"{OWN}.{key}", own.get(key) or False, False)


def _check_layers(config: HeadConfig) -> None:
    config.check("hidden_act", config.said.get("hidden_act", "silu"), "silu")
    config.check("attention_bias", config.said.get("attention_bias") or False, False)


def _block_size(config: HeadConfig, own: dict[str, Any]) -> int:
    """Return the number of tokens of a block, which some directories name in `dflash_config`."""
    value = config.said.get("block_size", own.get("block_size"))
    if type(value) is int and 2 <= value <= MOST_BLOCK:
        return value
    raise ConfigError(
        f"{config.path}: block_size is {shown(value)}, but must be a whole number from 2 to {MOST_BLOCK}: the anchor "
        "and the masks of a block"
    )


def matrix_shapes(shape: BlockShape) -> Shapes:
    """Return the shapes of the tensors that every block drafter has, by name."""
    hidden = shape.hidden_size
    found: Shapes = {
        "fc.weight": (hidden, len(shape.layers) * shape.target_hidden_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(shape.num_layers):
        found |= shape.layer_shapes(f"layers.{layer}.")
    return found


def reason_against(shape: BlockShape, found: Forms) -> str:
    """Return the fault of a file's tensors, given the number format and shape of each, or ""."""
    needed = matrix_shapes(shape)
    if shape.mask_token_id is None:
        needed[MASK] = (shape.hidden_size,)
    may_be = {TOKEN_IDS: found[TOKEN_IDS][1][:1]} if TOKEN_IDS in found else {}
    types: dict[str, tuple[str, ...]] = {TOKEN_IDS: ("int32",)}
    if shape.draft_vocab_size:
        rows, hidden, types = shape.draft_vocab_size, shape.hidden_size, speculators_form.TYPES
        may_be = speculators_form.table_shapes(rows, shape.vocab_size)
        may_be |= {speculators_form.EMBEDDING: (shape.vocab_size, hidden), OUTPUT: (rows, hidden)}
        needed |= {name: may_be[name] for name in (OUTPUT, TO_TARGET) if shape.has_output}
    return fault(needed, may_be, types, found, f"{KIND[2:]}s")
