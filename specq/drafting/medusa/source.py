"""Medusa heads as a source: matrices draft trees from the target's last hidden state.

The step in which the target makes a token also returns the hidden state of that token's row, at no cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from specq.drafting.head_kinds import kind_of
from specq.drafting.interface import Pending
from specq.drafting.medusa.interface import HeadSource, HiddenRow
from specq.drafting.rank_trees import checked_tree
from specq.drafting.trees.interface import Grown, TreeRequest
from specq.drafting.trees.ranked import grow_each, num_choices
from specq.drafting.trees.source import TreeSource
from specq.protocol import FINAL, MEDUSA, ModelInfo
from specq.verifier.sources import Followed, Setup

if TYPE_CHECKING:
    from specq.drafting.medusa.drafter import Medusa
    from specq.drafting.medusa.host import HostMedusa

log = structlog.get_logger(__name__)


class MedusaTrees:
    """Implements `TreeHead`. It keeps the last hidden state of each text, and the position behind it."""

    layers: tuple[int, ...] = (FINAL,)
    limit_vocab = 0  # trees are read by the host before they are verified
    runs_beside_host = False

    def __init__(self, heads: HeadSource) -> None:
        self.heads = heads
        self._lasts: dict[int, tuple[HiddenRow, int]] = {}

    def observe(self, values: Any, followed: Sequence[Followed]) -> None:
        """See `TreeHead`."""
        self._lasts |= {
            one.session_id: (HiddenRow(values, one.rows[-1]), one.first + len(one.rows)) for one in followed
        }

    def known(self, session_id: int) -> int:
        """See `TreeHead`."""
        return self._lasts[session_id][1] if session_id in self._lasts else 0

    def close(self, session_id: int) -> None:
        """See `TreeHead`."""
        self._lasts.pop(session_id, None)

    def start(self, requests: Sequence[TreeRequest]) -> list[Pending[Grown]]:
        """See `TreeHead`."""
        lasts = [self._lasts[session_id] for one in requests for session_id in one.session_ids]
        params = [own for one in requests for own in one.params]
        rows, lengths = zip(*lasts, strict=True)
        return grow_each(requests, self.heads.start(rows, params, lengths, num_choices(requests)).collect)


class MedusaSource(TreeSource):
    """Drafts with heads; `tree`: the paths of the tree for jobs that ask for no shape, () for best first."""

    name = MEDUSA
    most_nodes = 64
    reads_prompt = False

    def __init__(self, heads: HeadSource, tree: tuple[tuple[int, ...], ...] = ()) -> None:
        super().__init__(MedusaTrees(heads), heads.num_heads, tree)


def make(setup: Setup) -> MedusaSource | None:
    """Load the heads that the configuration names for this process; None if it names none.

    Raises ConfigError if they do not fit the target.
    """
    if not setup.heads or kind_of(Path(setup.heads)).source != MEDUSA:
        return None
    setup.tell(f"loading Medusa heads from {setup.config.heads}")
    on_host, limit_vocab = setup.device == "cpu", setup.info.num_tokens
    medusa = load_source(setup.heads, setup.target, setup.info, setup.device, limit_vocab, on_host=on_host)
    medusa.warm_up(setup.config.max_sessions)
    tree = checked_tree(setup.config.heads_tree, medusa.num_heads, f"there are {medusa.num_heads} heads")
    log.info("medusa_heads_loaded", heads=setup.config.heads, num_heads=medusa.num_heads, num_paths=len(tree))
    return MedusaSource(medusa, tree)


def load_source(
    heads: str, target: str, info: ModelInfo, device: str, limit_vocab: int, *, on_host: bool
) -> HostMedusa | Medusa:
    """Load heads for the target in `target`, in NumPy (`on_host`) or in torch. Drafted tokens are below `limit_vocab`.

    Raises ConfigError if they do not fit the target.
    """
    if on_host:
        from specq.drafting.medusa.arrays import load_arrays
        from specq.drafting.medusa.host import HostMedusa

        return HostMedusa(load_arrays(heads, target, info), limit_vocab)
    from specq.drafting.medusa.drafter import Medusa  # imports torch
    from specq.drafting.medusa.network import load_heads

    return Medusa(load_heads(heads, target, info, device), limit_vocab)
