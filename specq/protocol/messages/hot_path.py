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
    PromptRows,
    References,
    Scales,
    Scores16,
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

    - lane: the drafter's lane. Node ids belong to (epoch, lane).
    - base_len: the committed length that a parent of -1 stands for.
    - first_id: node i has the id first_id + i.
    - token_ids i32[n].
    - parent_ids i32[n]: ids of nodes. -1: at base_len.
    - scores f16[n]: log-probability given the parent.
    - q_ids i32[g * q_size], q_weights u16[g * q_size], q_rows i32[n]: the draft distributions, under `probabilistic`.
      See `specq.protocol.types.DraftDistributions`. q_size 0: all nodes are point masses.
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
class Drafts(Message):
    """The drafts of a pass for n sessions, all of point masses. Other drafts travel as `Draft`.

    The fields are those of `Draft`. Each array holds the values of one session after the other.

    - session_ids i64[n], epochs i64[n], lanes u8[n], base_lens i32[n], first_ids i32[n].
    - num_nodes i32[n]: number of elements of each session in the arrays below.
    - token_ids i32[nodes], parent_ids i32[nodes], scores f16[nodes].
    """

    TYPE: ClassVar[str] = "drafts"
    session_ids: Ids
    epochs: Ids
    lanes: Bytes
    base_lens: Lengths
    first_ids: Lengths
    num_nodes: Lengths
    token_ids: Tokens32
    parent_ids: References
    scores: Scores16

    @classmethod
    def of(cls, drafts: Sequence[Draft]) -> Drafts:
        """Return drafts without distributions as one message."""
        return cls(
            session_ids=np.array([draft.session_id for draft in drafts], np.int64),
            epochs=np.array([draft.epoch for draft in drafts], np.int64),
            lanes=np.array([draft.lane for draft in drafts], np.uint8),
            base_lens=np.array([draft.base_len for draft in drafts], np.int32),
            first_ids=np.array([draft.first_id for draft in drafts], np.int32),
            num_nodes=np.array([len(draft.token_ids) for draft in drafts], np.int32),
            token_ids=np.concatenate([draft.token_ids for draft in drafts]),
            parent_ids=np.concatenate([draft.parent_ids for draft in drafts]),
            scores=np.concatenate([draft.scores for draft in drafts]),
        )

    @staticmethod
    def packed(drafts: Sequence[Draft]) -> list[Draft | Drafts]:
        """Return drafts in as few messages as possible, for a receiver that reads this one."""
        found: list[Draft | Drafts] = [draft for draft in drafts if draft.q_size]
        part, num_nodes = list[Draft](), 0
        for draft in (draft for draft in drafts if not draft.q_size):
            if part and num_nodes + len(draft.token_ids) > MOST_TOGETHER:
                found.append(Drafts.of(part))
                part, num_nodes = [], 0
            part.append(draft)
            num_nodes += len(draft.token_ids)
        return [*found, *(part if len(part) < 2 else [Drafts.of(part)])]

    def each(self) -> list[Draft]:
        """Return them as single drafts. The arrays must fit together."""
        columns = self.session_ids, self.epochs, self.lanes, self.base_lens, self.first_ids
        numbers = zip(*(column.tolist() for column in columns), spans_of(self.num_nodes), strict=True)
        return [
            Draft(
                session_id=session_id,
                epoch=epoch,
                lane=lane,
                base_len=base_len,
                first_id=first_id,
                token_ids=self.token_ids[nodes],
                parent_ids=self.parent_ids[nodes],
                scores=self.scores[nodes],
            )
            for session_id, epoch, lane, base_len, first_id, nodes in numbers
        ]

    def take(self, places: Sequence[int]) -> Drafts:
        """Return the drafts at these places. The arrays must fit together."""
        parts = (places, _OF_DRAFTS), (places_of(self.num_nodes, places), _OF_DRAFT_NODES)
        return replace(self, **{name: getattr(self, name)[of_part] for of_part, names in parts for name in names})

    def check(self) -> None:
        """Check that the arrays fit together.

        Raises ProtocolError with the reason if they do not.
        """
        nodes = int(self.num_nodes.sum(dtype=np.int64))
        check_sizes(self, ((self.session_ids.size, _OF_DRAFTS), (nodes, _OF_DRAFT_NODES)))
        if self.num_nodes.max(initial=0) > bounds.MAX_NODES:
            raise ProtocolError(f"a draft has more than {bounds.MAX_NODES} nodes")


