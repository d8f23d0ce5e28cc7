"""Random EAGLE-3 and P-EAGLE heads as they are published, and their logits by plain arithmetic, row by row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import silu

from specq.drafting.eagle3 import form as eagle_form
from specq.drafting.head_config import HeadShape

WEIGHTS, PICKLED = eagle_form.WEIGHTS
Values = dict[str, torch.Tensor]
Past = tuple[list[torch.Tensor], list[torch.Tensor]]  # keys and values [kv_heads, dim] of rows so far, in one layer


def eagle_shape_of(hidden: int, vocab: int, draft_vocab: int, **others: Any) -> eagle_form.EagleShape:
    """Return the shape of a small head: two query heads for each key-value head."""
    sizes = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    about = {"rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "target_hidden_size": hidden}
    given: dict[str, Any] = {**sizes, **about, "vocab_size": vocab, "draft_vocab_size": draft_vocab, **others}
    return eagle_form.EagleShape(hidden_size=hidden, **given)


def make_eagle(
    directory: Path,
    shape: eagle_form.EagleShape,
    *,
    embedding: bool = True,
    seed: int = 0,
    scale: float = 0.3,
    **config: Any,
) -> Path:
    """Write a random head as SpecForge does. config: changes of its config.json, where None removes a key."""
    rng = np.random.default_rng(seed)
    tensors = {name: _random(rng, scale, *size) for name, size in eagle_form.matrix_shapes(shape).items()}
    if embedding:
        tensors[eagle_form.EMBEDDING] = _random(rng, 1.0, shape.vocab_size, shape.hidden_size)
    if shape.has_tables:
        ids = np.sort(rng.permutation(shape.num_tokens or shape.vocab_size)[: shape.draft_vocab_size])
        tensors[eagle_form.TO_TARGET] = torch.from_numpy(ids - np.arange(len(ids)))
        tensors[eagle_form.FROM_TARGET] = torch.from_numpy(np.isin(np.arange(shape.vocab_size), ids))
    said = {key: value for key, value in {**shape.config(), **config}.items() if value is not None}
    for key in ("num_tokens", "tokenizer_hash"):  # heads of other authors lack these keys
        if not said.get(key):
            said.pop(key, None)
    if not shape.layers:
        said.pop("eagle_config", None)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / WEIGHTS)
    (directory / "config.json").write_text(json.dumps(said))
    return directory


def as_speculators(directory: Path, target: str, **config: Any) -> Path:
    """Rewrite a head in the form of the library `speculators`. config: changes of its config.json."""
    said = json.loads((directory / "config.json").read_text())
    own = ("draft_vocab_size", "target_hidden_size", "norm_before_residual", "eagle_aux_hidden_state_layer_ids")
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    layer = (*sizes, "model_type", "rms_norm_eps", "rope_theta", "num_hidden_layers", "rope_scaling")
    found = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": target}},
        "transformer_layer_config": {"model_type": said["model_type"]}
        | {key: said[key] for key in layer if key in said},
        **{key: said[key] for key in own if key in said},
    }
    found["transformer_layer_config"] |= config.pop("layer", {})
    (directory / "config.json").write_text(json.dumps({**found, **config}))
    tensors = load_file(directory / WEIGHTS)
    save_file({name.replace("midlayer.", "layers.0."): one for name, one in tensors.items()}, directory / WEIGHTS)
    return directory


def make_parallel(directory: Path, shape: eagle_form.EagleShape, target: str, **config: Any) -> Path:
    """Write a random P-EAGLE head in the form of `speculators`. config: changes of its config.json."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": shape.num_places}
    named = {"verifier": {"name_or_path": target}, "proposal_methods": [proposal], "default_proposal_method": "greedy"}
    said = {"speculators_model_type": "peagle", "speculators_config": named, "mask_token_id": shape.mask_token_id}
    return as_speculators(make_eagle(directory, shape), target, **{**said, **config})


def _random(rng: np.random.Generator, scale: float, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.normal(0, scale, shape).astype(np.float32))


@torch.inference_mode()
def eagle_logits(
    directory: Path,
    shape: eagle_form.EagleShape,
    taps: torch.Tensor,
    token_ids: Sequence[int],
    embedding: torch.Tensor,
    first: int = 1,
) -> torch.Tensor:
    """Return f32[len(token_ids), columns]: a head's logits after each of some tokens.

    The first token is at position `first` of its text. taps f32[n, width] are the target's hidden states before the
    first n tokens. The other tokens use the head's own states.
    """
    values = _values(directory)
    states, found, past = list(taps @ values["fc.weight"].T), list[torch.Tensor](), list[Past]([([], [])])
    for i, token in enumerate(token_ids):
        if i >= len(taps):
            states.append(found[i - 1])
        found.append(_row(values, shape, states[i], embedding[token], first - 1 + i, past))
    outputs = torch.stack(found)
    return normed(outputs, values["norm.weight"], shape) @ values["lm_head.weight"].T


