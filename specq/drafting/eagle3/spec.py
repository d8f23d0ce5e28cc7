"""The `eagle3` drafter's entry for the table, without importing torch.

The drafter is `specq.drafting.eagle3.remote`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from specq.config import OwnOptions, option
from specq.drafting.interface import Drafter
from specq.drafting.table import DrafterSpec
from specq.engines import fingerprint, read_info, resolve_checkpoint
from specq.engines.models import is_host
from specq.protocol import BF16, INT8, ConfigError, ModelInfo

if TYPE_CHECKING:
    from specq.drafting.eagle3.row_head import RowHead


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
    from specq.drafting.eagle3.remote import EagleTrees

    checkpoint = resolve_checkpoint(target)
    info = read_info(checkpoint, target_name)
    head = _head(model, str(checkpoint), info, device)
    own = replace(info, name=name or model, engine="eagle3", fingerprint=fingerprint(Path(model)))
    return EagleTrees(head, own, form=activations, window=window, distribution_size=distribution_size)


def _head(model: str, target: str, info: ModelInfo, device: str) -> RowHead:
    """Load a head in NumPy or, for a GPU, in torch."""
    if is_host(device):
        from specq.drafting.eagle3.arrays import load_arrays
        from specq.drafting.eagle3.host import HostEagle

        return HostEagle(load_arrays(model, target, info))
    from specq.drafting.eagle3.drafter import Eagle
    from specq.drafting.eagle3.loading import load_eagle

    return Eagle(load_eagle(model, target, info, device))


EAGLE3 = DrafterSpec(_make, EagleOptions, reads_target=True)
