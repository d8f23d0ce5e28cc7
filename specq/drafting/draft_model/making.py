"""Make a colocated drafter from a verifier's configuration: load its draft model, and expect or time its levels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from specq.drafting import ChainDrafter, Drafter, bridge
from specq.drafting.draft_model.level_times import level_times, profiled_sessions
from specq.drafting.draft_model.shaped import MOST_NODES, ShapedTrees
from specq.drafting.draft_model.source import ColocatedSource
from specq.drafting.draft_model.spec import draft_trees
from specq.drafting.worker import DraftWorker
from specq.engines import tokenizer_files
from specq.protocol import fits
from specq.verifier.sources import Setup, StepCurve

if TYPE_CHECKING:
    from specq.drafting.draft_model.contexts import Contexts
    from specq.engines.native import Threads

log = structlog.get_logger(__name__)


def make(setup: Setup) -> ColocatedSource | None:
    """Load the draft model that the configuration names for this process; None if it names none."""
    config, tell = setup.config, setup.tell
    if not setup.model:
        return None
    from specq.drafting.draft_model.contexts import Contexts
    from specq.engines.native import threads_of

    tell(f"loading {config.draft_model} to draft with")
    threads = threads_of(config.threads, setup.helper_cores)
    contexts = Contexts(setup.model, device=setup.device, dtype=config.dtype, name=config.draft_model, threads=threads)
    drafter = _for_target(contexts, setup)
    chains, num_masks = drafter.in_chains(), contexts.num_masks
    chain = min(config.chain, num_masks + 1) if num_masks else config.chain  # the most that one pass predicts
    levels = _levels(contexts, chains, setup, chain, threads)
    contexts.warm_up(config.max_sessions)
    log.info(
        "draft_model_loaded", model=contexts.info.name, level_ms={n: round(levels(n) * 1e3, 3) for n in (1, 8, 64)}
    )
    worker = DraftWorker(drafter, incarnation=0, width=MOST_NODES, fan_out=config.fan_out, chain=config.chain)
    is_one_pass = num_masks > 0 and fits(
        contexts.info, setup.info
    )  # drafts in another vocabulary may need several passes
    shaped = ShapedTrees(worker)
    return ColocatedSource(chains, levels, fan_out=config.fan_out, chain=chain, is_one_pass=is_one_pass, shaped=shaped)


def _levels(contexts: Contexts, chains: ChainDrafter, setup: Setup, chain: int, threads: Threads) -> StepCurve:
    """Return the expected seconds of a level by sessions: on a CPU from one level, else from levels of all sizes."""
    config, widths = setup.config, {1, setup.config.fan_out}
    if contexts.is_on_cpu and not contexts.recorded_sizes:
        sizes = profiled_sessions(config.max_sessions)
        (level_s,) = level_times(chains, sizes[:1], 1, widths)  # also loads what drafting needs
        return StepCurve(sizes, contexts.work.seconds(sizes, threads.count, level_s))
    sizes = profiled_sessions(config.max_sessions, is_recorded=bool(contexts.recorded_sizes))
    setup.tell(f"measuring drafts for {sizes[0]} to {sizes[-1]} sessions")
    return StepCurve(sizes, level_times(chains, sizes, chain, widths))


def _for_target(contexts: Contexts, setup: Setup) -> Drafter:
    """Return a drafter in the target's vocabulary: shaped trees and chains, in one KV pool."""
    info = contexts.info
    if fits(info, setup.info):
        return draft_trees(contexts, min(info.vocab_size, info.num_tokens, setup.info.num_tokens))
    draft_files, target_files = tokenizer_files(setup.draft_tokenizer), tokenizer_files(setup.target)
    bridged = bridge(info, setup.config.vocabulary, draft_files, target_files, setup.info.name)
    return bridged(draft_trees(contexts))
