"""Medusa heads in the form of `specq.checkpoints.medusa_form` -> matrices in memory that turn hidden states into logits.

Rule: heads that do not fit their target are refused here, before anything is drafted with them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn import functional

from specq.checkpoints import draft_form, gguf_tensors, is_gguf, medusa_form, read_gguf, read_json
from specq.engines.torch.loading import pick_device
from specq.protocol import ConfigError, Int32Array, ModelInfo

OUTPUTS = (
    "lm_head.weight",
    "model.embed_tokens.weight",
    "model.decoder.embed_tokens.weight",
)  # the first that is there
GGUF_OUTPUTS = ("output.weight", "token_embd.weight")

_Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class MedusaHeads:
    """K heads.

    blocks     (weights [K, hidden, hidden], biases [K, 1, hidden]) of each residual block
    output     [columns, hidden] for all heads, or [K, columns, hidden]
    token_ids  i32[columns] the token of each column, ascending; None: column i is token i
    """

    blocks: list[tuple[torch.Tensor, torch.Tensor]]
    output: torch.Tensor
    token_ids: Int32Array | None

    @property
    def num_heads(self) -> int:
        return len(self.blocks[0][0])

    @torch.inference_mode()
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return f32[n, K, columns] of hidden states [n, hidden]."""
        x = states.to(self.output.dtype).expand(self.num_heads, -1, -1)  # [K, n, hidden]
        for weights, biases in self.blocks:
            x = x + functional.silu(torch.baddbmm(biases, x, weights.mT))
        if self.output.ndim == 3:
            logits = torch.bmm(x, self.output.mT)
        else:
            logits = functional.linear(x.reshape(-1, x.shape[-1]), self.output).view(*x.shape[:2], -1)
        return logits.transpose(0, 1).float()


def load_heads(heads: str, target: str, info: ModelInfo, device: str = "auto") -> MedusaHeads:
    """Load heads for the target in `target`, a directory or GGUF file; `info` describes it. On a CPU they compute in float32, else in
    bfloat16. Raises ConfigError for what is no heads, and for those of another hidden size or vocabulary."""
    directory = Path(heads)
    if not directory.is_dir():
        raise ConfigError(f"there is no directory {heads} of Medusa heads; they must lie on this machine")
    shape = medusa_form.heads_shape(directory)
    tensors = _read(directory, shape)
    _check_fit(directory, shape, tensors, Path(target), info)
    place = pick_device(device)
    dtype = torch.float32 if place.type == "cpu" else torch.bfloat16
    values = {name: _value(name, tensors).to(place, dtype) for name in tensors if not _is_about(name)}
    token_ids = _token_ids(tensors)
    return MedusaHeads(_blocks(shape, values), _output(shape, values, token_ids, Path(target), place, dtype), token_ids)


def _is_about(name: str) -> bool:
    """Return whether a tensor says how to read others."""
    return name == draft_form.TOKEN_IDS or name.endswith(draft_form.SCALE)


def _read(directory: Path, shape: medusa_form.HeadsShape) -> _Tensors:
    """Read the file of weights; it must have exactly the tensors that `shape` asks for."""
    path = next((directory / name for name in medusa_form.WEIGHTS if (directory / name).is_file()), None)
    if path is None:
        raise ConfigError(f"{directory} has neither {' nor '.join(medusa_form.WEIGHTS)}, which hold Medusa heads")
    try:
        is_safe = path.suffix == ".safetensors"
        tensors: _Tensors = load_file(path) if is_safe else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle raises whatever its bytes lead to
        raise ConfigError(f"{path} cannot be read; it may have been cut off: {error}") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise ConfigError(f"{path} holds no tensors by name")
    forms = {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()}
    if reason := medusa_form.reason_against(shape, forms):
        raise ConfigError(f"{path} does not fit its config.json: {reason}")
    broken = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if broken:
        raise ConfigError(f"{path} has values that are not finite, in {broken[0]}")
    return tensors


