"""The weights of a draft model in the form of `specq.checkpoints.draft_form`, as arrays by transformers' names.

The rows of its head stand for the tokens in `token_ids`. A reader of the logits must map column i to the token
`token_ids[i]`. In a parallel draft model, the last rows of the embedding are the masks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specq.checkpoints import draft_form
from specq.engines.native.weights import BLOCK, BlockWeight
from specq.protocol import ConfigError, Float32Array, Int32Array

Stored = dict[str, npt.NDArray[Any]]


def read_draft(directory: Path, shape: draft_form.DraftModelShape) -> Stored:
    """Read the weights, and the tensors that the model shares with another model.

    Raises ConfigError for weights that do not fit `shape`.
    """
    tensors = _read(directory / draft_form.WEIGHTS, shape)
    place, of_owner = draft_form.owner(directory, shape)
    if place != directory:
        theirs = _read(place / draft_form.WEIGHTS, of_owner)
        tensors |= {name: tensor for name, tensor in theirs.items() if draft_form.is_shared(name)}
    _check_token_ids(directory / draft_form.WEIGHTS, tensors[draft_form.TOKEN_IDS], shape)
    return tensors


def draft_blocks(tensors: Stored, shape: draft_form.DraftModelShape) -> dict[str, BlockWeight]:
    """Return the 8-bit weights of linear layers by name, in the kernels' blocks.

    Layers whose rows are not whole blocks are left out.
    """
    names = (name for name in draft_form.matrix_shapes(shape) if name not in (draft_form.EMBEDDING, draft_form.LIFT))
    return {
        name.removesuffix(".weight"): _blocks(tensors[name], tensors[name + draft_form.SCALE])
        for name in names
        if tensors[name].shape[1] % BLOCK == 0
    }


def _blocks(values: npt.NDArray[np.int8], scales: Float32Array) -> BlockWeight:
    """Return int8 [rows, columns] with the scales [rows] as blocks: the row's scale and 32 values."""
    num_rows, columns = values.shape
    data = np.empty((num_rows, columns // BLOCK, 2 + BLOCK), np.uint8)
    data[:, :, :2] = scales.astype(np.float16)[:, None].view(np.uint8)[:, None]
    data[:, :, 2:] = values.reshape(num_rows, -1, BLOCK).view(np.uint8)
    return BlockWeight("Q8_0", data.reshape(num_rows, -1))


def _read(path: Path, shape: draft_form.DraftModelShape) -> Stored:
    """Read the file. It must have exactly the tensors that `shape` requires."""
    if not path.is_file():
        raise ConfigError(f"{path.parent} has no {path.name}, which holds the weights of a draft model of this form")
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        tensors: Stored = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read; it may be truncated: {error}") from error
    needed = draft_form.tensor_forms(shape)
    found = {name: (str(t.dtype), t.shape) for name, t in tensors.items()}
    wrong = sorted(name for name in needed.keys() | found.keys() if needed.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        raise ConfigError(
            f"{path} does not fit its config.json: {name} is {found.get(name, 'missing')}, and should be "
            f"{needed.get(name, 'left out')} ({len(wrong)} tensors are wrong or missing)"
        )
    broken = [name for name, tensor in tensors.items() if not np.isfinite(tensor).all()]
    if broken:
        raise ConfigError(f"{path} has values that are not finite, in {broken[0]}")
    return tensors


def _check_token_ids(path: Path, token_ids: Int32Array, shape: draft_form.DraftModelShape) -> None:
    if token_ids[0] < 0 or token_ids[-1] >= shape.num_tokens or np.any(token_ids[1:] <= token_ids[:-1]):
        raise ConfigError(
            f"{path}: {draft_form.TOKEN_IDS} must ascend within the vocabulary, 0 to {shape.num_tokens - 1}; they "
            f"range from {token_ids.min()} to {token_ids.max()}"
        )


def draft_values(tensors: Stored, shape: draft_form.DraftModelShape) -> dict[str, Float32Array]:
    """Return the weights by transformers' names, in float32."""
    found = {name: tensors[name] for name in draft_form.norm_names(shape)}
    for name in draft_form.matrix_shapes(shape):
        scales = tensors[name + draft_form.SCALE].astype(np.float16).astype(np.float32)
        found[name] = tensors[name].astype(np.float32) * scales[:, None]
    embedding = found[draft_form.EMBEDDING] @ found.pop(draft_form.LIFT).T
    masks = [tensors[draft_form.MASKS]] if draft_form.MASKS in tensors else []
    found[draft_form.EMBEDDING] = np.concatenate([embedding, *masks])
    return found
