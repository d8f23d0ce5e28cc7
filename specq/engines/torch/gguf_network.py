"""A GGUF file -> a transformers model in memory, for devices and sizes that the compiled kernels do not take.

For the formats that its values are rounded to see `specq.engines.native.gguf`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specq.checkpoints import gguf_config, gguf_tensors, read_gguf
from specq.engines.native.gguf import check_shapes
from specq.protocol import ConfigError


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
    needed = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    if network.config.tie_word_embeddings:
        needed.pop("lm_head.weight", None)
    check_shapes(path, needed, {name: tuple(tensor.shape) for name, tensor in state.items()})
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


def add_rope(network: Any, factors: Any, device: torch.device) -> None:
    """Make the rotary frequencies, which no file holds. Some files have factors that divide them."""
    rope = type(network.model.rotary_emb)(config=network.config).to(device)
    if factors is not None:
        if rope.inv_freq.shape != factors.shape:
            raise ConfigError(f"rope_freqs.weight has {factors.size} values; {rope.inv_freq.numel()} are needed")
        rope.inv_freq = rope.inv_freq / torch.tensor(factors, device=device)
    network.model.rotary_emb = rope
