"""Tiny draft models in the form of `specq.checkpoints.draft_form`, and their logits by plain arithmetic."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from specq.checkpoints import draft_form

VOCAB = 99
MADE = draft_form.DraftModelShape(
    hidden_size=48,
    intermediate_size=72,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=600,
    rms_norm_eps=1e-5,
    rope_theta=5000.0,
    vocab_size=VOCAB + 5,  # padded
    num_tokens=VOCAB,
    embedding_rank=8,
    head_size=37,
    tokenizer_hash="a" * 64,
)
PARALLEL = replace(MADE, num_places=4)


def make_draft(directory: Path, shape: draft_form.DraftModelShape = MADE, seed: int = 0) -> Path:
    """Write a random model, and return its directory. The weights are large enough to matter."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, size in draft_form.matrix_shapes(shape).items():
        values, scales = draft_form.to_int8(rng.normal(0, 0.25, size).astype(np.float32))
        tensors |= {name: torch.from_numpy(values), name + draft_form.SCALE: torch.from_numpy(scales)}
    if shape.num_places > 1:
        masks = rng.normal(0, 0.7, (shape.num_places - 1, shape.hidden_size)).astype(np.float32)
        tensors[draft_form.MASKS] = torch.from_numpy(masks)
    for name in draft_form.norm_names(shape):
        tensors[name] = torch.from_numpy(rng.normal(1, 0.2, shape.hidden_size).astype(np.float32))
    ids = np.sort(rng.permutation(shape.num_tokens)[: shape.head_size]).astype(np.int32)
    tensors[draft_form.TOKEN_IDS] = torch.from_numpy(ids)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / draft_form.WEIGHTS)
    (directory / "config.json").write_text(json.dumps(shape.config()))
    return directory


def head_tokens(directory: Path) -> list[int]:
    """Return the tokens that the head knows."""
    found: list[int] = load_file(directory / draft_form.WEIGHTS)[draft_form.TOKEN_IDS].tolist()
    return found


def draft_logits(directory: Path, context: list[int]) -> torch.Tensor:
    """Return the model's logits after a context, f32[vocab_size] by token id. -inf for tokens that its head lacks."""
    return places_logits(directory, context, 1)[0]


@torch.inference_mode()
def places_logits(directory: Path, context: list[int], num_places: int) -> torch.Tensor:
    """Return a parallel draft model's logits at the places after a context, f32[num_places, vocab_size].

    As in `draft_logits`.
    """
    shape, tensors = draft_form.draft_shape(directory), load_file(directory / draft_form.WEIGHTS)
    assert shape is not None

    def matrix(name: str) -> torch.Tensor:
        return tensors[name].float() * tensors[name + draft_form.SCALE].half().float()[:, None]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, (shape.hidden_size,), tensors[name], shape.rms_norm_eps)

    x = matrix("model.embed_tokens.weight")[context] @ matrix("model.embed_tokens.lift").T
    if num_places > 1:
        x = torch.cat([x, tensors[draft_form.MASKS][: num_places - 1]])
    for i in range(shape.num_hidden_layers):
        layer = f"model.layers.{i}."
        y = norm(x, layer + "input_layernorm.weight")
        q, k, v = (y @ matrix(f"{layer}self_attn.{name}_proj.weight").T for name in "qkv")
        x = x + _attend(q, k, v, shape) @ matrix(layer + "self_attn.o_proj.weight").T
        y = norm(x, layer + "post_attention_layernorm.weight")
        gate, up = (y @ matrix(f"{layer}mlp.{name}_proj.weight").T for name in ("gate", "up"))
        x = x + (silu(gate) * up) @ matrix(layer + "mlp.down_proj.weight").T
    logits = torch.full((num_places, shape.vocab_size), -torch.inf)
    said = norm(x[-num_places:], "model.norm.weight") @ matrix("lm_head.weight").T
    logits[:, tensors[draft_form.TOKEN_IDS].long()] = said
    return logits


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: draft_form.DraftModelShape) -> torch.Tensor:
    dim = shape.head_dim
    q, k, v = (x.view(len(x), -1, dim).transpose(0, 1) for x in (q, k, v))  # [heads, length, head_dim]
    frequencies = shape.rope_theta ** (-torch.arange(0, dim, 2) / dim)
    angle = torch.outer(torch.arange(q.shape[1]).float(), frequencies).repeat(1, 2)
    q, k = (_rotate(x, angle) for x in (q, k))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(0, 1).flatten(1)


def _rotate(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * angle.cos() + torch.cat((-second, first), -1) * angle.sin()


def change_draft(directory: Path, tensors: dict[str, Any] | None = None, **config: Any) -> None:
    """Overwrite some of a model's tensors and of its config.json. None removes an entry."""
    path = directory / "config.json"
    path.write_text(json.dumps(_changed(json.loads(path.read_text()), config)))
    if tensors:
        save_file(_changed(load_file(directory / draft_form.WEIGHTS), tensors), directory / draft_form.WEIGHTS)


def _changed(before: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in {**before, **changes}.items() if value is not None}
