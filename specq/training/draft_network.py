"""The network that `specq train draft` trains: a transformers Llama with a factorised embedding and a reduced head.

Its parameters have the names of `specq.checkpoints.draft_form`, the form in which `save_draft` writes it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from specq.checkpoints import draft_form
from specq.protocol import Int32Array

EMBEDDING_STD, HEAD_STD, LAYER_STD = 1.0, 0.02, 0.02


class FactorisedEmbedding(nn.Module):
    """Rows of `weight` [vocab, rank], lifted by `lift` [hidden, rank].

    With `masks` [any, hidden], token ids from vocab on read these.
    """

    def __init__(self, weight: torch.Tensor, lift: torch.Tensor, masks: torch.Tensor | None = None) -> None:
        super().__init__()
        self.weight, self.lift = nn.Parameter(weight), nn.Parameter(lift)
        self.masks = None if masks is None else nn.Parameter(masks)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        vocab = len(self.weight)
        words = functional.linear(functional.embedding(token_ids.clamp(max=vocab - 1), self.weight), self.lift)
        if self.masks is None:
            return words
        masks = functional.embedding((token_ids - vocab).clamp(min=0), self.masks)
        return torch.where((token_ids >= vocab)[..., None], masks.to(words.dtype), words)


def build_draft(shape: draft_form.DraftModelShape, target: Any, token_ids: Int32Array) -> LlamaForCausalLM:
    """Return a fresh draft on the target's device, in float32.

    Embedding and head begin as the target's embedding on its leading principal directions.
    """
    body = shape.llama_config() | {"vocab_size": 8}  # size of the embedding and head to be replaced
    network = LlamaForCausalLM(LlamaConfig(**body, initializer_range=LAYER_STD))
    _shrink(network, shape.num_hidden_layers)
    nn.Module.to(network, target.device)
    low = principal(target.get_input_embeddings().weight, shape.hidden_size)  # [vocab, hidden]
    first = low[:, : shape.embedding_rank]
    lift = torch.randn(shape.hidden_size, shape.embedding_rank, device=low.device) * shape.embedding_rank**-0.5
    network.model.embed_tokens = FactorisedEmbedding(first * (EMBEDDING_STD / first.std()), lift)
    head = low[torch.from_numpy(token_ids).to(low.device)]
    network.lm_head = nn.Linear(shape.hidden_size, shape.head_size, bias=False, device=low.device)
    network.lm_head.weight = nn.Parameter(head * (HEAD_STD / head.std()))
    return network


def _shrink(network: LlamaForCausalLM, num_layers: int) -> None:
    """Let the layers begin with small outputs: the more layers, the smaller each output."""
    with torch.no_grad():
        for layer in network.model.layers:
            layer.self_attn.o_proj.weight.mul_((2 * num_layers) ** -0.5)
            layer.mlp.down_proj.weight.mul_((2 * num_layers) ** -0.5)


@torch.no_grad()
def principal(embeddings: torch.Tensor, width: int) -> torch.Tensor:
    """Return embeddings [vocab, size] in their leading principal directions, f32[vocab, width], padded with zeros."""
    embeddings = embeddings.float()
    directions = torch.linalg.svd(embeddings, full_matrices=False).Vh[:width]
    return functional.pad(embeddings @ directions.T, (0, width - len(directions)))


def save_draft(network: LlamaForCausalLM, shape: draft_form.DraftModelShape, token_ids: Int32Array, out: Path) -> None:
    """Write a network in 8 bits, in the form of `specq.checkpoints.draft_form`."""
    tensors = {} if shape.shared else {draft_form.TOKEN_IDS: torch.from_numpy(token_ids)}
    matrices = draft_form.matrix_shapes(shape)
    for name, parameter in network.named_parameters():
        if shape.shared and draft_form.is_shared(name):
            continue
        tensors[name] = parameter.detach().float().cpu().contiguous()
        if name in matrices:
            values, scales = draft_form.to_int8(tensors[name].numpy())
            tensors[name], tensors[name + draft_form.SCALE] = torch.from_numpy(values), torch.from_numpy(scales)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / draft_form.WEIGHTS)
    (out / "config.json").write_text(json.dumps(shape.config(), indent=2) + "\n", encoding="utf-8")
