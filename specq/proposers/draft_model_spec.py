"""The `draft-model` proposer as the table has it, without what imports torch: `specq.proposers.draft_model`, or, for a model that has masks,
`specq.proposers.parallel_model`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specq.proposers.interface import Proposer, ProposerSpec

if TYPE_CHECKING:
    import numpy as np

    from specq.proposers.contexts import Contexts
    from specq.proposers.draft_model import DraftModel
    from specq.proposers.parallel_model import ParallelModel


def draft_trees(
    contexts: Contexts,
    limit_vocab: int | None = None,
    *,
    distribution_size: int = 32,
    rng: np.random.Generator | None = None,
) -> DraftModel | ParallelModel:
    """Return what drafts trees with a model; arguments as of `specq.proposers.kv_trees.KvTrees`."""
    from specq.proposers.draft_model import DraftModel
    from specq.proposers.parallel_model import ParallelModel

    kind = ParallelModel if contexts.num_masks else DraftModel
    made: DraftModel | ParallelModel = kind(contexts, distribution_size=distribution_size, rng=rng)
    made.limit_vocab = made.limit_vocab if limit_vocab is None else limit_vocab
    return made


def _make(
    model: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    kv_slots: int = 0,
    name: str = "",
    **of_children: Any,
) -> Proposer:
    from specq.proposers.contexts import Contexts

    return draft_trees(Contexts(model, device=device, dtype=dtype, kv_slots=kv_slots, name=name), **of_children)


DRAFT_MODEL = ProposerSpec(_make)
