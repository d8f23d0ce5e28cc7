"""What drafters that read hidden states share without importing torch: options, and how the head is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specq.config import OwnOptions, option
from specq.drafting.interface import Drafter
from specq.drafting.table import DrafterSpec
from specq.engines import fingerprint, read_info, resolve_checkpoint
from specq.protocol import BF16, INT8, ConfigError, ModelInfo

Make = Callable[..., Drafter]
# Heads, target, its description, device -> a head
Load = Callable[[str, str, ModelInfo, str], Any]


@dataclass(frozen=True, slots=True)
class FedOptions(OwnOptions):
    """The keys of [draft.NAME]."""

    activations: str = option(
        BF16,
        "Number format of the target's hidden states on the wire: bf16, or int8 (half the bytes).",
        choices=(BF16, INT8),
    )
    window: int = option(
        1024,
        "Number of newest tokens whose hidden states a drafter receives, for a prompt or a late join.",
        low=1,
        high=65_536,
    )


def fed_spec(method: str, options: type[FedOptions], load: Load, drafter: Callable[[], Make]) -> DrafterSpec:
    """Return the entry of a drafter for the table.

    method   its name.
    load     loads a head.
    drafter  imports and returns the drafter's class.
    """

    def make(
        model: str,
        *,
        target: str = "",
        target_name: str = "",
        device: str = "auto",
        name: str = "",
        distribution_size: int = 32,
        activations: str = BF16,
        window: int = 1024,
        **_of_models: object,
    ) -> Drafter:
        if not target:
            raise ConfigError(
                f"the {method} proposer reads a target's hidden states: name it by draft.target, as the verifier does "
                "by target.model"
            )
        checkpoint = resolve_checkpoint(target)
        info = read_info(checkpoint, target_name)
        head = load(model, str(checkpoint), info, device)
        own = replace(info, name=name or model, engine=method, fingerprint=fingerprint(Path(model)))
        return drafter()(head, own, form=activations, window=window, distribution_size=distribution_size)

    return DrafterSpec(make, options, reads_target=True)
