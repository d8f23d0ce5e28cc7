"""Random MTP layers inside checkpoints, in the three published layouts, and their logits by plain arithmetic.

The arithmetic follows the names of each layout, as vLLM's models of DeepSeek, Qwen3-Next and MiMo read them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from specq.drafting.eagle3 import form as eagle_form
from specq.drafting.head_config import HeadConfig
from specq.drafting.head_files import input_matrix, output_matrix
from specq.testing.checkpoints_eagle import WEIGHTS, Past, Values, normed, of_layer, plain_layer


@dataclass(frozen=True)
class MtpLayout:
    """A layout: how names begin ({}: the number of the target's layers), and names of norms and of the matrix.

    layer: how the names of the decoder layer begin behind that.
    """

    prefix: str
    embedding_norm: str
    state_norm: str
    both: str
    last_norm: str
    layer: str = ""


DEEPSEEK = MtpLayout("model.layers.{}.", "enorm", "hnorm", "eh_proj", "shared_head.norm")
QWEN = MtpLayout("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0.")
MIMO = MtpLayout("model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")


def add_mtp(target: Path, layout: MtpLayout, *, has_matrices: bool = False, seed: int = 5, scale: float = 0.3) -> Path:
    """Add a random MTP layer to a checkpoint, with the decoder layer of its own kind.

    has_matrices: it has an embedding and an output matrix of its own, as DeepSeek-V3's.
    """
    random, tensors = torch.Generator().manual_seed(seed), load_file(target / WEIGHTS)
    hidden = tensors["model.norm.weight"].shape[0]
    found = {f"{layout.layer}{name}": one.shape for name, one in of_layer(tensors, "model.layers.0.").items()}
    norms = (layout.embedding_norm, layout.state_norm, layout.last_norm)
    found |= {f"{name}.weight": torch.Size([hidden]) for name in norms}
    found[f"{layout.both}.weight"] = torch.Size([hidden, 2 * hidden])
    if has_matrices:
        shape = input_matrix(target).shape
        found |= {"embed_tokens.weight": shape, "shared_head.head.weight": shape}
    config = target / "config.json"
    said = json.loads(config.read_text())
    prefix = layout.prefix.format(said["num_hidden_layers"])
    made = {prefix + name: torch.randn(*size, generator=random) * scale for name, size in found.items()}
    save_file(tensors | made, target / WEIGHTS, metadata={"format": "pt"})
    config.write_text(json.dumps(said | {"num_nextn_predict_layers": 1}))
    return target


@torch.inference_mode()
def mtp_logits(
    target: Path, layout: MtpLayout, states: torch.Tensor, token_ids: Sequence[int], first: int = 1
) -> torch.Tensor:
    """Return f32[len(token_ids), vocab]: an MTP layer's logits after each of some tokens.

    The first token is at position `first` of its text. states f32[n, hidden] are the target's before the first n
    tokens. The other tokens use the layer's own.
    """
    tensors, said = load_file(target / WEIGHTS), json.loads((target / "config.json").read_text())
    values = of_layer(tensors, layout.prefix.format(said["num_hidden_layers"]))
    layer, shape = of_layer(values, layout.layer), _shape(target, said)
    embedding = values.get("embed_tokens.weight", input_matrix(target).float())
    output = values.get("shared_head.head.weight", output_matrix(target).float())
    past: Past = ([], [])
    found = list[torch.Tensor]()
    for i, token in enumerate(token_ids):
        state, embedded, position = states[i] if i < len(states) else found[-1], embedding[token], first - 1 + i
        if layout is not QWEN and position == 0:
            embedded = torch.zeros_like(embedded)
        x = _joined(values, layout, shape, embedded, state)
        x = plain_layer(layer, shape, x, position, past)
        found.append(normed(x, values[f"{layout.last_norm}.weight"], shape))
    return torch.stack(found) @ output.T


def _joined(
    values: Values, layout: MtpLayout, shape: eagle_form.EagleShape, embedded: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    both = [
        normed(embedded, values[f"{layout.embedding_norm}.weight"], shape),
        normed(state, values[f"{layout.state_norm}.weight"], shape),
    ]
    return values[f"{layout.both}.weight"] @ torch.cat(both[::-1] if layout is MIMO else both)


def _shape(target: Path, said: dict[str, Any]) -> eagle_form.EagleShape:
    common = HeadConfig(target, said, eagle_form.MTP_KIND).common()
    return eagle_form.EagleShape(**common, draft_vocab_size=common["vocab_size"], is_mtp=True)
