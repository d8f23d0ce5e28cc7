"""The compiled CPU forward (`specq.engines.native`) for transformers models."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from specq.engines.native import ALONE, BlockWeight, HostForward, NativeWeights, Threads
from specq.engines.native.decoder import ARCHITECTURES, NamedWeights, decoder, reason_against
from specq.engines.native.rotary import MAX_ROPE_POSITIONS, rotary_tables
from specq.engines.torch.rotary import has_tables
from specq.protocol import Float32Array

NO_BLOCKS: Mapping[str, BlockWeight] = MappingProxyType({})


def host_forward(
    model: Any,
    num_slots: int,
    library: ctypes.CDLL,
    threads: Threads = ALONE,
    blocks: Mapping[str, BlockWeight] = NO_BLOCKS,
) -> HostForward:
    """Return a forward for a model; see `supports` for the models that it takes.

    `blocks`: as in `NamedWeights`.
    """
    return HostForward(decoder_weights(model, num_slots, blocks), num_slots, library, threads)


def supports(model: Any) -> bool:
    """Return whether the kernels can run this model: Llama's layers, CPU, float32, supported sizes."""
    if model.config.model_type not in ARCHITECTURES or model.dtype != torch.float32 or model.device.type != "cpu":
        return False
    return not reason_against(model.config.to_dict(), _head_dim(model)) and has_tables(model.model)


def _head_dim(model: Any) -> int:
    return int(model.model.layers[0].self_attn.head_dim)


def decoder_weights(model: Any, num_slots: int, blocks: Mapping[str, BlockWeight]) -> NativeWeights:
    """Return a transformers model's weights. Float32 weights are not copied."""
    parameters = dict(model.named_parameters())
    rotary = model.model.rotary_emb
    length = min(model.config.max_position_embeddings, num_slots, MAX_ROPE_POSITIONS)
    tables = rotary_tables(_array(rotary.inv_freq), length, rotary.attention_scaling)
    named = NamedWeights(parameters, lambda name: _array(parameters[name]), blocks)
    return decoder(model.config.to_dict(), _head_dim(model), named, tables)


def _array(tensor: torch.Tensor) -> Float32Array:
    found: Float32Array = tensor.detach().to(torch.float32).contiguous().numpy()
    return found
