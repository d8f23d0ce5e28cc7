"""The messages of each round: drafter -> broker -> verifier -> broker -> drafters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import numpy as np

from specq.protocol import bounds
from specq.protocol.activations import BF16, unpack_activations
from specq.protocol.arrays import Float32Array, places_of, spans_of
from specq.protocol.errors import ProtocolError
from specq.protocol.messages.base import (
    ActivationBytes,
    Bytes,
    Count,
    Flags,
    Id,
    Ids,
    Lane,
    Lengths,
    Logprobs32,
    Message,
    NodeDistributions,
    NodeFlags,
    NodeIds,
    NodeLanes,
    NodeParents,
    NodeProbs,
    NodeScores,
    NodeTokens,
    Origins,
    References,
    Scales,
    TapForm,
    TapLayers,
    Tokens32,
    Weights,
    WithReason,
    check_sizes,
    empty,
)
from specq.protocol.stats import SESSION_STATS
from specq.protocol.versions import since


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draft(Message):
    """Nodes for a session's tree, parents before children.

    lane        the drafter's lane; node ids are scoped to (epoch, lane)
    base_len    the committed length that a parent of -1 means
    first_id    node i has the id first_id + i
    token_ids i32[n], parent_ids i32[n] (node ids, -1: at base_len), scores f16[n] (log-probability given the parent)
    q_ids i32[g * q_size], q_weights u16[g * q_size], q_rows i32[n]   under `probabilistic`, the draft distributions:
        see
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
    stats       with the last verdict: what only the verifier counts (see `specq.protocol.stats.SessionStats`)
    cached_tokens    with the first verdict, if `Open.by_owner`: tokens of the prompt whose KV was there when the
                     session was first opened
    token_ids i32[m]  accepted path, then the correction or bonus
    node_ids i32[k]   the nodes verified; mask u8[k]: 1 = accepted
    node_lanes u8[k]  the lane of each; empty where all are of the one lane in `seen`
    origins u8[m]     where each token comes from, as codes of `specq.protocol.origins`; empty: all are `plain`
    logprobs f32[m], top_ids i32[m * n], top_logprobs f32[m * n]   if asked for, as in `specq.protocol.types.Logprobs`
    node_tokens i32[k], node_parents i32[k], node_probs f32[k]   if the job asks to be explained: of each verified node
        its token,
                      the place of its parent among them (-1: the text), and how likely it was to be accepted given its
                      parent
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
    cached_tokens: Count = since(6, 0)
    token_ids: Tokens32
    node_ids: NodeIds = empty("<i4")
    mask: NodeFlags = empty("<u1")
    node_lanes: NodeLanes = empty("<u1")
    origins: Origins = empty("<u1")
    logprobs: Logprobs32 = empty("<f4")
    top_ids: Tokens32 = empty("<i4")
    top_logprobs: Logprobs32 = empty("<f4")
    node_tokens: NodeIds = empty("<i4")
    node_parents: NodeDistributions = empty("<i4")
    node_probs: NodeProbs = empty("<f4")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Verdicts(Message):
    """The verdicts of a step on n sessions that go on and ask for no log-probabilities; the others travel as
    `Verdict`s. The fields are those of `Verdict`, of one session after the other.

    step_us     duration of the step
    session_ids i64[n], epochs i64[n], base_lens i32[n]
    num_tokens, num_nodes, num_seen i32[n]   how many of the arrays below are of each session
    waited_us i32[n]   time that its oldest verified node had waited
    token_ids i32, origins u8 [tokens]; node_ids i32, mask u8, node_lanes u8 [nodes]; seen i32 [seen]
    """

    TYPE: ClassVar[str] = "verdicts"
    min_accept_prob: Annotated[int, bounds.MIN_ACCEPT_PROB] = 0
    step_us: Count = 0
    session_ids: Ids
    epochs: Ids
    base_lens: Lengths
    num_tokens: Lengths
    num_nodes: Lengths
    num_seen: Lengths
    waited_us: Lengths
    token_ids: Tokens32
    origins: Origins
    node_ids: Lengths = empty("<i4")
    mask: Flags = empty("<u1")
    node_lanes: Bytes = empty("<u1")
    seen: References = empty("<i4")

    def each(self) -> list[Verdict]:
        """Return them one by one; raise ProtocolError if the arrays do not fit together."""
        self.check()
        numbers = (array.tolist() for array in (self.session_ids, self.epochs, self.base_lens, self.waited_us))
        spans = map(spans_of, (self.num_tokens, self.num_nodes, self.num_seen))
        return [
            Verdict(
                session_id=session_id,
                epoch=epoch,
                base_len=base_len,
                min_accept_prob=self.min_accept_prob,
                us=(self.step_us, waited_us),
                seen=tuple(self.seen[seen].tolist()),
                token_ids=self.token_ids[tokens],
                origins=self.origins[tokens],
                node_ids=self.node_ids[nodes],
                mask=self.mask[nodes],
                node_lanes=self.node_lanes[nodes],
            )
            for session_id, epoch, base_len, waited_us, tokens, nodes, seen in zip(*numbers, *spans, strict=True)
        ]

    def take(self, places: Sequence[int]) -> Verdicts:
        """Return those at these places; their arrays must fit together."""
        tokens, nodes, seen = (places_of(n, places) for n in (self.num_tokens, self.num_nodes, self.num_seen))
        parts = (places, _OF_SESSIONS), (tokens, _OF_TOKENS), (nodes, _OF_NODES), (seen, ("seen",))
        return replace(self, **{name: getattr(self, name)[of_part] for of_part, names in parts for name in names})

    def check(self) -> None:
        """Raise ProtocolError, which says why, if the arrays do not fit together."""
        tokens, nodes, seen = (int(n.sum(dtype=np.int64)) for n in (self.num_tokens, self.num_nodes, self.num_seen))
        sizes = (self.session_ids.size, _OF_SESSIONS), (tokens, _OF_TOKENS), (nodes, _OF_NODES), (seen, ("seen",))
        check_sizes(self, sizes)
        if self.num_nodes.max(initial=0) > bounds.MAX_NODES or self.num_seen.max(initial=0) > bounds.SEEN.most:
            raise ProtocolError(f"a verdict has more than {bounds.MAX_NODES} nodes, or refers to more than 256 lanes")


