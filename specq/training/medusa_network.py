"""The heads that `specq train medusa` trains. Their parameters have the names of `specq.drafting.medusa.form`, in which
`save_heads` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from specq.checkpoints import draft_form
from specq.drafting.medusa import form as medusa_form
from specq.protocol import Int32Array


class ResidualBlock(nn.Module):
    """x + silu(W x + b); it begins as the identity, so that the head begins as the target's own."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.silu(self.linear(x))


class HeadsNetwork(nn.ModuleList):
    """Heads over hidden states; those with outputs of their own begin with the target's, `output` [columns, hidden]."""

    def __init__(self, num_heads: int, num_layers: int, output: torch.Tensor, *, own_output: bool) -> None:
        heads = [nn.Sequential(*(ResidualBlock(output.shape[1]) for _ in range(num_layers))) for _ in range(num_heads)]
        if own_output:
            for head in heads:
                head.append(nn.Linear(output.shape[1], output.shape[0], bias=False))
                head[-1].weight = nn.Parameter(output.detach().float().clone())
        super().__init__(heads)
        self._num_layers, self._shared = num_layers, output.detach()
        nn.Module.to(self, output.device)

    def logits(self, head: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return [n, columns]: what a head says of hidden states [n, hidden]."""
        of_head = cast("nn.Sequential", self[head])
        found: torch.Tensor = of_head(hidden)
        return found if len(of_head) > self._num_layers else functional.linear(found, self._shared.to(found.dtype))


def save_heads(network: HeadsNetwork, shape: medusa_form.HeadsShape, token_ids: Int32Array, out: Path) -> None:
    """Write heads, their matrices in 8 bits; the file is there only when it is whole."""
    tensors = {draft_form.TOKEN_IDS: torch.from_numpy(token_ids)}
    for name, parameter in network.named_parameters():
        tensors[name] = parameter.detach().float().cpu().contiguous()
        if parameter.ndim == 2:
            values, scales = draft_form.to_int8(tensors[name].numpy())
            tensors[name], tensors[name + draft_form.SCALE] = torch.from_numpy(values), torch.from_numpy(scales)
    out.mkdir(parents=True, exist_ok=True)
    path = out / medusa_form.WEIGHTS[0]
    unfinished = path.with_name(path.name + ".part")
    save_file(tensors, unfinished)
    unfinished.replace(path)
    (out / "config.json").write_text(json.dumps(shape.config(), indent=2) + "\n", encoding="utf-8")