def _check_fit(
    directory: Path, shape: medusa_form.HeadsShape, tensors: _Tensors, target: Path, info: ModelInfo
) -> None:
    """Raise ConfigError for heads of another hidden size or vocabulary."""
    said = read_json(target, "config.json")
    wanted = said.get("word_embed_proj_dim") or said["hidden_size"]  # the former: what OPT's output matrix reads
    hidden = tensors[medusa_form.block_names(0, 0)[0]].shape[1]
    if hidden != wanted:
        raise ConfigError(
            f"{directory}: these heads take hidden states of size {hidden}; those of {info.name} have {wanted}"
        )
    if shape.tokenizer_hash and (shape.num_tokens, shape.tokenizer_hash) != (info.num_tokens, info.tokenizer_hash):
        raise ConfigError(
            f"{directory}: these heads were trained for another tokenizer ({shape.num_tokens} tokens, {shape.tokenizer_hash[:12]}..) "
            f"than that of {info.name} ({info.num_tokens}, {info.tokenizer_hash[:12]}..)"
        )
    ids, output = _token_ids(tensors), tensors.get(medusa_form.output_name(shape, 0))
    if ids is not None:
        if not len(ids) or ids[0] < 0 or ids[-1] >= info.num_tokens or np.any(ids[1:] <= ids[:-1]):
            raise ConfigError(
                f"{directory}: {draft_form.TOKEN_IDS} must ascend within the vocabulary, 0 to {info.num_tokens - 1}"
            )
    elif output is not None and not info.num_tokens <= len(output) <= info.vocab_size:
        raise ConfigError(
            f"{directory}: these heads speak of {len(output)} tokens; {info.name} has {info.num_tokens}, in a matrix of "
            f"{info.vocab_size} rows"
        )


def _token_ids(tensors: _Tensors) -> Int32Array | None:
    found = tensors.get(draft_form.TOKEN_IDS)
    return None if found is None else found.numpy()


def _value(name: str, tensors: _Tensors) -> torch.Tensor:
    """Return a tensor's values; those in 8 bits rounded to bfloat16, so that they are the same everywhere."""
    scale = tensors.get(name + draft_form.SCALE)
    return tensors[name] if scale is None else (tensors[name].float() * scale[:, None]).bfloat16()


def _blocks(shape: medusa_form.HeadsShape, values: _Tensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
    blocks = []
    for layer in range(shape.medusa_num_layers):
        names = [medusa_form.block_names(head, layer) for head in range(shape.medusa_num_heads)]
        weights, biases = (torch.stack([values[name] for name in of_all]) for of_all in zip(*names, strict=True))
        blocks.append((weights, biases[:, None]))
    return blocks


def _output(
    shape: medusa_form.HeadsShape,
    values: _Tensors,
    token_ids: Int32Array | None,
    target: Path,
    device: torch.device,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the heads' own matrices [K, columns, hidden], or the rows of the target's that are wanted [columns, hidden]."""
    names = [medusa_form.output_name(shape, head) for head in range(shape.medusa_num_heads)]
    if names[0] in values:
        return torch.stack([values[name] for name in names])
    rows = output_matrix(target)
    return (rows if token_ids is None else rows[torch.from_numpy(token_ids).long()]).to(device, dtype)


def output_matrix(checkpoint: Path) -> torch.Tensor:
    """Return a checkpoint's output matrix [vocab, hidden], without the rest of it; ConfigError if it is not found."""
    if is_gguf(checkpoint):
        file = read_gguf(checkpoint)
        name = next(name for name in GGUF_OUTPUTS if name in file.tensors)
        return torch.tensor(gguf_tensors.dequantise(file, file.tensors[name]))
    index = checkpoint / "model.safetensors.index.json"
    of_file: dict[str, Any] = json.loads(index.read_text("utf-8"))["weight_map"] if index.is_file() else {}
    for name in OUTPUTS:
        path = checkpoint / of_file.get(name, "model.safetensors")
        if path.is_file() and (found := _tensor(path, name)) is not None:
            return found
    raise ConfigError(
        f"{checkpoint} has no {', '.join(OUTPUTS)} in safetensors; heads that share the target's output matrix need it"
    )


def _tensor(path: Path, name: str) -> torch.Tensor | None:
    with safe_open(path, framework="pt") as file:
        found: torch.Tensor | None = file.get_tensor(name) if name in file.keys() else None  # noqa: SIM118 - no mapping
    return found
