"""A GGUF file -> a transformers model in memory.

The reference for such a model is arithmetic on exactly the values in memory. These are the dequantised values in
float32, or rounded to another format. `values_format` chooses the format. It is part of the fingerprint, so the two
formats are two models.

On a CPU the default is to keep the exact values, if the compiled forward supports all block types. It then reads the
file's own blocks. For Q4_1 these take a third of the bytes of bfloat16. On other devices, and for other types, the
default is to round to bfloat16. This takes half the bytes of float32. A CPU then still computes in float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specq.checkpoints import gguf_config, gguf_tensors, read_gguf
from specq.engines.native.weights import BLOCK_TYPES, BlockWeight
from specq.protocol import ConfigError

EXACT, ROUNDED = "float32", "bfloat16"


def values_format(path: Path, dtype: str, device: torch.device) -> str:
    """Return the format that a file's values are rounded to, for the `dtype` of `load`. EXACT keeps them all."""
    if dtype != "auto":
        return dtype
    reads_blocks = device.type == "cpu" and gguf_tensors.has_only(read_gguf(path), BLOCK_TYPES)
    return EXACT if reads_blocks else ROUNDED


def load_gguf(path: Path, device: torch.device, dtype: torch.dtype, values: torch.dtype) -> Any:
    """Load a file's model; it computes in `dtype` with the file's numbers rounded to `values`.

    Raises ConfigError if something is missing or not supported.
    """
    file = read_gguf(path)
    said = gguf_config.model_config(file)
    network = _empty(path, said, dtype)
    state = {}
    for name, numbers in gguf_tensors.tensors(file, said):
        state[name] = torch.tensor(numbers).to(device, values).to(dtype)
    _check(path, network, state)
    network.load_state_dict(state, strict=False, assign=True)
    network.tie_weights()
    add_rope(network, gguf_tensors.rope_factors(file), device)
    return network


def _empty(path: Path, said: dict[str, Any], dtype: torch.dtype) -> Any:
    """Return the model of a `config.json` without values."""
    try:
        config = AutoConfig.for_model(**said)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    except Exception as error:  # transformers has no error type of its own for unsupported configurations
        raise ConfigError(f"{path} describes a model that transformers cannot create: {error}") from error


def load_blocks(path: Path) -> dict[str, BlockWeight]:
    """Return by name the linear weights that the kernels read in the file's blocks."""
    file = read_gguf(path)
    found = gguf_tensors.blocks(file, gguf_config.model_config(file), BLOCK_TYPES)
    return {name: BlockWeight(kind, np.array(rows)) for name, kind, rows in found}


def _check(path: Path, network: Any, state: dict[str, torch.Tensor]) -> None:
    """Raise ConfigError unless these are exactly the model's tensors, in its shapes."""
    needed = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    if network.config.tie_word_embeddings:
        needed.pop("lm_head.weight", None)
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    wrong = sorted(name for name in needed.keys() | found.keys() if needed.get(name) != found.get(name))
    if wrong:
        name = wrong[0]
        raise ConfigError(
            f"{path} does not fit its own metadata: {name} has the shape {found.get(name, 'of no tensor')}, and "
            f"should have {needed.get(name, 'none')} ({len(wrong)} tensors are wrong or missing)"
        )


def add_rope(network: Any, factors: Any, device: torch.device) -> None:
    """Make the rotary frequencies, which no file holds. Some files have factors that divide them."""
    rope = type(network.model.rotary_emb)(config=network.config).to(device)
    if factors is not None:
        if rope.inv_freq.shape != factors.shape:
            raise ConfigError(f"rope_freqs.weight has {factors.size} values; {rope.inv_freq.numel()} are needed")
        rope.inv_freq = rope.inv_freq / torch.tensor(factors, device=device)
    network.model.rotary_emb = rope