@torch.inference_mode()
def parallel_logits(
    directory: Path, shape: eagle_form.EagleShape, taps: torch.Tensor, token_ids: Sequence[int], first: int = 1
) -> torch.Tensor:
    """Return f32[places, columns]: what a P-EAGLE head predicts behind some tokens; arguments as for `eagle_logits`."""
    values, past = _values(directory), list[Past](([], []) for _ in range(shape.num_layers))
    masks = [shape.mask_token_id or 0] * (shape.num_places - 1)
    states = torch.cat([taps, values[eagle_form.MASK_STATES][0].expand(len(masks), -1)]) @ values["fc.weight"].T
    found = [
        _row(values, shape, state, values[eagle_form.EMBEDDING][token], first - 1 + i, past)
        for i, (state, token) in enumerate(zip(states, [*token_ids, *masks], strict=True))
    ]
    outputs = torch.stack(found[-shape.num_places :])
    return normed(outputs, values["norm.weight"], shape) @ values["lm_head.weight"].T


def _values(directory: Path) -> Values:
    return {eagle_form.own_name(name): value for name, value in load_file(directory / WEIGHTS).items()}


def _row(
    values: Values,
    shape: eagle_form.EagleShape,
    state: torch.Tensor,
    embedded: torch.Tensor,
    position: int,
    past: Sequence[Past],
) -> torch.Tensor:
    """Compute one row, which sees the rows before it. Its keys and values are appended to theirs, of each layer."""
    layer = of_layer(values, "midlayer.")
    given = normed(state, layer["hidden_norm.weight"], shape)
    both = torch.cat([normed(embedded, layer["input_layernorm.weight"], shape), given])
    x = _fed(
        layer,
        shape,
        (given if shape.norm_before_residual else state) + _attended(layer, shape, both, position, past[0]),
    )
    for number in range(1, shape.num_layers):
        x = plain_layer(of_layer(values, f"layers.{number}."), shape, x, position, past[number])
    return x


def of_layer(values: Values, prefix: str) -> Values:
    """Return the tensors whose name begins so, without this beginning."""
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def plain_layer(layer: Values, shape: HeadShape, x: torch.Tensor, position: int, past: Past) -> torch.Tensor:
    """Return the output of a layer of a Llama, Qwen2 or Qwen3 for one row, which sees those before it."""
    return _fed(
        layer, shape, x + _attended(layer, shape, normed(x, layer["input_layernorm.weight"], shape), position, past)
    )


def _attended(layer: Values, shape: HeadShape, x: torch.Tensor, position: int, past: Past) -> torch.Tensor:
    """Return the output of a layer's attention. The row's keys and values are appended to those before it."""
    keys, heads_values = past
    query, key, value = (
        (layer[f"self_attn.{n}_proj.weight"] @ x + layer.get(f"self_attn.{n}_proj.bias", 0)).reshape(-1, shape.head_dim)
        for n in ("q", "k", "v")
    )
    if shape.has_head_norms:
        query, key = (normed(x, layer[f"self_attn.{n}_norm.weight"], shape) for n, x in (("q", query), ("k", key)))
    keys.append(rotated(key, position, shape))
    heads_values.append(value)
    group = shape.num_attention_heads // shape.num_key_value_heads
    found = []
    for head, own in enumerate(rotated(query, position, shape)):
        scores = torch.stack([own @ one[head // group] for one in keys]) / shape.head_dim**0.5
        found.append(sum(p * one[head // group] for p, one in zip(scores.softmax(0), heads_values, strict=True)))
    return layer["self_attn.o_proj.weight"] @ torch.cat(found)


def _fed(layer: Values, shape: HeadShape, x: torch.Tensor) -> torch.Tensor:
    inner = normed(x, layer["post_attention_layernorm.weight"], shape)
    gate, up = layer["mlp.gate_proj.weight"] @ inner, layer["mlp.up_proj.weight"] @ inner
    found: torch.Tensor = x + layer["mlp.down_proj.weight"] @ (silu(gate) * up)
    return found


def normed(x: torch.Tensor, weight: torch.Tensor, shape: HeadShape) -> torch.Tensor:
    """Return the RMS norm of x [..., size]."""
    return x / (x.pow(2).mean(-1, keepdim=True) + shape.rms_norm_eps).sqrt() * weight


def rotated(x: torch.Tensor, position: int, shape: HeadShape) -> torch.Tensor:
    """Rotate x [heads, dim] to a position."""
    half = shape.head_dim // 2
    angles = position * shape.rope_theta ** (-2 * torch.arange(half) / shape.head_dim)
    turned = torch.polar(torch.ones(half), angles) * torch.complex(x[:, :half].contiguous(), x[:, half:].contiguous())
    return torch.cat([turned.real, turned.imag], -1)


def change_head(directory: Path, tensors: dict[str, Any] | None = None, **config: Any) -> None:
    """Overwrite some of a head's tensors and of its config.json. None removes an entry."""
    path = directory / "config.json"
    path.write_text(json.dumps(_changed(json.loads(path.read_text()), config)))
    save_file(_changed(load_file(directory / WEIGHTS), tensors or {}), directory / WEIGHTS)


def _changed(before: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in {**before, **changes}.items() if value is not None}
