"""A GGUF file -> its description and its forward in integer arithmetic. No transformers model is made."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from specq.checkpoints import is_gguf, read_config
from specq.engines.checkpoint import describe
from specq.engines.native import INTEGER, Threads, integer_weights, kernels
from specq.engines.torch.forward import KvStore
from specq.engines.torch.native import IntegerTorchForward
from specq.protocol import ConfigError, ModelInfo

DEFAULT_SLOTS = 64 * 1024  # used if memory is not the limit
CPU_KV_BYTES = 1 << 30
FLOAT_BYTES = 4


def slots_on_cpu(slot_bytes: int) -> int:
    """Return the default number of KV slots, for the bytes of keys and values of one."""
    return max(min(DEFAULT_SLOTS, CPU_KV_BYTES // slot_bytes), 1024)


def load_integer(path: Path, kv_slots: int, name: str, threads: Threads) -> tuple[ModelInfo, IntegerTorchForward]:
    """Load a file; arguments as for `specq.engines.torch.load`. Raises ConfigError for another model."""
    library = kernels(INTEGER)
    if not is_gguf(path) or library is None:
        raise ConfigError(f"arithmetic is integer, which needs a GGUF file and a C compiler; {path} is loaded by exact")
    said = read_config(path)
    shape = said["num_hidden_layers"], said["num_key_value_heads"], said["head_dim"]
    slots = kv_slots or slots_on_cpu(2 * FLOAT_BYTES * math.prod(shape))
    keys, values = (torch.empty(*shape[:2], slots, shape[2]) for _ in range(2))
    weights, tensors = integer_weights(path, library, slots)
    info = describe(
        path,
        engine="torch",
        arithmetic=f"{IntegerTorchForward.ARITHMETIC} cpu",
        name=name,
        dtype="float32",
        vocab_size=said["vocab_size"],
        max_length=said["max_position_embeddings"],
        kv_slots=slots,
        overrides={"gguf_values": "float32"},
        tensors=tensors,
    )
    return info, IntegerTorchForward(weights, KvStore(keys, values), library, threads)
