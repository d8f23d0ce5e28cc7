"""The `draft-model` drafter's entry for the table, without importing torch.

The drafter is `specq.drafting.draft_model.drafter`. For a model with masks it is `specq.drafting.parallel.drafter`, and
with Medusa heads `specq.drafting.medusa.draft_model`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specq.drafting.interface import Drafter
from specq.drafting.table import DrafterSpec
from specq.engines import resolve_checkpoint
from specq.engines.models import is_host
from specq.protocol import MEDUSA, ConfigError

if TYPE_CHECKING:
    import numpy as np

    from specq.drafting.draft_model.contexts import Contexts
    from specq.drafting.draft_model.drafter import DraftModel
    from specq.drafting.parallel.drafter import ParallelModel


def draft_trees(
    contexts: Contexts,
    limit_vocab: int | None = None,
    *,
    distribution_size: int = 32,
    rng: np.random.Generator | None = None,
) -> DraftModel | ParallelModel:
    """Return a drafter of trees with a model; arguments as in `specq.drafting.draft_model.kv_trees.KvTrees`."""
    from specq.drafting.draft_model.drafter import DraftModel
    from specq.drafting.parallel.drafter import ParallelModel

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
    heads: str = "",
    **of_children: Any,
) -> Drafter:
    from specq.drafting.draft_model.contexts import Contexts

    contexts = Contexts(model, device=device, dtype=dtype, kv_slots=kv_slots, name=name)
    return _with_heads(contexts, model, heads, device, **of_children) if heads else draft_trees(contexts, **of_children)


def _with_heads(contexts: Contexts, model: str, heads: str, device: str, **of_children: Any) -> Drafter:
    """Return a drafter with a model and Medusa heads; ConfigError if they do not fit."""
    from specq.drafting.head_kinds import kind_of
    from specq.drafting.medusa.draft_model import MedusaModel
    from specq.drafting.medusa.source import load_source

    info = contexts.info
    if (kind := kind_of(Path(heads))).source != MEDUSA:
        raise ConfigError(f"{heads} contains {kind.called}; a draft model needs Medusa heads of its own")
    if contexts.token_ids is not None or contexts.num_masks:
        raise ConfigError(
            f"{info.name} is a draft model of specq's own form, for which there are no heads; draft.heads are those of "
            f"a small target"
        )
    limit_vocab = min(info.vocab_size, info.num_tokens)
    source = load_source(heads, str(resolve_checkpoint(model)), info, device, limit_vocab, on_host=is_host(device))
    return MedusaModel(contexts, source, **of_children)


DRAFT_MODEL = DrafterSpec(_make, takes_heads=True)
