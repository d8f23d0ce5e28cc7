"""Load Medusa heads in the form of `specq.drafting.medusa.form` as matrices from hidden states to logits.

Rule: heads that do not fit their target are refused here, before they draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from specq.checkpoints import draft_form, read_json
from specq.drafting.head_files import Tensors, output_matrix, read_tensors
from specq.drafting.medusa import form as medusa_form
from specq.engines.torch import pick_device
from specq.protocol import ConfigError, Int32Array, ModelInfo


@dataclass(frozen=True, eq=False)
class MedusaHeads:
    """K heads.

    blocks     (weights [K, hidden, hidden], biases [K, 1, hidden]) of each residual block.
    output     [columns, hidden] for all heads, or [K, columns, hidden].
    token_ids  i32[columns]: the token of each column, ascending. None: column i is token i.
    """

    blocks: list[tuple[torch.Tensor, torch.Tensor]]
    output: torch.Tensor
    token_ids: Int32Array | None

    @property
    def num_heads(self) -> int:
        return len(self.blocks[0][0])

    @torch.no_grad()
    def rows(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits [K, n, columns] from hidden states [n, hidden], in the heads' number format."""
        x = states.to(self.output.dtype).expand(self.num_heads, -1, -1)  # [K, n, hidden]
        for weights, biases in self.blocks:
            x = x + functional.silu(torch.baddbmm(biases, x, weights.mT))
        if self.output.ndim == 3:
            return torch.bmm(x, self.output.mT)
        return functional.linear(x.reshape(-1, x.shape[-1]), self.output).view(*x.shape[:2], -1)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits f32[n, K, columns] from hidden states [n, hidden]."""
        return self.rows(states).transpose(0, 1).float()


def load_heads(heads: str, target: str, info: ModelInfo, device: str = "auto") -> MedusaHeads:
    """Load heads for the target in `target`, a directory or GGUF file; `info` describes the target.

    On a CPU they compute in float32, else in bfloat16. Raises ConfigError if the files are not Medusa heads, are for
    another hidden size or vocabulary, or were trained together with another target.
    """
    directory = Path(heads)
    if not directory.is_dir():
        raise ConfigError(f"the directory {heads} of Medusa heads does not exist; it must be on this machine")
    shape = medusa_form.heads_shape(directory)
    tensors = read_tensors(directory, medusa_form.WEIGHTS, partial(medusa_form.reason_against, shape), "Medusa heads")
    _check_fit(directory, shape, tensors, Path(target), info)
    place = pick_device(device)
    dtype = torch.float32 if place.type == "cpu" else torch.bfloat16
    values = {name: tensor_value(name, tensors).to(place, dtype) for name in tensors if not _is_about(name)}
    token_ids = _token_ids(tensors)
    return MedusaHeads(_blocks(shape, values), _output(shape, values, token_ids, Path(target), place, dtype), token_ids)


def _is_about(name: str) -> bool:
    """Return whether a tensor describes how to read others."""
    return name == draft_form.TOKEN_IDS or name.endswith(draft_form.SCALE)


def _check_fit(directory: Path, shape: medusa_form.HeadsShape, tensors: Tensors, target: Path, info: ModelInfo) -> None:
    """Raise ConfigError for heads of another hidden size or vocabulary."""
    said = read_json(target, "config.json")
    wanted = said.get("word_embed_proj_dim") or said["hidden_size"]  # the former: input size of OPT's output matrix
    hidden = tensors[medusa_form.block_names(0, 0)[0]].shape[1]
    if hidden != wanted:
        raise ConfigError(
            f"{directory}: these heads take hidden states of size {hidden}; those of {info.name} have {wanted}"
        )
    if shape.tokenizer_hash and (shape.num_tokens, shape.tokenizer_hash) != (info.num_tokens, info.tokenizer_hash):
        raise ConfigError(
            f"{directory}: these heads were trained for another tokenizer ({shape.num_tokens} tokens, "
            f"{shape.tokenizer_hash[:12]}..) than that of {info.name} ({info.num_tokens}, "
            f"{info.tokenizer_hash[:12]}..)"
        )
    known = ("", info.fingerprint, info.former_fingerprint)
    if info.fingerprint and shape.target_fingerprint not in known:
        raise ConfigError(
            f"{directory}: these heads were trained together with another target (fingerprint "
            f"{shape.target_fingerprint[:12]}..) than {info.name} ({info.fingerprint[:12]}..); serve that target"
        )
    ids, output = _token_ids(tensors), tensors.get(medusa_form.output_name(shape, 0))
    if ids is not None:
        if not len(ids) or ids[0] < 0 or ids[-1] >= info.num_tokens or np.any(ids[1:] <= ids[:-1]):
            raise ConfigError(
                f"{directory}: {draft_form.TOKEN_IDS} must ascend within the vocabulary, 0 to {info.num_tokens - 1}"
            )
    elif output is not None and not info.num_tokens <= len(output) <= info.vocab_size:
        raise ConfigError(
            f"{directory}: these heads output {len(output)} tokens; {info.name} has {info.num_tokens}, in a matrix "
            f"of {info.vocab_size} rows"
        )


def _token_ids(tensors: Tensors) -> Int32Array | None:
    found = tensors.get(draft_form.TOKEN_IDS)
    return None if found is None else found.numpy()


def tensor_value(name: str, tensors: Tensors) -> torch.Tensor:
    """Return a tensor's values; 8-bit values are rounded to bfloat16, to be the same everywhere."""
    scale = tensors.get(name + draft_form.SCALE)
    return tensors[name] if scale is None else (tensors[name].float() * scale[:, None]).bfloat16()


def _blocks(shape: medusa_form.HeadsShape, values: Tensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
    blocks = []
    for layer in range(shape.medusa_num_layers):
        names = [medusa_form.block_names(head, layer) for head in range(shape.medusa_num_heads)]
        weights, biases = (torch.stack([values[name] for name in of_all]) for of_all in zip(*names, strict=True))
        blocks.append((weights, biases[:, None]))
    return blocks


def _output(
    shape: medusa_form.HeadsShape,
    values: Tensors,
    token_ids: Int32Array | None,
    target: Path,
    device: torch.device,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the heads' matrices [K, columns, hidden], or needed rows of the target's [columns, hidden]."""
    names = [medusa_form.output_name(shape, head) for head in range(shape.medusa_num_heads)]
    if names[0] in values:
        return torch.stack([values[name] for name in names])
    rows = output_matrix(target)
    return (rows if token_ids is None else rows[torch.from_numpy(token_ids).long()]).to(device, dtype)
