"""The messages of each round: drafter -> broker -> verifier -> broker -> drafters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from specq.protocol import bounds
from specq.protocol.messages.base import (
    Count,
    Id,
    Lane,
    Logprobs32,
    Message,
    NodeDistributions,
    NodeFlags,
    NodeIds,
    NodeLanes,
    NodeParents,
    NodeScores,
    NodeTokens,
    Origins,
    References,
    Tokens32,
    Weights,
    WithReason,
    empty,
)
from specq.protocol.session_stats import SESSION_STATS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draft(Message):
    """Nodes for a session's tree, parents before children.

    lane        the drafter's lane; node ids are scoped to (epoch, lane)
    base_len    the committed length that a parent of -1 means
    first_id    node i has the id first_id + i
    token_ids i32[n], parent_ids i32[n] (node ids, -1: at base_len), scores f16[n] (log-probability given the parent)
    q_ids i32[g * q_size], q_weights u16[g * q_size], q_rows i32[n]   under `probabilistic`, the draft distributions: see
                `specq.protocol.types.DraftDistributions`; q_size 0: all are point masses
    """

    TYPE: ClassVar[str] = "draft"
    session_id: Id
    epoch: Id
    lane: Lane
    base_len: Count
    first_id: Count
    q_size: Count = 0
    token_ids: NodeTokens
    parent_ids: NodeParents
    scores: NodeScores
    q_ids: References = empty("<i4")
    q_weights: Weights = empty("<u2")
    q_rows: NodeDistributions = empty("<i4")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Verdict(Message):
    """What a verifier committed to a session in one round.

    base_len    committed length before; finish: a finish reason or ""
    min_accept_prob  in thousandths: how likely a node must be accepted for it to be verified; above 1000: none is
    seen        (lane, newest node id that the verifier has received in it, lane, ...)
    us          (duration of the step, time that its oldest verified node had waited), microseconds
    stats       with the last verdict: what only the verifier counts (see `specq.protocol.session_stats.SessionStats`)
    token_ids i32[m]  accepted path, then the correction or bonus
    node_ids i32[k]   the nodes verified; mask u8[k]: 1 = accepted
    node_lanes u8[k]  the lane of each; empty where all are of the one lane in `seen`
    origins u8[m]     where each token comes from, as codes of `specq.protocol.origins`; empty: all are `plain`
    logprobs f32[m], top_ids i32[m * n], top_logprobs f32[m * n]   if asked for, as in `specq.protocol.types.Logprobs`
    """

    TYPE: ClassVar[str] = "verdict"
    session_id: Id
    epoch: Id
    base_len: Count
    finish: Annotated[str, bounds.VERDICT_FINISH] = ""
    min_accept_prob: Annotated[int, bounds.MIN_ACCEPT_PROB] = 0
    seen: Annotated[tuple[int, ...], bounds.SEEN] = ()
    us: Annotated[tuple[int, ...], bounds.STEP_US] = ()
    stats: Annotated[dict[str, Any], SESSION_STATS] = field(default_factory=dict)
    token_ids: Tokens32
    node_ids: NodeIds = empty("<i4")
    mask: NodeFlags = empty("<u1")
    node_lanes: NodeLanes = empty("<u1")
    origins: Origins = empty("<u1")
    logprobs: Logprobs32 = empty("<f4")
    top_ids: Tokens32 = empty("<i4")
    top_logprobs: Logprobs32 = empty("<f4")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SessionFailed(WithReason):
    """A verifier cannot continue a session. `retry`: another verifier may be able to."""

    TYPE: ClassVar[str] = "session_failed"
    session_id: Id
    epoch: Id
    retry: bool = False