_OF_DRAFTS = "session_ids", "epochs", "lanes", "base_lens", "first_ids", "num_nodes"
_OF_DRAFT_NODES = "token_ids", "parent_ids", "scores"
MOST_TOGETHER = 8192  # nodes of one `Drafts`; another begins after them


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Verdict(Message):
    """The tokens that a verifier committed to a session in one round.

    - base_len: committed length before the round.
    - finish: a finish reason or "".
    - min_accept_prob: the acceptance probability that a node needs to be verified, in thousandths. Above 1000: no node
      is verified.
    - seen: (lane, newest node id that the verifier has received in it, lane, ...).
    - us: (duration of the step, waiting time of its oldest verified node), in microseconds.
    - stats: with the last verdict, counts that only the verifier has. See `specq.protocol.stats.SessionStats`.
    - cached_tokens: with the first verdict, if `Open.by_owner`. Number of prompt tokens with cached KV when the session
      was first opened.
    - token_ids i32[m]: accepted path, then the correction or bonus.
    - node_ids i32[k]: the verified nodes.
    - mask u8[k]: 1 means accepted.
    - node_lanes u8[k]: the lane of each node. Empty: all are of the single lane in `seen`.
    - origins u8[m]: the origin of each token, as codes of `specq.protocol.origins`. Empty: all are `plain`.
    - logprobs f32[m], top_ids i32[m * n], top_logprobs f32[m * n]: if requested, as in `specq.protocol.types.Logprobs`.
    - node_tokens i32[k]: if the job asks for an explanation, the token of each verified node.
    - node_parents i32[k]: likewise, the index of its parent among the verified nodes. -1: the text.
    - node_probs f32[k]: likewise, its acceptance probability given its parent.
    - prompt_rows: with the first tokens, if `params.prompt_logprobs`: see `specq.protocol.logprobs`.
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
    prompt_rows: PromptRows = empty("<u1", 6)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Verdicts(Message):
    """The verdicts of a step on n running sessions without log-probabilities. Other verdicts travel as `Verdict`.

    The fields are those of `Verdict`. Each array holds the values of one session after the other.

    - step_us: duration of the step.
    - session_ids i64[n], epochs i64[n], base_lens i32[n].
    - num_tokens, num_nodes, num_seen i32[n]: number of elements of each session in the arrays below.
    - waited_us i32[n]: waiting time of its oldest verified node.
    - token_ids i32[tokens], origins u8[tokens].
    - node_ids i32[nodes], mask u8[nodes], node_lanes u8[nodes].
    - seen i32[seen].
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
        """Return them as single verdicts.

        Raises ProtocolError if the arrays do not fit together.
        """
        self.check()
        numbers = (array.tolist() for array in (self.session_ids, self.epochs, self.base_lens, self.waited_us))
        all_seen = tuple(self.seen.tolist())
        spans = map(spans_of, (self.num_tokens, self.num_nodes, self.num_seen))
        return [
            Verdict(
                session_id=session_id,
                epoch=epoch,
                base_len=base_len,
                min_accept_prob=self.min_accept_prob,
                us=(self.step_us, waited_us),
                seen=all_seen[seen],
                token_ids=self.token_ids[tokens],
                origins=self.origins[tokens],
                node_ids=self.node_ids[nodes],
                mask=self.mask[nodes],
                node_lanes=self.node_lanes[nodes],
            )
            for session_id, epoch, base_len, waited_us, tokens, nodes, seen in zip(*numbers, *spans, strict=True)
        ]

    def take(self, places: Sequence[int]) -> Verdicts:
        """Return the verdicts at these places. The arrays must fit together."""
        tokens, nodes, seen = (places_of(n, places) for n in (self.num_tokens, self.num_nodes, self.num_seen))
        parts = (places, _OF_SESSIONS), (tokens, _OF_TOKENS), (nodes, _OF_NODES), (seen, ("seen",))
        return replace(self, **{name: getattr(self, name)[of_part] for of_part, names in parts for name in names})

    def check(self) -> None:
        """Check that the arrays fit together.

        Raises ProtocolError with the reason if they do not.
        """
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
    """Hidden states of a session's text, for the drafter of a lane that reads them. At most one MiB per message.

    They arrive before the verdict on the tokens behind them.

    - first: position of the token after the first row. Row i is the target's state for the text up to token first + i -
      1.
    - tap_layers, tap_form: as requested, see `GetActivations`.
    - width: numbers in a row, of all layers together.
    - data u8[...], scales f32[...]: rows, see `specq.protocol.activations`.
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
        """Return the rows f32[n, width].

        Raises ProtocolError with the reason if the message does not fit together.
        """
        return unpack_activations(self.data, self.scales, self.tap_form, self.width, len(self.tap_layers))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SessionFailed(WithReason):
    """A verifier cannot continue a session. `retry`: another verifier may be able to."""

    TYPE: ClassVar[str] = "session_failed"
    session_id: Id
    epoch: Id
    retry: bool = False
