"""A draft model in the form of `specq.checkpoints.draft_form` -> a transformers Llama with a smaller head.

For its tokens and masks see `specq.engines.native.draft_weights`. `LoadedModel` passes them on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specq.checkpoints import draft_form
from specq.engines.native.draft_weights import draft_values, read_draft
from specq.engines.torch.gguf_network import add_rope
from specq.protocol import Int32Array


class SubsetHead(torch.nn.Linear):
    """An output head over a part of the vocabulary; `token_ids` i32[rows], ascending."""

    def __init__(self, hidden_size: int, token_ids: Int32Array) -> None:
        super().__init__(hidden_size, len(token_ids), bias=False, device="meta")
        self.token_ids = token_ids


def load_draft(directory: Path, shape: draft_form.DraftModelShape, device: torch.device, dtype: torch.dtype) -> Any:
    """Load the model; it computes in `dtype`. Raises ConfigError for weights that do not fit `shape`."""
    tensors = read_draft(directory, shape)
    token_ids = tensors[draft_form.TOKEN_IDS]
    num_masks = shape.num_places - 1
    with torch.device("meta"):
        sizes = shape.llama_config() | {"vocab_size": shape.vocab_size + num_masks}
        config = AutoConfig.for_model("llama", **sizes)
        network: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    network.lm_head = SubsetHead(shape.hidden_size, token_ids)
    network.num_masks = num_masks
    values = draft_values(tensors, shape)
    state = {name: torch.from_numpy(own).to(device, dtype) for name, own in values.items()}
    network.load_state_dict(state, assign=True)
    add_rope(network, None, device)
    return network.train(mode=False)
