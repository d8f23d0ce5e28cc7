"""The stages of `specq train medusa`, each a function of the settings: Medusa-1 heads for an unchanged target.

    rollouts   as in `specq train draft`: the target answers prompts of the corpus
    heads      each head learns, for a given time, the target's output its number of positions later. As for a draft
               model, half of the loss is on the target's distribution and half on the likeliest token. Each head's
               loss has `depth_decay` times the weight of the head before (Cai et al. 2024, section 2.2.1). An
               interrupted run continues. The heads are written in 8 bits
    evaluate   how many of the target's tokens the 8-bit heads predict, benchmark by benchmark and depth by depth

Parameters have the names of `specq.drafting.medusa.form`, the form in which `save_heads` writes them. In the evaluation
all heads predict from the state that made the last token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import click
import numpy as np
import torch
from torch import nn
from torch.nn import functional

from specq.checkpoints import draft_form
from specq.drafting.medusa import form as medusa_form
from specq.drafting.medusa.network import MedusaHeads, load_heads
from specq.protocol import Int32Array
from specq.training.architecture import hidden_states
from specq.training.distil import RolloutBatch, rollout_batches, token_losses
from specq.training.draft import all_rollouts, check_rollouts, frequent_tokens, load_target
from specq.training.foresight import info_of, measure_heads
from specq.training.heads import tokenizer_of, write_heads
from specq.training.optimizer import build_optimizers
from specq.training.rollouts import Rollouts
from specq.training.runs import TrainingRun, depth_weights
from specq.training.settings import MedusaSettings


class ResidualBlock(nn.Module):
    """x + silu(W x + b). It begins as the identity, so that the head begins as the target's own."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.silu(self.linear(x))


class HeadsNetwork(nn.ModuleList):
    """Heads over hidden states; heads with their own outputs begin with the target's, `output` [columns, hidden]."""

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
        """Return the logits [n, columns] of a head for hidden states [n, hidden]."""
        of_head = cast("nn.Sequential", self[head])
        found: torch.Tensor = of_head(hidden)
        return found if len(of_head) > self._num_layers else functional.linear(found, self._shared.to(found.dtype))


def save_heads(network: HeadsNetwork, shape: medusa_form.HeadsShape, token_ids: Int32Array, out: Path) -> None:
    """Write heads, with matrices in 8 bits."""
    tensors = {draft_form.TOKEN_IDS: torch.from_numpy(token_ids)}
    for name, parameter in network.named_parameters():
        tensors[name] = parameter.detach().float().cpu().contiguous()
        if parameter.ndim == 2:
            values, scales = draft_form.to_int8(tensors[name].numpy())
            tensors[name], tensors[name + draft_form.SCALE] = torch.from_numpy(values), torch.from_numpy(scales)
    write_heads(out, medusa_form.WEIGHTS[0], tensors, shape.config())


class MedusaForesight:
    """Implements `Foresight`."""

    def __init__(self, target: Any, heads: MedusaHeads) -> None:
        self._target, self._heads, self.token_ids = target, heads, heads.token_ids

    def logits(self, prompt: list[int], answer: list[int]) -> torch.Tensor:
        token_ids = torch.tensor([prompt + answer], device=self._target.device)
        return self._heads.logits(hidden_states(self._target, token_ids)[0, len(prompt) - 1 : -1])


def evaluate(settings: MedusaSettings) -> None:
    """Measure the 8-bit heads on every benchmark and write the report."""
    target, chat = load_target(settings)
    info = info_of(target, settings.target)
    heads = MedusaForesight(target, load_heads(str(settings.out), str(settings.target), info, str(settings.device)))
    measure_heads(target, heads, chat, settings)


__all__ = ["evaluate", "train_heads"]


def about(settings: MedusaSettings, token_ids: Int32Array) -> str:
    """Return the values that must be equal for a run to continue."""
    own = settings.num_heads, settings.num_layers, settings.own_output, settings.depth_decay, settings.seed
    rates = settings.lr, settings.matrix_lr, settings.hard_weight
    return f"{settings.target} {own} {rates} {len(token_ids)} {int(token_ids.sum())}"


def train_heads(settings: MedusaSettings) -> None:
    """Train the heads on all rollouts and write them to `out`."""
    target, chat = load_target(settings)
    rollouts = all_rollouts(settings)
    check_rollouts(rollouts, settings.target, target, settings.num_heads + 1, f"{settings.num_heads} heads")
    network, output, token_ids = new_heads(settings, target, rollouts)
    click.echo(f"{sum(p.numel() for p in network.parameters()) / 1e6:.2f} M parameters; {rollouts.num_answered} labels")
    run = TrainingRun(network, heads_optimizers(network, settings), settings.state_file, about(settings, token_ids))
    run.resume(settings.device)
    batches = rollout_batches(rollouts, settings, chat.stops[0], np.random.default_rng([settings.seed, run.step]))
    run.fit(
        lambda: heads_losses(network, target, output, next(batches), settings),
        depth_weights(settings.depth_decay, settings.num_heads),
        settings.seconds,
        "head",
    )
    save_heads(network, heads_shape(settings, target), token_ids, settings.out)


def new_heads(
    settings: MedusaSettings, target: Any, rollouts: Rollouts
) -> tuple[HeadsNetwork, torch.Tensor, Int32Array]:
    """Return untrained heads, the target's output matrix over their tokens [columns, hidden], and these tokens."""
    torch.manual_seed(settings.seed)
    token_ids = frequent_tokens(rollouts, settings.head_size)
    output = target.lm_head.weight[torch.from_numpy(token_ids).to(settings.device)]
    return (
        HeadsNetwork(settings.num_heads, settings.num_layers, output, own_output=settings.own_output),
        output,
        token_ids,
    )


def heads_optimizers(network: HeadsNetwork, settings: MedusaSettings) -> list[torch.optim.Optimizer]:
    """Return the optimizers of heads, at the rates of the settings."""
    outputs = tuple(f"{head}.{settings.num_layers}." for head in range(settings.num_heads))
    return build_optimizers(network, weight_decay=0.0, outside=outputs, lr=settings.lr, matrix_lr=settings.matrix_lr)


def heads_shape(settings: MedusaSettings, target: Any) -> medusa_form.HeadsShape:
    """Return the content of the heads' config.json."""
    return medusa_form.HeadsShape(
        medusa_num_heads=settings.num_heads,
        medusa_num_layers=settings.num_layers,
        hidden_size=target.lm_head.weight.shape[1],
        **tokenizer_of(settings.target),
    )


def heads_losses(
    network: HeadsNetwork, target: Any, output: torch.Tensor, batch: RolloutBatch, settings: MedusaSettings
) -> torch.Tensor:
    """Return f32[heads]: the mean loss of each head.

    It covers the positions of a batch where the head and the target predict the same position.
    """
    is_said = batch.counted > 0  # [rows, length]: the next token is the target's own
    place = is_said.flatten().cumsum(0).view_as(is_said) - 1  # index among those
    losses = []
    with settings.autocast():
        with torch.no_grad():
            hidden = hidden_states(target, batch.token_ids)[is_said]  # [n, hidden]
            taught = functional.linear(hidden, output)  # [n, columns]
        for head in range(len(network)):
            ahead = head + 1
            both = is_said[:, :-ahead] & is_said[:, ahead:]
            logits = network.logits(head, hidden[place[:, :-ahead][both]])
            each = token_losses(logits.float(), taught[place[:, ahead:][both]].float(), settings.hard_weight)
            losses.append(each.sum() / max(len(each), 1))
    return torch.stack(losses)
