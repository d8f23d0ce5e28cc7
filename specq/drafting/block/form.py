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
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specq.checkpoints import read_json
from specq.checkpoints.draft_form import TOKEN_IDS
from specq.drafting.head_config import Forms, HeadConfig, HeadShape, Shapes, fault
from specq.protocol import ConfigError

KIND = "a block drafter"
ARCHITECTURE = "DFlashDraftModel"
OWN = "dflash_config"  # the key that its form has
WEIGHTS = ("model.safetensors",)
MASK = "mask_embedding"
MOST_BLOCK = 64
SPECULATORS = "speculators_model_type"
_FULL = "full_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape(HeadShape):
    """The content of config.json.

    num_layers     its own layers.
    block_size     the anchor and the masks.
    mask_token_id  the token whose embedding is the mask's. None: the file has the mask's own.
    norms_states   whether hidden states are normed before they are fused.
    """

    num_layers: int
    block_size: int
    mask_token_id: int | None = None
    norms_states: bool = False
    has_head_norms: bool = True

    @property
    def num_places(self) -> int:
        """How many tokens a pass predicts."""
        return self.block_size - 1

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
    return OWN in said or said.get(SPECULATORS) == "dflash" or "DFlash" in str(said.get("architectures"))


def block_shape(heads: Path) -> BlockShape:
    """Return the content of a directory's config.json.

    Raises ConfigError if it does not describe a block drafter, or describes an unsupported one.
    """
    said = read_json(heads, "config.json")
    config, own = HeadConfig(heads, said, KIND), said.get(OWN)
    if SPECULATORS in said:
        raise ConfigError(
            f"{config.path} has the form of the library speculators; specq reads block drafters in the form of "
            f"DFlash's authors, with the sizes of the layers at the top level and {OWN}"
        )
    if not isinstance(own, dict):
        raise ConfigError(f"{heads} does not contain a block drafter: its config.json has no object {OWN}")
    _check_kind(config, own)
    return BlockShape(
        **config.common(),
        num_layers=config.count("num_hidden_layers"),
        block_size=_block_size(config, own),
        mask_token_id=_mask_token_id(config, own),
        norms_states=own.get("norms_states") is True,
        layers=config.layers("target_layer_ids", own.get("target_layer_ids")),
    )


def _check_kind(config: HeadConfig, own: dict[str, Any]) -> None:
    """Raise ConfigError unless the layers are of a kind that we compute."""
    said = config.said
    config.check("model_type", said.get("model_type"), "qwen3")
    config.check("hidden_act", said.get("hidden_act", "silu"), "silu")
    config.check("attention_bias", said.get("attention_bias") or False, False)
    for kind in said.get("layer_types") or []:
        config.check("layer_types", kind, _FULL)
    for key in ("fc_layernorm", "causal"):
        config.check(f"{OWN}.{key}", own.get(key) or False, False)


def _block_size(config: HeadConfig, own: dict[str, Any]) -> int:
    """Return the number of tokens of a block, which some directories name in `dflash_config`."""
    value = config.said.get("block_size", own.get("block_size"))
    if type(value) is int and 2 <= value <= MOST_BLOCK:
        return value
    raise ConfigError(
        f"{config.path}: block_size is {value!r}, but must be a whole number from 2 to {MOST_BLOCK}: the anchor and "
        "the masks of a block"
    )


def _mask_token_id(config: HeadConfig, own: dict[str, Any]) -> int | None:
    value = own.get("mask_token_id")
    if value is None or (type(value) is int and value >= 0):
        return value
    raise ConfigError(f"{config.path}: mask_token_id is {value!r}, but must be a token id")


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
    columns = {TOKEN_IDS: found[TOKEN_IDS][1][:1]} if TOKEN_IDS in found else {}
    return fault(needed, columns, {TOKEN_IDS: ("int32",)}, found, f"{KIND[2:]}s")
