"""Random Medusa heads in both forms, and their logits by plain arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import silu

from specq.checkpoints import draft_form
from specq.drafting.medusa import form as medusa_form

PUBLISHED, PICKLED = medusa_form.WEIGHTS


def make_published(directory: Path, hidden: int, vocab: int, *, heads: int = 3, layers: int = 1, seed: int = 0) -> Path:
    """Write random heads as Medusa's authors do, each with its own matrix, in both file formats."""
    rng = np.random.default_rng(seed)
    tensors = _blocks(rng, hidden, heads, layers)
    tensors |= {f"{head}.{layers}.weight": _random(rng, vocab, hidden) for head in range(heads)}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / PUBLISHED)
    torch.save(tensors, directory / PICKLED)
    said = {"base_model_name_or_path": "a/target", "medusa_num_heads": heads, "medusa_num_layers": layers}
    (directory / "config.json").write_text(json.dumps(said))
    return directory


def make_heads(
    directory: Path,
    hidden: int,
    *,
    tokenizer: tuple[int, str],
    head_size: int = 0,
    heads: int = 4,
    layers: int = 1,
    seed: int = 0,
) -> Path:
    """Write random heads of our own form in 8 bits, without matrices to the vocabulary.

    - `tokenizer`: its number of tokens and its hash.
    - `head_size`: number of tokens that the heads know. 0: all.
    """
    rng, tensors = np.random.default_rng(seed), dict[str, torch.Tensor]()
    for name, tensor in _blocks(rng, hidden, heads, layers).items():
        tensors[name] = tensor
        if tensor.ndim == 2:
            values, scales = draft_form.to_int8(tensor.numpy())
            tensors |= {name: torch.from_numpy(values), name + draft_form.SCALE: torch.from_numpy(scales)}
    if head_size:
        tensors[draft_form.TOKEN_IDS] = torch.from_numpy(
            np.sort(rng.permutation(tokenizer[0])[:head_size]).astype(np.int32)
        )
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / PUBLISHED)
    (directory / "config.json").write_text(
        json.dumps(medusa_form.HeadsShape(heads, layers, hidden, *tokenizer).config())
    )
    return directory


def _blocks(rng: np.random.Generator, hidden: int, heads: int, layers: int) -> dict[str, torch.Tensor]:
    found = {}
    for head in range(heads):
        for layer in range(layers):
            found[f"{head}.{layer}.linear.weight"] = _random(rng, hidden, hidden)
            found[f"{head}.{layer}.linear.bias"] = _random(rng, hidden)
    return found


def _random(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.normal(0, 0.3, shape).astype(np.float32))


@torch.inference_mode()
def heads_logits(directory: Path, states: torch.Tensor, output: torch.Tensor | None = None) -> torch.Tensor:
    """Return f32[n, heads, columns] of hidden states f32[n, hidden].

    `output`: the target's matrix, if the heads have none.
    """
    tensors, said = load_file(directory / PUBLISHED), json.loads((directory / "config.json").read_text())
    layers = said["medusa_num_layers"]

    def matrix(name: str) -> torch.Tensor:
        scale = tensors.get(name + draft_form.SCALE)
        return tensors[name] if scale is None else (tensors[name].float() * scale[:, None]).bfloat16().float()

    found = []
    for head in range(said["medusa_num_heads"]):
        x = states
        for layer in range(layers):
            x = x + silu(x @ matrix(f"{head}.{layer}.linear.weight").T + tensors[f"{head}.{layer}.linear.bias"])
        own = matrix(f"{head}.{layers}.weight") if output is None else output
        is_part = output is not None and draft_form.TOKEN_IDS in tensors
        found.append(x @ (own[tensors[draft_form.TOKEN_IDS].long()] if is_part else own).T)
    return torch.stack(found, 1)


def change_heads(directory: Path, tensors: dict[str, Any] | None = None, **config: Any) -> None:
    """Overwrite some of the heads' tensors and of their config.json. None removes an entry.

    The pickled file is deleted.
    """
    (directory / PICKLED).unlink(missing_ok=True)
    path = directory / "config.json"
    path.write_text(json.dumps(_changed(json.loads(path.read_text()), config)))
    save_file(_changed(load_file(directory / PUBLISHED), tensors or {}), directory / PUBLISHED)


def _changed(before: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in {**before, **changes}.items() if value is not None}
