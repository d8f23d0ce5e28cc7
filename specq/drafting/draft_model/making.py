"""A colocated drafter made of a verifier's configuration: its draft model loaded and measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from specq.drafting import Proposer, bridge
from specq.drafting.draft_model.interface import ChainSource
from specq.drafting.draft_model.profiling import level_times
from specq.drafting.draft_model.proposer_chains import ProposerChains
from specq.drafting.draft_model.shaped import MOST_NODES, ShapedDrafter
from specq.drafting.draft_model.source import ColocatedDrafter
from specq.drafting.draft_model.spec import draft_trees
from specq.drafting.worker import Drafter
from specq.engines import tokenizer_files
from specq.protocol import fits
from specq.verifier.sources import Setup, StepCurve

if TYPE_CHECKING:
    from specq.drafting.draft_model.chain_model import ChainModel

log = structlog.get_logger(__name__)

PROFILED_SESSIONS = (1, 2, 4, 8, 16, 32, 48, 64)
# Likewise, where what drafts for so many is recorded when it is first run.
RECORDED_SESSIONS = (96, 128, 160, 192, 224, 256)


def make(setup: Setup) -> ColocatedDrafter | None:
    """Load the draft model that shall draft in this process, if there is one, and measure it."""
    config, tell = setup.config, setup.tell
    if not setup.model:
        return None
    from specq.drafting.draft_model.chain_model import ChainModel  # brings torch, which not every engine needs

    tell(f"loading {config.draft_model} to draft with")
    chains = ChainModel(
        setup.model,
        device=setup.device,
        dtype=config.dtype,
        name=config.draft_model,
        threads=config.threads,
        helper_cores=setup.helper_cores,
    )
    source, trees = _for_target(chains, setup)
    num_masks = chains.contexts.num_masks
    chain = min(config.chain, num_masks + 1) if num_masks else config.chain  # what one pass foresees
    most = min(config.max_sessions, RECORDED_SESSIONS[-1])
    profiled = {*PROFILED_SESSIONS, *RECORDED_SESSIONS, most} if chains.contexts.recorded_sizes else PROFILED_SESSIONS
    sizes = sorted(sessions for sessions in profiled if sessions <= most)
    tell(f"measuring drafts for {sizes[0]} to {sizes[-1]} sessions")
    levels = StepCurve(sizes, level_times(source, sizes, chain, {1, config.fan_out}))
    chains.contexts.warm_up(config.max_sessions)
    log.info("drafter_ready", model=chains.info.name, level_ms={n: round(levels(n) * 1e3, 3) for n in (1, 8, 64)})
    shaped = ShapedDrafter(Drafter(trees, incarnation=0, width=MOST_NODES, fan_out=config.fan_out, chain=config.chain))
    is_one_pass = num_masks > 0 and fits(chains.info, setup.info)  # drafts in another vocabulary may need more than one
    return ColocatedDrafter(source, levels, fan_out=config.fan_out, chain=chain, is_one_pass=is_one_pass, shaped=shaped)


def _for_target(chains: ChainModel, setup: Setup) -> tuple[ChainSource, Proposer]:
    """Return what drafts chains, and what drafts trees of shapes, in the target's vocabulary, with one model and one KV memory."""
    if fits(chains.info, setup.info):
        limit = min(chains.limit_vocab, setup.info.num_tokens)
        trees = draft_trees(chains.contexts, limit)
        if chains.contexts.num_masks:
            return ProposerChains(draft_trees(chains.contexts, limit)), trees
        chains.limit_vocab = limit
        return chains, trees
    draft_files, target_files = tokenizer_files(setup.draft_tokenizer), tokenizer_files(setup.target)
    bridged = bridge(chains.info, setup.config.vocabulary, draft_files, target_files, setup.info.name)
    return ProposerChains(bridged(draft_trees(chains.contexts))), bridged(draft_trees(chains.contexts))
