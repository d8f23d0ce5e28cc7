"""Inflate heads for a larger target: they draft the same as the small heads, at the larger one's cost.

The layer outputs of an inflated target are those of the small one, padded with zeros (`specq.models.inflate_layers`).
So an EAGLE-3 head has the same input layers and tokens as the small head. It has one layer of the target's shape. A
block drafter has as many layers as the small one, of the target's shape. Medusa heads read the last hidden state in the
same way. If the small heads share the small target's embedding or output matrix, the inflated ones do so too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from specq.checkpoints import draft_form, read_json
from specq.drafting.block import form as block_form
from specq.drafting.eagle3 import form as eagle_form
from specq.drafting.head_config import HeadShape
from specq.drafting.head_files import read_tensors
from specq.drafting.head_kinds import kind_of
from specq.drafting.medusa import form as medusa_form
from specq.drafting.medusa.network import tensor_value
from specq.models.inflate import DTYPES, place_of
from specq.models.inflate_layers import Named, Placer, Tensors
from specq.models.shapes import Shape, check_fits
from specq.protocol import ConfigError


def write_heads(
    heads: Path, target: str | Path, out: Path, shape: Shape, *, device: str = "", dtype: str = "bfloat16"
) -> Path:
    """Write heads inflated for a target of this shape into a new directory in `out`. Return the directory.

    `target` is the small target. `device` and `dtype` are as in `specq.models.inflate.write`. Raises ConfigError if
    `heads` has no heads, or if they do not fit into the shape.
    """
    large = replace(shape, qkv_bias=False, tied=False)
    placer = partial(Placer, large=large, device=place_of(device), dtype=DTYPES[dtype])
    kind = kind_of(heads)
    num_layers = int(read_json(Path(target), "config.json")["num_hidden_layers"])
    eagle = partial(_eagle, num_layers=num_layers)
    makers: dict[str, Any] = {eagle_form.KIND: eagle, block_form.KIND: _block, medusa_form.KIND: _medusa}
    if kind.called not in makers:
        raise ConfigError(f"{heads} contains {kind.called}; only {', '.join(makers)} can be inflated")
    config, tensors, file = makers[kind.called](heads, placer=placer)
    directory = out / kind.source
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
    save_file(
        {key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, directory / file, metadata={"format": "pt"}
    )
    return directory


Made = tuple[dict[str, Any], Tensors, str]  # config.json, the tensors, and the name of their file


def _layer_shape(shape: HeadShape, num_layers: int = 1) -> Shape:
    """Return the shape of heads' layers."""
    return Shape(
        shape.hidden_size, num_layers, shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim,
        shape.intermediate_size, shape.vocab_size, tied=False,
    )  # fmt: skip


def _of_shape(large: Shape, shape: HeadShape) -> dict[str, Any]:
    """Return what inflated layers change in the config.json of small ones."""
    return {
        "hidden_size": large.hidden,
        "target_hidden_size": large.hidden,
        "intermediate_size": large.intermediate,
        "num_attention_heads": large.heads,
        "num_key_value_heads": large.kv_heads,
        "head_dim": large.head_dim,
        "rms_norm_eps": shape.rms_norm_eps * shape.hidden_size / large.hidden,
    }


def _eagle(heads: Path, num_layers: int, placer: Any) -> Made:
    """Inflate an EAGLE-3 head."""
    shape = eagle_form.eagle_shape(heads)
    stored = read_tensors(heads, eagle_form.WEIGHTS, partial(eagle_form.reason_against, shape), "an EAGLE-3 head")
    tensors = {eagle_form.own_name(name): tensor for name, tensor in stored.items()}
    small = _layer_shape(shape)
    made: Placer = placer(tensors, small, inputs=2)
    large = made.large
    check_fits(small, large)
    if shape.hidden_size != shape.target_hidden_size or eagle_form.EMBEDDING in tensors:
        raise ConfigError(f"{heads}: only an EAGLE-3 head of its target's hidden size and embedding can be inflated")
    config = replace(
        shape,
        **_of_shape(large, shape),
        vocab_size=large.vocab if shape.has_tables else shape.vocab_size,
        layers=eagle_form.tapped_layers(shape, num_layers),
    )
    found = dict(_eagle_tensors(made)) | _tables(tensors, config)
    return config.config(), found, eagle_form.WEIGHTS[0]