_OF_SESSIONS = "session_ids", "epochs", "base_lens", "num_tokens", "num_nodes", "num_seen", "waited_us"
_OF_TOKENS = "token_ids", "origins"
_OF_NODES = "node_ids", "mask", "node_lanes"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Activations(Message):
    """Hidden states of a session's text, for the drafter of a lane that reads them; they come before the verdict on the
    tokens behind them, at most a MiB a message.

    first       where the token stands that follows the first row: row i is what the target made of the text up to token
                first + i - 1
    tap_layers, tap_form   as they were asked for (see `GetActivations`)
    width       numbers in a row, those of all layers
    data u8[...], scales f32[...]   rows: see `specq.protocol.activations`
    """

    TYPE: ClassVar[str] = "activations"
    session_id: Id
    epoch: Id
    lane: Lane
    first: Count
    tap_layers: TapLayers = ()
    tap_form: TapForm = BF16
    width: Count
    data: ActivationBytes
    scales: Scales = empty("<f4")

    def rows(self) -> Float32Array:
        """Return the rows f32[n, width]; raise ProtocolError, which says why, if the message does not fit together."""
        return unpack_activations(self.data, self.scales, self.tap_form, self.width, len(self.tap_layers))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SessionFailed(WithReason):
    """A verifier cannot continue a session. `retry`: another verifier may be able to."""

    TYPE: ClassVar[str] = "session_failed"
    session_id: Id
    epoch: Id
    retry: bool = False
