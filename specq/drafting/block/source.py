"""A block drafter as a source: one pass drafts a tree from features of the target's hidden states."""

from __future__ import annotations

from pathlib import Path

import structlog

from specq.drafting.block.spec import load_head
from specq.drafting.head_kinds import kind_of
from specq.drafting.rank_trees import checked_tree
from specq.drafting.trees.source import TreeSource, usual_sizes
from specq.protocol import BLOCK
from specq.verifier.sources import Setup

log = structlog.get_logger(__name__)


class BlockSource(TreeSource):
    """Drafts with a block drafter. Its pass takes the same time for all its levels."""

    name = BLOCK
    level_share = 0.0


def make(setup: Setup) -> BlockSource | None:
    """Load the block drafter that the configuration names for this process; None if it names none.

    Raises ConfigError if it does not fit the target.
    """
    if not setup.heads or (kind := kind_of(Path(setup.heads))).source != BLOCK:
        return None
    setup.tell(f"loading {kind.called} from {setup.config.heads}")
    head = load_head(setup.heads, setup.target, setup.info, setup.device)
    why = f"this {kind.called.partition(' ')[2]} predicts {head.num_places} tokens"
    tree = checked_tree(setup.config.heads_tree, head.num_places, why)
    setup.tell("preparing its passes")
    head.warm_up(setup.config.max_sessions, None if tree else usual_sizes(head.num_places))
    log.info("block_drafter_loaded", heads=setup.config.heads, layers=head.layers, num_paths=len(tree))
    return BlockSource(head, head.num_places, tree)
