"""An EAGLE-3 head in training: its initial values, its training-time test, and its files.

The sizes of a target's hidden states differ greatly. Behind the middle layers of a small model some channels are a
hundred times larger than others, and all channels of the first token are. So a head in training reads each channel
divided by its usual size (`channel_scales`). When the head is written, its first matrix absorbs these factors. The
head's layer adds to the normalised state (`EagleShape.norm_before_residual`), because its output would be lost beside
such large values.

In the training-time test (Li et al. 2025, arXiv 2503.01840, section 3.2) a row meets its own errors, as in drafting.
After the pass over a text with the target's states, each row continues alone with the tokens of the text and its own
states. In step j it attends to the same rows as in step 0, and to its own rows of the steps since.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from specq.drafting.eagle3 import form as eagle_form
from specq.drafting.eagle3.loading import EagleHead
from specq.drafting.eagle3.network import EagleNetwork
from specq.protocol import ConfigError, Int32Array

INITIAL_STD = 0.02
LEAST_SCALE = 1e-3
MAY_DIFFER = ("max_position_embeddings",)  # values that may differ in a head to start from


def build_eagle(shape: eagle_form.EagleShape, target: Any, token_ids: Int32Array) -> EagleNetwork:
    """Return a head that begins with the target's final norm and output matrix; its layer adds nothing yet."""
    network = EagleNetwork(shape, target.get_input_embeddings().weight.detach())
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=INITIAL_STD)
        for silent in (network.midlayer.self_attn.o_proj, network.midlayer.mlp.down_proj):
            nn.init.zeros_(silent.weight)
        network.norm.weight.copy_(target.model.norm.weight)
        network.lm_head.weight.copy_(target.lm_head.weight[torch.from_numpy(token_ids).long().to(target.device)])
    nn.Module.to(network, target.device)
    return network


def start_eagle(network: EagleNetwork, head: EagleHead, scales: torch.Tensor, path: Path) -> None:
    """Give a network the values of an earlier head, from `path`; its states will be divided by `scales`.

    Raises ConfigError for a head of another shape.
    """
    shape, found = network.shape, replace(head.network.shape, layers=head.layers)
    wrong = [name for name, value in asdict(shape).items() if name not in MAY_DIFFER and getattr(found, name) != value]
    if wrong:
        raise ConfigError(
            f"{path} is a head of another shape: {wrong[0]} is {getattr(found, wrong[0])}, and of the head to be "
            f"trained {getattr(shape, wrong[0])}"
        )
    state = head.network.float().state_dict()
    network.load_state_dict(state | {"fc.weight": state["fc.weight"] * scales})


def channel_scales(taps: torch.Tensor) -> torch.Tensor:
    """Return f32[width]: the root mean square of each channel of hidden states [n, width]."""
    return taps.float().square().mean(0).sqrt().clamp(min=LEAST_SCALE)


def trained_states(
    network: EagleNetwork, taps: torch.Tensor, token_ids: torch.Tensor, num_steps: int
) -> Iterator[torch.Tensor]:
    """Yield the states [rows, length, hidden] of each step.

    Row t of step j has read the tokens up to t + 1 + j, and predicts the next one. States after a text's end are
    meaningless.

    taps        [rows, length, width]: the target's hidden states.
    token_ids   i64[rows, length].
    """
    length = token_ids.shape[1]
    attention = _OwnSteps(length, token_ids.device)
    positions = torch.arange(length, device=token_ids.device).expand_as(token_ids)
    states = network.project(taps)
    for step in range(num_steps):
        read = functional.pad(token_ids[:, 1 + step :], (0, min(1 + step, length)))[:, :length]
        states = network(states, read, network.rotations(positions + step, states.dtype), attention)
        yield states


class _OwnSteps:
    """Attention of one step after the other.

    A row attends to the first step's rows up to its own, and to its own rows of the later steps.
    """

    def __init__(self, length: int, device: torch.device) -> None:
        self._hidden = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
        self._steps: list[tuple[torch.Tensor, torch.Tensor]] = []  # keys and values [b, heads, length, dim]

    def __call__(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        group = queries.shape[2] // keys.shape[2]
        queries = queries.transpose(1, 2) * queries.shape[-1] ** -0.5  # [b, heads, length, dim]
        self._steps.append(
            (keys.transpose(1, 2).repeat_interleave(group, 1), values.transpose(1, 2).repeat_interleave(group, 1))
        )
        (first_keys, first_values), *own = self._steps
        if not own:
            found = functional.scaled_dot_product_attention(
                queries, first_keys, first_values, is_causal=True, scale=1.0
            )
            return found.transpose(1, 2)
        before = (queries @ first_keys.mT).masked_fill(self._hidden, -torch.inf)  # [b, heads, length, length]
        since = torch.stack([(queries * own_keys).sum(-1) for own_keys, _ in own], -1)  # [b, heads, length, steps]
        with torch.autocast(before.device.type, enabled=False):  # it would copy all values to float32 first
            shares = torch.cat([before, since.to(before.dtype)], -1).softmax(-1)
        found = shares[..., : before.shape[-1]] @ first_values
        for i, (_, own_values) in enumerate(own):
            found = found + shares[..., before.shape[-1] + i, None] * own_values
        return found.transpose(1, 2)


def save_eagle(
    network: EagleNetwork, shape: eagle_form.EagleShape, token_ids: Int32Array, scales: torch.Tensor, out: Path
) -> None:
    """Write a head in bfloat16, without the target's embedding; the file appears only when it is complete.

    The head has read the target's hidden states divided by `scales`.
    """
    values = {name: value.detach() for name, value in network.state_dict().items()}
    values["fc.weight"] = values["fc.weight"] / scales
    tensors = {name: value.bfloat16().cpu().contiguous() for name, value in values.items()}
    ids = torch.from_numpy(token_ids).long()
    tensors[eagle_form.TO_TARGET] = ids - torch.arange(len(ids))
    tensors[eagle_form.FROM_TARGET] = torch.zeros(shape.vocab_size, dtype=torch.bool).index_fill(0, ids, value=True)
    out.mkdir(parents=True, exist_ok=True)
    path = out / eagle_form.WEIGHTS[0]
    unfinished = path.with_name(path.name + ".part")
    save_file(tensors, unfinished)
    unfinished.replace(path)
    (out / "config.json").write_text(json.dumps(shape.config(), indent=2) + "\n", encoding="utf-8")
