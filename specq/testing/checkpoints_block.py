"""Random block drafters in the form of DFlash's authors, and their logits by plain arithmetic, row by row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import silu

from specq.checkpoints.draft_form import TOKEN_IDS
from specq.drafting.block import form as block_form
from specq.drafting.head_files import output_matrix
from specq.testing.checkpoints_eagle import normed, rotated

(WEIGHTS,) = block_form.WEIGHTS
Values = dict[str, torch.Tensor]


def block_shape_of(hidden: int, vocab: int, layers: tuple[int, ...], **others: Any) -> block_form.BlockShape:
    """Return the shape of a small block drafter of two layers: two query heads for each key-value head."""
    sizes = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    about = {"rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "target_hidden_size": hidden, "num_layers": 2}
    given: dict[str, Any] = {**sizes, **about, "block_size": 5, "norms_states": True, **others}
    return block_form.BlockShape(hidden_size=hidden, vocab_size=vocab, layers=layers, **given)


def make_block(
    directory: Path,
    shape: block_form.BlockShape,
    token_ids: Sequence[int] | None = None,
    *,
    seed: int = 0,
    scale: float = 0.3,
) -> Path:
    """Write a random block drafter; `token_ids`: the tokens that it drafts. None: all."""
    random = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(size, generator=random) * scale for name, size in block_form.matrix_shapes(shape).items()
    }
    if shape.mask_token_id is None:
        tensors[block_form.MASK] = torch.randn(shape.hidden_size, generator=random)
    if token_ids is not None:
        tensors[TOKEN_IDS] = torch.from_numpy(np.array(token_ids, np.int32))
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / WEIGHTS)
    (directory / "config.json").write_text(json.dumps(shape.config()))
    return directory


def as_block_of_speculators(
    directory: Path, target: Path | str, token_ids: Sequence[int] | None = None, **config: Any
) -> Path:
    """Rewrite a drafter in the form of the library `speculators`, which names its target.

    token_ids  the tokens that it drafts. None: all.
    config     changes of its config.json; `layer`: those of its layers.
    """
    said = json.loads((directory / "config.json").read_text())
    tensors = {name: one for name, one in load_file(directory / WEIGHTS).items() if name != TOKEN_IDS}
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    layer = (*sizes, "model_type", "rms_norm_eps", "rope_theta", "num_hidden_layers", "rope_scaling")
    found = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": str(target)}},
        "transformer_layer_config": {key: said[key] for key in layer if key in said} | config.pop("layer", {}),
        "block_size": said["block_size"],
        "mask_token_id": said[block_form.OWN]["mask_token_id"],
        "aux_hidden_state_layer_ids": [one + 1 for one in said[block_form.OWN]["target_layer_ids"]],
        "draft_vocab_size": said["vocab_size"] if token_ids is None else len(token_ids),
    }
    if token_ids is not None:
        ids = torch.tensor(token_ids)
        tensors |= {"lm_head.weight": output_matrix(Path(target))[ids], "d2t": ids - torch.arange(len(ids))}
        tensors["t2d"] = torch.isin(torch.arange(said["vocab_size"]), ids)
    (directory / "config.json").write_text(json.dumps(found | config))
    save_file(tensors, directory / WEIGHTS)
    return directory


def block_logits(
    directory: Path,
    shape: block_form.BlockShape,
    taps: torch.Tensor,
    anchor: int,
    matrices: tuple[torch.Tensor, torch.Tensor],
    first: int = 1,
) -> torch.Tensor:
    """Return the logits [places, columns] of a block.

    taps      [n, width]: the target's hidden states at the positions from first - 1 on.
    anchor    the token behind them.
    matrices  the target's embedding and output matrix, [vocab, hidden] each.
    """
    values = load_file(directory / WEIGHTS)
    embedding, output = matrices
    mask = values[block_form.MASK] if shape.mask_token_id is None else embedding[shape.mask_token_id]
    features = [_feature(values, shape, tap) for tap in taps]
    rows = [embedding[anchor], *([mask] * shape.num_places)]
    for number in range(shape.num_layers):
        prefix = f"layers.{number}."
        layer = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
        rows = _layer(layer, shape, features, rows, first - 1, shape.windows[number] if shape.windows else 0)
    outputs = torch.stack([normed(row, values["norm.weight"], shape) for row in rows[1:]])
    known = output if TOKEN_IDS not in values else output[values[TOKEN_IDS].long()]
    known = values.get("lm_head.weight", known)
    return outputs @ known.T


def _feature(values: Values, shape: block_form.BlockShape, tap: torch.Tensor) -> torch.Tensor:
    parts = tap.view(-1, shape.target_hidden_size)
    if shape.norms_states:
        parts = normed(parts, torch.ones(parts.shape[1]), shape)
    return normed(values["fc.weight"] @ parts.flatten(), values["hidden_norm.weight"], shape)


def _layer(
    layer: Values,
    shape: block_form.BlockShape,
    features: Sequence[torch.Tensor],
    rows: Sequence[torch.Tensor],
    first: int,
    window: int,
) -> list[torch.Tensor]:
    """Return the output of rows behind features, which stand at the positions from `first` on.

    window  how many of the features they see; 0: all, and rows behind them, too.
    """
    skipped = max(len(features) - window, 0) if window else 0
    features, first = features[skipped:], first + skipped
    inputs = [normed(row, layer["input_layernorm.weight"], shape) for row in rows]
    keys = [_heads(layer, shape, one, "k", first + i) for i, one in enumerate([*features, *inputs])]
    values = [(layer["self_attn.v_proj.weight"] @ one).reshape(-1, shape.head_dim) for one in [*features, *inputs]]
    group, found = shape.num_attention_heads // shape.num_key_value_heads, []
    for i, (row, one) in enumerate(zip(rows, inputs, strict=True)):
        attended, end = [], len(features) + (i + 1 if window and shape.is_causal else len(rows))
        for head, query in enumerate(_heads(layer, shape, one, "q", first + len(features) + i)):
            weights = (torch.stack([query @ key[head // group] for key in keys[:end]]) / shape.head_dim**0.5).softmax(0)
            attended.append(sum(one * value[head // group] for one, value in zip(weights, values[:end], strict=True)))
        x = row + layer["self_attn.o_proj.weight"] @ torch.cat(attended)
        inner = normed(x, layer["post_attention_layernorm.weight"], shape)
        gate, up = layer["mlp.gate_proj.weight"] @ inner, layer["mlp.up_proj.weight"] @ inner
        found.append(x + layer["mlp.down_proj.weight"] @ (silu(gate) * up))
    return found


def _heads(layer: Values, shape: block_form.BlockShape, x: torch.Tensor, which: str, position: int) -> torch.Tensor:
    """Return the queries or keys of a row, [heads, dim]."""
    of_heads = (layer[f"self_attn.{which}_proj.weight"] @ x).reshape(-1, shape.head_dim)
    return rotated(normed(of_heads, layer[f"self_attn.{which}_norm.weight"], shape), position, shape)
