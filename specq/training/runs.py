"""A training of heads that may be cut off: how far it is, what it goes on from, and its loop over so many seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError

import click
import torch
from torch import nn

from specq.protocol import ConfigError
from specq.training.distil import Batch
from specq.training.draft import REPORT_EVERY_S, rate
from specq.training.draft_settings import HeadSettings
from specq.training.optimizer import apply_gradients

SAVE_EVERY_S = 30.0


@dataclass
class Run:
    """A training under way, and how far it is. about: what must be the same for a run to go on from `path`."""

    network: nn.Module
    optimizers: list[torch.optim.Optimizer]
    path: Path
    about: str
    step: int = 0
    seconds: float = 0.0

    def save(self) -> None:
        """Write what a run goes on from; the file is there only when it is whole."""
        state = {
            "about": self.about,
            "network": self.network.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
        }
        unfinished = self.path.with_name(self.path.name + ".part")
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, unfinished)
        unfinished.replace(self.path)

    def resume(self, device: torch.device) -> None:
        """Go on from what an earlier run with the same settings has written, if there is something."""
        if not self.path.is_file():
            return
        try:
            state = torch.load(self.path, map_location=device, weights_only=True)
            if state["about"] != self.about:
                return
            self.network.load_state_dict(state["network"])
            for optimizer, own in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(own)
            self.step, self.seconds = state["step"], state["seconds"]
        except (OSError, RuntimeError, EOFError, KeyError, ValueError, UnpicklingError) as error:
            raise ConfigError(f"{self.path} cannot be read; delete it to begin anew: {error}") from error
        click.echo(f"goes on after step {self.step}, {self.seconds:.0f} s")


def fit(
    run: Run, losses_of: Callable[[Batch], torch.Tensor], batches: Iterator[Batch], settings: HeadSettings, kind: str
) -> None:
    """Train until the time is over: warm up, hold, and fall over the closing share of the time. losses_of: f32[depths], the loss of a
    depth counts `depth_decay` times that of the one before it; kind: what the depths are called."""
    started, said, saved = time.monotonic() - run.seconds, run.seconds, run.seconds
    while (done := run.seconds / settings.seconds) < 1:
        losses = losses_of(next(batches))
        weights = settings.depth_decay ** torch.arange(len(losses), device=losses.device)
        (losses * weights).sum().backward()  # type: ignore[no-untyped-call]
        apply_gradients(run.network, run.optimizers, rate(run.step, done))
        run.step, run.seconds = run.step + 1, time.monotonic() - started
        if run.seconds - said >= REPORT_EVERY_S or run.seconds >= settings.seconds:
            said = run.seconds
            shown = " ".join(f"{loss:.3f}" for loss in losses.tolist())
            click.echo(f"step {run.step}, loss by {kind} {shown}, {run.seconds:.0f} s")
        if run.seconds - saved >= SAVE_EVERY_S or run.seconds >= settings.seconds:
            saved = run.seconds
            run.save()
