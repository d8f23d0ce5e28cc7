"""A draft model in the form of `specq.checkpoints.draft_form` -> a transformers Llama with a smaller head.

The rows of the head stand for the tokens in `SubsetHead.token_ids`. `specq.engines.torch.loading.LoadedModel` passes
them on. A reader of the logits must map column i to the token `token_ids[i]`. In a parallel draft model, the last rows
of the embedding are the masks. `num_masks` of the network is their number.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from specq.checkpoints import draft_form
from specq.engines.native.weights import BLOCK, BlockWeight
from specq.engines.torch.gguf_network import add_rope
from specq.protocol import ConfigError, Int32Array

_Tensors = dict[str, torch.Tensor]


class SubsetHead(torch.nn.Linear):
    """An output head over a part of the vocabulary; `token_ids` i32[rows], ascending."""

    def __init__(self, hidden_size: int, token_ids: Int32Array) -> None:
        super().__init__(hidden_size, len(token_ids), bias=False, device="meta")
        self.token_ids = token_ids


def load_draft(directory: Path, shape: draft_form.DraftModelShape, device: torch.device, dtype: torch.dtype) -> Any:
    """Load the model; it computes in `dtype`. Raises ConfigError for weights that do not fit `shape`."""
    tensors = _read_all(directory, shape)
    token_ids = tensors[draft_form.TOKEN_IDS].numpy()
    _check_token_ids(directory / draft_form.WEIGHTS, token_ids, shape)
    num_masks = shape.num_places - 1
    with torch.device("meta"):
        sizes = shape.llama_config() | {"vocab_size": shape.vocab_size + num_masks}
        config = AutoConfig.for_model("llama", **sizes)
        network: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    network.lm_head = SubsetHead(shape.hidden_size, token_ids)
    network.num_masks = num_masks
    state = {name: tensor.to(device, dtype) for name, tensor in _values(tensors, shape).items()}
    network.load_state_dict(state, assign=True)
    add_rope(network, None, device)
    return network.train(mode=False)


def draft_blocks(directory: Path, shape: draft_form.DraftModelShape) -> dict[str, BlockWeight]:
    """Return the 8-bit weights of linear layers by name, in the kernels' blocks.

    Layers whose rows are not whole blocks are left out.
    """
    tensors = _read_all(directory, shape)
    names = (name for name in draft_form.matrix_shapes(shape) if name not in (draft_form.EMBEDDING, draft_form.LIFT))
    return {
        name.removesuffix(".weight"): _blocks(tensors[name], tensors[name + draft_form.SCALE])
        for name in names
        if tensors[name].shape[1] % BLOCK == 0
    }


def _blocks(values: torch.Tensor, scales: torch.Tensor) -> BlockWeight:
    """Return int8 [rows, columns] with the scales [rows] as blocks: the row's scale and 32 values."""
    values = values.view(len(values), -1, BLOCK)
    parts = (
        scales.half()[:, None, None].expand(*values.shape[:2], 1).contiguous().view(torch.uint8),
        values.view(torch.uint8),
    )
    return BlockWeight("Q8_0", torch.cat(parts, -1).flatten(1).numpy())


def _read_all(directory: Path, shape: draft_form.DraftModelShape) -> _Tensors:
    """Read the weights, and the tensors that the model shares with another model."""
    tensors = _read(directory / draft_form.WEIGHTS, shape)
    place, of_owner = draft_form.owner(directory, shape)
    if place == directory:
        return tensors
    theirs = _read(place / draft_form.WEIGHTS, of_owner)
    return tensors | {name: tensor for name, tensor in theirs.items() if draft_form.is_shared(name)}


def _read(path: Path, shape: draft_form.DraftModelShape) -> _Tensors:
    """Read the file. It must have exactly the tensors that `shape` requires."""
    if not path.is_file():
        raise ConfigError(f"{path.parent} has no {path.name}, which holds the weights of a draft model of this form")
    try:
        tensors: _Tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read; it may be truncated: {error}") from error
    needed = draft_form.tensor_forms(shape)
    found = {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()}
    wrong = sorted(name for name in needed.keys() | found.keys() if needed.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        raise ConfigError(
            f"{path} does not fit its config.json: {name} is {found.get(name, 'missing')}, and should be "
            f"{needed.get(name, 'left out')} ({len(wrong)} tensors are wrong or missing)"
        )
    broken = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if broken:
        raise ConfigError(f"{path} has values that are not finite, in {broken[0]}")
    return tensors


def _check_token_ids(path: Path, token_ids: Int32Array, shape: draft_form.DraftModelShape) -> None:
    if token_ids[0] < 0 or token_ids[-1] >= shape.num_tokens or np.any(token_ids[1:] <= token_ids[:-1]):
        raise ConfigError(
            f"{path}: {draft_form.TOKEN_IDS} must ascend within the vocabulary, 0 to {shape.num_tokens - 1}; they "
            f"range from {token_ids.min()} to {token_ids.max()}"
        )


def _values(tensors: _Tensors, shape: draft_form.DraftModelShape) -> _Tensors:
    """Return the weights by transformers' names, in float32."""
    found = {name: tensors[name] for name in draft_form.norm_names(shape)}
    for name in draft_form.matrix_shapes(shape):
        found[name] = tensors[name].float() * tensors[name + draft_form.SCALE].half().float()[:, None]
    embedding = found[draft_form.EMBEDDING] @ found.pop(draft_form.LIFT).T
    masks = [tensors[draft_form.MASKS]] if draft_form.MASKS in tensors else []
    found[draft_form.EMBEDDING] = torch.cat([embedding, *masks])
    return found
