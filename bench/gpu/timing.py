"""Clocks of the device."""

from __future__ import annotations

import torch

from specq.protocol import ConfigError


def check_device() -> None:
    """Raise ConfigError where there is none."""
    if not torch.cuda.is_available():
        raise ConfigError("this needs a CUDA device, and there is none")


def event() -> torch.cuda.Event:
    """Return an event whose time can be read."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
