"""Make a colocated drafter from a verifier's configuration: load its draft model, and expect or time its levels."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
import structlog

from specq.drafting import ChainDrafter, Drafter, bridge
from specq.drafting.draft_model.shaped import MOST_NODES, ShapedTrees
from specq.drafting.draft_model.source import ColocatedSource
from specq.drafting.draft_model.spec import draft_trees
from specq.drafting.worker import DraftWorker
from specq.engines import tokenizer_files
from specq.protocol import Int32Array, SamplingParams, fits
from specq.verifier.sources import Setup, StepCurve

if TYPE_CHECKING:
    from specq.drafting.draft_model.contexts import Contexts
    from specq.engines.native import Threads

log = structlog.get_logger(__name__)

PROFILED_SESSIONS = (1, 2, 4, 8, 16, 32, 48, 64)
# Further sizes, where chains for a number of sessions are recorded on their first run.
RECORDED_SESSIONS = (96, 128, 160, 192, 224, 256)


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
    if contexts.is_on_cpu:
        sizes = profiled_sessions(config.max_sessions)
        (level_s,) = level_times(chains, sizes[:1], 1, widths)  # also loads what drafting needs
        return StepCurve(sizes, contexts.work.seconds(sizes, threads.count, level_s))
    sizes = profiled_sessions(config.max_sessions, is_recorded=bool(contexts.recorded_sizes))
    setup.tell(f"measuring drafts for {sizes[0]} to {sizes[-1]} sessions")
    return StepCurve(sizes, level_times(chains, sizes, chain, widths))


def profiled_sessions(max_sessions: int, *, is_recorded: bool = False) -> list[int]:
    """Return the numbers of sessions of which levels are timed. `is_recorded`: the first run of a size is recorded."""
    most = min(max_sessions, RECORDED_SESSIONS[-1])
    profiled = {*PROFILED_SESSIONS, *RECORDED_SESSIONS, most} if is_recorded else PROFILED_SESSIONS
    return sorted(sessions for sessions in profiled if sessions <= most)


def _for_target(contexts: Contexts, setup: Setup) -> Drafter:
    """Return a drafter in the target's vocabulary: shaped trees and chains, in one KV pool."""
    info = contexts.info
    if fits(info, setup.info):
        return draft_trees(contexts, min(info.vocab_size, info.num_tokens, setup.info.num_tokens))
    draft_files, target_files = tokenizer_files(setup.draft_tokenizer), tokenizer_files(setup.target)
    bridged = bridge(info, setup.config.vocabulary, draft_files, target_files, setup.info.name)
    return bridged(draft_trees(contexts))


PROFILED_CONTEXT = 32  # tokens
REPEATS = 3


def level_times(chains: ChainDrafter, sizes: Sequence[int], depth: int, widths: Collection[int]) -> list[float]:
    """Return the seconds that a level of chains `depth` deep takes, for each number of sessions in `sizes`.

    Chains of all these widths are run once, so that no compilation happens in service.
    """
    random = np.random.default_rng(0)

    def tokens(count: int) -> Int32Array:
        return random.integers(0, chains.info.num_tokens, count, np.int32)

    ids = [-1 - i for i in range(max(sizes))]  # real sessions have ids >= 0
    try:
        for session_id in ids:
            chains.open(session_id, tokens(PROFILED_CONTEXT), SamplingParams())
        seconds = []
        for size in sizes:
            for width in widths:
                _draft_s(chains, ids[:size], tokens, depth, width)
            seconds.append(min(_draft_s(chains, ids[:size], tokens, depth, 1) for _ in range(REPEATS)) / depth)
    finally:
        for session_id in ids:
            chains.close(session_id)
    return seconds


def _draft_s(
    chains: ChainDrafter, session_ids: Sequence[int], tokens: Callable[[int], Int32Array], depth: int, width: int
) -> float:
    """Return the seconds of one draft after contexts that grew by a token, as in service.

    With an unchanged context, the result may be known from the draft before.
    """
    count = len(session_ids)
    chains.commit(session_ids, np.ones(count, np.intp), tokens(count))
    started = time.perf_counter()
    chains.start(session_ids, depth, width).collect()
    return time.perf_counter() - started
