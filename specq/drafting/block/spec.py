"""The `block` drafter's entry for the table, without importing torch. The drafter is `specq.drafting.block.remote`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specq.drafting.trees.spec import FedOptions, fed_spec
from specq.protocol import ModelInfo

if TYPE_CHECKING:
    from specq.drafting.block.drafter import BlockHead
    from specq.drafting.block.remote import BlockTrees


@dataclass(frozen=True, slots=True)
class BlockOptions(FedOptions):
    """The keys of [draft.block]."""

    LABEL = "block"


def _head(model: str, target: str, info: ModelInfo, device: str) -> BlockHead:
    from specq.drafting.block.drafter import BlockHead
    from specq.drafting.block.network import load_block

    return BlockHead(load_block(model, target, info, device))


def _drafter() -> type[BlockTrees]:
    from specq.drafting.block.remote import BlockTrees

    return BlockTrees


BLOCK_DRAFTER = fed_spec("block", BlockOptions, _head, _drafter)