def _eagle_tensors(made: Placer) -> Named:
    yield "fc.weight", made.onto_hidden("fc.weight", made.large.hidden, eagle_form.NUM_TAPS)
    yield "midlayer.hidden_norm.weight", made.norm("midlayer.hidden_norm.weight")
    for name, tensor in made.layer("midlayer."):
        yield f"midlayer.{name}", tensor
    yield "norm.weight", made.norm("norm.weight")
    yield "lm_head.weight", made.onto_hidden("lm_head.weight", len(made.weights["lm_head.weight"]))


def _tables(tensors: Mapping[str, torch.Tensor], config: eagle_form.EagleShape) -> dict[str, torch.Tensor]:
    """Return the tables of the tokens that the head covers, for the target's larger vocabulary."""
    found = {name: tensors[name] for name in (eagle_form.TO_TARGET,) if name in tensors}
    if eagle_form.FROM_TARGET in tensors:
        known = torch.zeros(config.vocab_size, dtype=torch.bool)
        known[: len(tensors[eagle_form.FROM_TARGET])] = tensors[eagle_form.FROM_TARGET]
        found[eagle_form.FROM_TARGET] = known
    return found


def _block(heads: Path, placer: Any) -> Made:
    """Inflate a block drafter."""
    shape = block_form.block_shape(heads)
    if shape.hidden_size != shape.target_hidden_size or shape.draft_vocab_size:
        raise ConfigError(
            f"{heads}: only a block drafter of its target's hidden size can be inflated, in the form of DFlash's "
            "authors or of `specq train block`"
        )
    read = partial(block_form.reason_against, shape)
    tensors = read_tensors(heads, block_form.WEIGHTS, read, block_form.KIND)
    made: Placer = placer(tensors, small := _layer_shape(shape, shape.num_layers))
    check_fits(small, large := made.large)
    config = replace(shape, **_of_shape(large, shape), vocab_size=large.vocab)
    others = (block_form.MASK, draft_form.TOKEN_IDS)
    found = dict(_block_tensors(made, shape)) | {name: tensors[name] for name in others if name in tensors}
    if block_form.MASK in found:
        found[block_form.MASK] = made.padded(block_form.MASK)
    return config.config(), found, block_form.WEIGHTS[0]


def _block_tensors(made: Placer, shape: block_form.BlockShape) -> Named:
    """Yield (name, tensor). Normed hidden states are larger than the small ones; `hidden_norm` undoes that."""
    yield "fc.weight", made.onto_hidden("fc.weight", made.large.hidden, len(shape.layers))
    for name in ("hidden_norm.weight", "norm.weight"):
        yield name, made.norm(name)
    for layer in range(shape.num_layers):
        for name, tensor in made.layer(f"layers.{layer}."):
            yield f"layers.{layer}.{name}", tensor


def _medusa(heads: Path, placer: Any) -> Made:
    """Inflate Medusa heads. Heads in 8 bits get their dequantised values."""
    shape = medusa_form.heads_shape(heads)
    stored = read_tensors(heads, medusa_form.WEIGHTS, partial(medusa_form.reason_against, shape), medusa_form.KIND)
    names = [name for name in stored if name != draft_form.TOKEN_IDS and not name.endswith(draft_form.SCALE)]
    values = {name: tensor_value(name, stored) for name in names}
    hidden = values[medusa_form.block_names(0, 0)[0]].shape[1]
    made: Placer = placer(values, Shape(hidden, 1, 1, 1, 1, 1, 1, tied=False))
    if made.large.hidden < hidden:
        raise ConfigError(f"{heads}: hidden={made.large.hidden} is less than these heads' {hidden}")
    found = {name: _medusa_tensor(made, name) for name in names}
    found |= {draft_form.TOKEN_IDS: stored[draft_form.TOKEN_IDS]} if draft_form.TOKEN_IDS in stored else {}
    about = replace(shape, hidden_size=made.large.hidden if shape.hidden_size else 0, target_fingerprint="")
    config = about.config() if shape.hidden_size else read_json(heads, "config.json")
    return config, found, medusa_form.WEIGHTS[0]


def _medusa_tensor(made: Placer, name: str) -> torch.Tensor:
    value = made.weights[name]
    if value.ndim == 1:
        return made.padded(name)
    is_block = name.endswith("linear.weight")
    return made.onto_hidden(name, made.large.hidden if is_block else len(value))
