"""A training in progress, which continues where an interrupted run with the same settings stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import click
import torch
from torch import nn

from specq.protocol import ConfigError
from specq.training.draft import REPORT_EVERY_S, rate
from specq.training.optimizer import apply_gradients, check_losses

SAVE_EVERY_S = 30.0


def depth_weights(decay: float, count: int) -> list[float]:
    """Return the weights of the losses of `count` depths: each is `decay` times the one before."""
    return [decay**depth for depth in range(count)]


def _load_state(path: Path, about: str, device: torch.device) -> dict[str, Any] | None:
    """Return the saved state of a run; None if there is none, or it belongs to a run with other settings."""
    if not path.is_file():
        return None
    state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    return state if state["about"] == about else None


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise ConfigError for any exception that a damaged file causes."""
    try:
        yield
    except (OSError, RuntimeError, EOFError, KeyError, ValueError, UnpicklingError) as error:
        reason = str(error).partition("\n")[0] or "it ends early"
        raise ConfigError(f"{path} cannot be read; delete it to start over: {reason}") from error


@dataclass
class TrainingRun:
    """A training and its progress.

    path    where it is saved.
    about   the values that must be equal for a run to continue.
    """

    network: nn.Module
    optimizers: list[torch.optim.Optimizer]
    path: Path
    about: str
    step: int = 0
    seconds: float = 0.0

    def save(self) -> None:
        """Write the state from which a run continues; the file appears only when it is complete."""
        state = {
            "about": self.about,
            "network": self.network.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
        }
        unfinished = self.path.with_name(self.path.name + ".part")
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            torch.save(state, file)
        unfinished.replace(self.path)

    def resume(self, device: torch.device) -> None:
        """Continue from the saved state of an earlier run with the same settings, if there is one."""
        with _reading(self.path):
            state = _load_state(self.path, self.about, device)
            if state is None:
                return
            self.network.load_state_dict(state["network"])
            for optimizer, own in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(own)
            self.step, self.seconds = state["step"], state["seconds"]
        click.echo(f"continuing after step {self.step}, {self.seconds:.0f} s")

    def fit(
        self, losses_of: Callable[[], torch.Tensor], weights: Sequence[float], most_seconds: float, each: str
    ) -> None:
        """Train until the time is over: warm up, hold, and fall over the closing share of the time.

        losses_of   returns the losses of a step, f32[n].
        weights     the weight of each loss.
        each        the name of what each loss belongs to, for the output.
        """
        started, said, saved = time.monotonic() - self.seconds, self.seconds, self.seconds
        counts = torch.tensor(weights, device=next(self.network.parameters()).device)
        while (done := self.seconds / most_seconds) < 1:
            losses = losses_of()
            (losses * counts).sum().backward()  # type: ignore[no-untyped-call]
            apply_gradients(self.network, self.optimizers, rate(self.step, done))
            self.step, self.seconds = self.step + 1, time.monotonic() - started
            if self.seconds - said >= REPORT_EVERY_S or self.seconds >= most_seconds:
                said = self.seconds
                shown = " ".join(f"{loss:.3f}" for loss in losses.tolist())
                click.echo(f"step {self.step}, loss by {each} {shown}, {self.seconds:.0f} s")
            if self.seconds - saved >= SAVE_EVERY_S or self.seconds >= most_seconds:
                check_losses(losses.tolist(), self.step)
                saved = self.seconds
                self.save()
