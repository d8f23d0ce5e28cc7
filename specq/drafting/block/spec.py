"""The `block` drafter's entry for the table, without importing torch. The drafter is `specq.drafting.block.remote`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specq.drafting.eagle3 import form as eagle_form
from specq.drafting.trees.spec import FedOptions, fed_spec
from specq.protocol import ModelInfo

if TYPE_CHECKING:
    from specq.drafting.block.drafter import BlockHead
    from specq.drafting.block.remote import BlockTrees


@dataclass(frozen=True, slots=True)
class BlockOptions(FedOptions):
    """The keys of [draft.block]."""

    LABEL = "block"


def load_head(heads: str, target: str, info: ModelInfo, device: str) -> BlockHead:
    """Load a block drafter or a P-EAGLE head. Raises ConfigError if it does not fit the target."""
    if eagle_form.is_parallel(Path(heads)):
        from specq.drafting.eagle3.loading import load_eagle
        from specq.drafting.eagle3.parallel import PEagleHead

        return PEagleHead(load_eagle(heads, target, info, device))
    from specq.drafting.block.drafter import BlockHead
    from specq.drafting.block.network import load_block

    return BlockHead(load_block(heads, target, info, device))


def _drafter() -> type[BlockTrees]:
    from specq.drafting.block.remote import BlockTrees

    return BlockTrees


BLOCK_DRAFTER = fed_spec("block", BlockOptions, load_head, _drafter)
