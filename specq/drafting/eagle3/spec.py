"""The `eagle3` drafter's entry for the table, without importing torch.

The drafter is `specq.drafting.eagle3.remote`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from specq.config import OwnOptions, option
from specq.drafting.interface import Drafter
from specq.drafting.table import DrafterSpec
from specq.engines import fingerprint, read_info, resolve_checkpoint
from specq.protocol import BF16, INT8, ConfigError


@dataclass(frozen=True, slots=True)
class EagleOptions(OwnOptions):
    """The keys of [draft.eagle3]."""

    LABEL = "eagle3"

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


def _make(
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
            "the eagle3 proposer reads a target's hidden states: name it by draft.target, as the verifier does by "
            "target.model"
        )
    from specq.drafting.eagle3.loading import load_eagle
    from specq.drafting.eagle3.remote import EagleTrees

    checkpoint = resolve_checkpoint(target)
    info = read_info(checkpoint, target_name)
    head = load_eagle(model, str(checkpoint), info, device)
    own = replace(info, name=name or model, engine="eagle3", fingerprint=fingerprint(Path(model)))
    return EagleTrees(head, own, form=activations, window=window, distribution_size=distribution_size)


EAGLE3 = DrafterSpec(_make, EagleOptions, reads_target=True)
