"""A colocated drafter made of a verifier's configuration: its draft model loaded, and how long a level of chains takes
measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
import structlog

from specq.drafting import Proposer, bridge
from specq.drafting.draft_model.chains import ChainSource, ProposerChains
from specq.drafting.draft_model.shaped import MOST_NODES, ShapedDrafter
from specq.drafting.draft_model.source import ColocatedDrafter
from specq.drafting.draft_model.spec import draft_trees
from specq.drafting.worker import DraftWorker
from specq.engines import tokenizer_files
from specq.protocol import Int32Array, SamplingParams, fits
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
    shaped = ShapedDrafter(
        DraftWorker(trees, incarnation=0, width=MOST_NODES, fan_out=config.fan_out, chain=config.chain)
    )
    is_one_pass = num_masks > 0 and fits(chains.info, setup.info)  # drafts in another vocabulary may need more than one
    return ColocatedDrafter(source, levels, fan_out=config.fan_out, chain=chain, is_one_pass=is_one_pass, shaped=shaped)


def _for_target(chains: ChainModel, setup: Setup) -> tuple[ChainSource, Proposer]:
    """Return what drafts chains, and what drafts trees of shapes, in the target's vocabulary, with one model and one KV
    memory."""
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


PROFILED_CONTEXT = 32  # tokens
REPEATS = 3


def level_times(source: ChainSource, sizes: Sequence[int], depth: int, widths: Collection[int]) -> list[float]:
    """Return the seconds that a level of chains `depth` deep takes for so many sessions; chains of all these widths are
    run once, so that nothing is compiled for them in service."""
    random = np.random.default_rng(0)

    def tokens(count: int) -> Int32Array:
        return random.integers(0, source.info.num_tokens, count, np.int32)

    ids = [-1 - i for i in range(max(sizes))]  # real sessions have ids >= 0
    try:
        for session_id in ids:
            source.open(session_id, tokens(PROFILED_CONTEXT), SamplingParams())
        seconds = []
        for size in sizes:
            for width in widths:
                _draft_s(source, ids[:size], tokens, depth, width)
            seconds.append(min(_draft_s(source, ids[:size], tokens, depth, 1) for _ in range(REPEATS)) / depth)
    finally:
        for session_id in ids:
            source.close(session_id)
    return seconds


def _draft_s(
    source: ChainSource, session_ids: Sequence[int], tokens: Callable[[int], Int32Array], depth: int, width: int
) -> float:
    """Return the seconds of one draft after contexts that have got a token more, as in service: what follows one that
    is as it was may be known from the draft before."""
    count = len(session_ids)
    source.commit(session_ids, np.ones(count, np.intp), tokens(count))
    started = time.perf_counter()
    source.start(session_ids, depth, width)
    source.finish()
    return time.perf_counter() - started
