"""The stages of `specq train medusa`, each a function of the settings: Medusa-1 heads for a target that exists and stays as it is.

rollouts   as of `specq train draft`: the target answers prompts of the corpus
heads      the heads learn, for so many seconds, what the target says that many places later: as a draft model does, half its
           distribution there and half the likeliest token. The loss of a head counts `depth_decay` times that of the one before it
           (Cai et al. 2024, section 2.2.1). A run that was cut off goes on; the heads are written in 8 bits
evaluate   how many of the target's tokens the 8-bit heads foresee, benchmark by benchmark and depth by depth
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pickle import UnpicklingError
from typing import Any

import click
import numpy as np
import torch
from torch.nn import functional

from specq.checkpoints import medusa_form
from specq.protocol import ConfigError, Int32Array
from specq.text import load_tokenizer_files, num_tokens, tokenizer_hash
from specq.training.architecture import hidden_states
from specq.training.distil import Batch, rollout_batches, token_losses
from specq.training.draft import REPORT_EVERY_S, all_rollouts, frequent_tokens, load_target, rate, roll_out
from specq.training.draft_settings import MedusaSettings
from specq.training.medusa_evaluation import evaluate
from specq.training.medusa_network import HeadsNetwork, save_heads
from specq.training.optimizer import apply_gradients, build_optimizers
from specq.training.rollouts import Rollouts

__all__ = ["evaluate", "roll_out", "train_heads"]

SAVE_EVERY_S = 30.0


@dataclass
class Run:
    """A training under way, and how far it is."""

    network: HeadsNetwork
    optimizers: list[torch.optim.Optimizer]
    step: int = 0
    seconds: float = 0.0

    def save(self, settings: MedusaSettings, token_ids: Int32Array) -> None:
        """Write what a run goes on from; the file is there only when it is whole."""
        state = {
            "about": _about(settings, token_ids),
            "network": self.network.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
        }
        unfinished = settings.state_file.with_name(settings.state_file.name + ".part")
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, unfinished)
        unfinished.replace(settings.state_file)

    def resume(self, settings: MedusaSettings, token_ids: Int32Array) -> None:
        """Go on from what an earlier run with the same settings has written, if there is something."""
        path = settings.state_file
        if not path.is_file():
            return
        try:
            state = torch.load(path, map_location=settings.device, weights_only=True)
            if state["about"] != _about(settings, token_ids):
                return
            self.network.load_state_dict(state["network"])
            for optimizer, own in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(own)
            self.step, self.seconds = state["step"], state["seconds"]
        except (OSError, RuntimeError, EOFError, KeyError, ValueError, UnpicklingError) as error:
            raise ConfigError(f"{path} cannot be read; delete it to begin anew: {error}") from error
        click.echo(f"goes on after step {self.step}, {self.seconds:.0f} s")


def _about(settings: MedusaSettings, token_ids: Int32Array) -> str:
    """Return what must be the same for a run to go on."""
    own = settings.num_heads, settings.num_layers, settings.own_output, settings.depth_decay, settings.seed
    rates = settings.lr, settings.matrix_lr, settings.hard_weight
    return f"{settings.target} {own} {rates} {len(token_ids)} {int(token_ids.sum())}"


def train_heads(settings: MedusaSettings) -> None:
    """Train the heads on all rollouts and write them to `out`."""
    target, chat = load_target(settings)
    rollouts = all_rollouts(settings)
    check_rollouts(rollouts, settings, target.get_input_embeddings().weight.shape[0])
    torch.manual_seed(settings.seed)
    token_ids = frequent_tokens(rollouts, settings.head_size)
    output = target.lm_head.weight[torch.from_numpy(token_ids).to(settings.device)]
    network = HeadsNetwork(settings.num_heads, settings.num_layers, output, own_output=settings.own_output)
    click.echo(f"{sum(p.numel() for p in network.parameters()) / 1e6:.2f} M parameters; {rollouts.num_answered} labels")
    outputs = tuple(f"{head}.{settings.num_layers}." for head in range(settings.num_heads))
    rates = {"lr": settings.lr, "matrix_lr": settings.matrix_lr}
    run = Run(network, build_optimizers(network, weight_decay=0.0, outside=outputs, **rates))
    run.resume(settings, token_ids)
    batches = rollout_batches(rollouts, settings, chat.stops[0], np.random.default_rng([settings.seed, run.step]))
    fit(run, target, output, batches, token_ids, settings)
    save_heads(network, heads_shape(settings, target), token_ids, settings.out)


def check_rollouts(rollouts: Rollouts, settings: MedusaSettings, vocab_size: int) -> None:
    """Raise ConfigError for rollouts that are not of this target, or in which nothing stands far enough behind a token."""
    if (largest := int(rollouts.token_ids.max())) >= vocab_size:
        raise ConfigError(
            f"the rollouts have the token {largest}, and {settings.target} {vocab_size} tokens; they are of another target"
        )
    longest = int((np.diff(rollouts.bounds) - rollouts.prompt_sizes).max())
    if longest <= settings.num_heads:
        raise ConfigError(
            f"the longest answer among the rollouts has {longest} tokens; {settings.num_heads} heads need {settings.num_heads + 1}"
        )


def heads_shape(settings: MedusaSettings, target: Any) -> medusa_form.HeadsShape:
    """Return what config.json says of the heads."""
    tokenizer = load_tokenizer_files(settings.target)["tokenizer.json"]
    return medusa_form.HeadsShape(
        medusa_num_heads=settings.num_heads,
        medusa_num_layers=settings.num_layers,
        hidden_size=target.lm_head.weight.shape[1],
        num_tokens=num_tokens(tokenizer),
        tokenizer_hash=tokenizer_hash(tokenizer),
    )


def fit(
    run: Run,
    target: Any,
    output: torch.Tensor,
    batches: Iterator[Batch],
    token_ids: Int32Array,
    settings: MedusaSettings,
) -> None:
    """Train until the time is over: warm up, hold, and fall over the closing share of the time."""
    started, said, saved = time.monotonic() - run.seconds, run.seconds, run.seconds
    while (done := run.seconds / settings.seconds) < 1:
        losses = heads_losses(run.network, target, output, next(batches), settings)
        weights = settings.depth_decay ** torch.arange(len(losses), device=losses.device)
        (losses * weights).sum().backward()  # type: ignore[no-untyped-call]
        apply_gradients(run.network, run.optimizers, rate(run.step, done))
        run.step, run.seconds = run.step + 1, time.monotonic() - started
        if run.seconds - said >= REPORT_EVERY_S or run.seconds >= settings.seconds:
            said = run.seconds
            shown = " ".join(f"{loss:.3f}" for loss in losses.tolist())
            click.echo(f"step {run.step}, loss by head {shown}, {run.seconds:.0f} s")
        if run.seconds - saved >= SAVE_EVERY_S or run.seconds >= settings.seconds:
            saved = run.seconds
            run.save(settings, token_ids)


def heads_losses(
    network: HeadsNetwork, target: Any, output: torch.Tensor, batch: Batch, settings: MedusaSettings
) -> torch.Tensor:
    """Return f32[heads]: the mean loss of each, over the places of a batch where it and the target speak of the same one."""
    is_said = batch.counted > 0  # [rows, length]: the next token is the target's own
    place = is_said.flatten().cumsum(0).view_as(is_said) - 1  # among those
    losses = []
    with settings.autocast():
        with torch.no_grad():
            hidden = hidden_states(target, batch.token_ids)[is_said]  # [n, hidden]
            taught = functional.linear(hidden, output)  # [n, columns]
        for head in range(settings.num_heads):
            ahead = head + 1
            both = is_said[:, :-ahead] & is_said[:, ahead:]
            logits = network.logits(head, hidden[place[:, :-ahead][both]])
            each = token_losses(logits.float(), taught[place[:, ahead:][both]].float(), settings.hard_weight)
            losses.append(each.sum() / max(len(each), 1))
    return torch.stack(losses)
