"""An EAGLE-3 head as a source: one layer drafts trees from the target's hidden states, and from its own below them."""

from __future__ import annotations

from pathlib import Path

import structlog

from specq.config import MTP
from specq.drafting.eagle3.mtp_form import loading_bytes
from specq.drafting.head_kinds import kind_of
from specq.drafting.rank_trees import checked_tree, tree_for
from specq.drafting.trees.interface import TreeHead
from specq.drafting.trees.source import NO_SHAPE, TreeSource, usual_sizes
from specq.protocol import EAGLE, ConfigError
from specq.runtime import available_memory
from specq.verifier.sources import Setup

log = structlog.get_logger(__name__)


class EagleSource(TreeSource):
    """Drafts with an EAGLE-3 head."""

    name = EAGLE

    def levels_for(self, num_nodes: int) -> int:
        """Return fewer levels for few nodes, as with many sessions.

        The last levels would take long, and would rarely be among the nodes.
        """
        return min(super().levels_for(num_nodes), 1 + num_nodes // 2)


def make(setup: Setup) -> EagleSource | None:
    """Load the head that the configuration names for this process; None if it names none.

    Raises ConfigError if it does not fit the target. But a target whose own MTP layer cannot be loaded, for any
    reason, is served without it, if that layer is only the default.
    """
    if not setup.heads or (kind := kind_of(Path(setup.heads))).source != EAGLE:
        return None
    config = setup.config
    named = setup.heads if config.heads == MTP else config.heads
    setup.tell(f"loading {kind.called} from {named}")
    tree = checked_tree(config.heads_tree, config.chain, f"target.chain is {config.chain}")
    try:
        head = _loaded(setup, tree)
    except Exception as error:
        if config.heads != MTP:
            raise
        log.warning("mtp_layer_not_used", heads=named, reason=str(error) or type(error).__name__)
        setup.tell("its MTP layer cannot be loaded; serving without it")
        return None
    log.info("eagle_head_loaded", heads=named, layers=head.layers, num_paths=len(tree))
    return EagleSource(head, config.chain, tree)


def _loaded(setup: Setup, tree: tuple[tuple[int, ...], ...]) -> TreeHead:
    free = available_memory()
    if setup.config.heads == MTP and free is not None and (size := loading_bytes(Path(setup.heads))) > free:
        raise ConfigError(f"it needs {size / 1e6:.0f} MB of memory to load; {free / 1e6:.0f} MB are free")
    return _on_host(setup) if setup.device == "cpu" else _on_device(setup, tree)


def _on_host(setup: Setup) -> TreeHead:
    from specq.drafting.eagle3.arrays import load_arrays
    from specq.drafting.eagle3.host import HostEagle

    return HostEagle(load_arrays(setup.heads, setup.target, setup.info))


def _on_device(setup: Setup, tree: tuple[tuple[int, ...], ...]) -> TreeHead:
    from specq.drafting.eagle3.drafter import Eagle  # imports torch
    from specq.drafting.eagle3.loading import load_eagle

    eagle, depth = Eagle(load_eagle(setup.heads, setup.target, setup.info, setup.device)), setup.config.chain
    setup.tell("preparing its passes")
    shapes = [shape] if (shape := tree_for(NO_SHAPE, depth, tree)) else []
    eagle.warm_up(setup.config.max_sessions, shapes, None if tree else usual_sizes(depth))
    return eagle
