"""The `eagle3` drafter's entry for the table, without importing torch.

The drafter is `specq.drafting.eagle3.remote`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specq.drafting.trees.spec import FedOptions, fed_spec
from specq.engines.models import is_host
from specq.protocol import ModelInfo

if TYPE_CHECKING:
    from specq.drafting.eagle3.remote import EagleTrees
    from specq.drafting.eagle3.row_head import RowHead


@dataclass(frozen=True, slots=True)
class EagleOptions(FedOptions):
    """The keys of [draft.eagle3]."""

    LABEL = "eagle3"


def _head(model: str, target: str, info: ModelInfo, device: str) -> RowHead:
    """Load a head in NumPy or, for a GPU, in torch."""
    if is_host(device):
        from specq.drafting.eagle3.arrays import load_arrays
        from specq.drafting.eagle3.host import HostEagle

        return HostEagle(load_arrays(model, target, info))
    from specq.drafting.eagle3.drafter import Eagle
    from specq.drafting.eagle3.loading import load_eagle

    return Eagle(load_eagle(model, target, info, device))


def _drafter() -> type[EagleTrees]:
    from specq.drafting.eagle3.remote import EagleTrees

    return EagleTrees


EAGLE3 = fed_spec("eagle3", EagleOptions, _head, _drafter)
