"""A colocated drafter made of a verifier's configuration: its draft model loaded and measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from specq.drafting import Drafter
from specq.proposers.profiling import level_times
from specq.protocol import ConfigError, fits, mismatch
from specq.verifier.sources.colocated import ColocatedDrafter
from specq.verifier.sources.interface import Setup
from specq.verifier.sources.shaped import MOST_NODES, ShapedDrafter
from specq.verifier.step_curve import StepCurve

if TYPE_CHECKING:
    from specq.proposers.chain_model import ChainModel

log = structlog.get_logger(__name__)

PROFILED_SESSIONS = (1, 2, 4, 8, 16, 32, 48, 64)


def make(setup: Setup) -> ColocatedDrafter | None:
    """Load the draft model that shall draft in this process, if there is one, and measure it."""
    config, tell = setup.config, setup.tell
    if not setup.model:
        return None
    from specq.proposers.chain_model import ChainModel  # brings torch, which not every engine needs

    tell(f"loading {config.draft_model} to draft with")
    chains = ChainModel(setup.model, device=setup.device, dtype=config.dtype, name=config.draft_model)
    if not fits(chains.info, setup.info):
        raise ConfigError(mismatch(chains.info, [setup.info]))
    chains.limit_vocab = min(chains.limit_vocab, setup.info.num_tokens)
    sizes = [sessions for sessions in PROFILED_SESSIONS if sessions <= config.max_sessions]
    tell(f"measuring drafts for {sizes[0]} to {sizes[-1]} sessions")
    levels = StepCurve(sizes, level_times(chains, sizes, config.chain, {1, config.fan_out}))
    log.info("drafter_ready", model=chains.info.name, level_ms={n: round(levels(n) * 1e3, 3) for n in (1, 8, 64)})
    return ColocatedDrafter(
        chains, levels, fan_out=config.fan_out, chain=config.chain, shaped=_shaped(chains, config.fan_out, config.chain)
    )


def _shaped(chains: ChainModel, fan_out: int, chain: int) -> ShapedDrafter:
    """Return what drafts trees of shapes, with the model and the KV memory that the chains are drafted with."""
    from specq.proposers.draft_model import DraftModel

    trees = DraftModel(chains.contexts)
    trees.limit_vocab = chains.limit_vocab
    return ShapedDrafter(Drafter(trees, incarnation=0, width=MOST_NODES, fan_out=fan_out, chain=chain))
