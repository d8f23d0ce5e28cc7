"""The interface of all drafters: `Drafter`, for a draft worker and for a verifier that drafts in its own process.

A draft worker keeps each session's tree and asks a drafter for the children of a node (`expand`). A verifier asks for
one chain a round, for many sessions at once. It asks the object that `in_chains` returns, which every drafter has.
Drafts that were started, perhaps on a device, are a `Pending` until they are collected.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np

from specq.protocol import (
    NO_ACTIVATIONS,
    NO_TOKENS,
    ActivationRequest,
    DraftDistribution,
    EngineLostError,
    Float32Array,
    Int32Array,
    IntpArray,
    ModelInfo,
    SamplingParams,
)
from specq.verification import NO_TOKEN, strategy

T_co = TypeVar("T_co", covariant=True)

MaskBehind = Callable[[Sequence[int]], Int32Array | None]  # see `specq.grammar.SessionGrammar.mask_behind`
ForcedBehind = Callable[[Sequence[int]], list[int]]  # see `SessionGrammar.forced`
FORCED_SCORE = math.log(0.98)  # of a forced token: the model may spell the same text with other tokens
CONTEXT = -1  # the node id that stands for the committed context


@dataclass(frozen=True, slots=True)
class Expansion:
    """A request for the children of one node.

    node_id   CONTEXT for what follows the committed context, else a node that an earlier `expand` returned and that
              is still valid.
    child_ids the ids for the children. Their number is the number of children requested.
    """

    session_id: int
    node_id: int
    child_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Children:
    """The answer: at most len(child_ids) tokens, likeliest first, or in the order in which they were drawn.

    token_ids i32[c].
    scores    f32[c]: log-probability that the target commits the token, given that it commits the parent. For a drawn
              token: also given that it rejects the earlier siblings, as known before the token was drawn.
    distribution   the distribution that they were drawn from, without replacement. None: they are point masses.
    """

    token_ids: Int32Array
    scores: Float32Array
    distribution: DraftDistribution | None = None

    def first(self, count: int) -> Self:
        """Return the first `count` children."""
        return replace(self, token_ids=self.token_ids[:count], scores=self.scores[:count])


NO_CHILDREN = Children(NO_TOKENS, np.zeros(0, np.float32))


class Chains(NamedTuple):
    """Drafted chains.

    token_ids  i32[sessions, depth, width]: the children at each level, likeliest first or as they were drawn.
               NO_TOKEN marks an empty place. Each level follows the first child of the level before.
    scores     f32[sessions, depth, width]: log-probabilities, as in `Children`.
    distributions   for each session the draft distributions of each level's children. () for point masses.
    """

    token_ids: Int32Array
    scores: Float32Array
    distributions: list[Sequence[DraftDistribution]]


def _not_on_device() -> None:
    """Return None: the host takes part in drafting."""


@dataclass(frozen=True, slots=True)
class Pending(Generic[T_co]):
    """Drafts that were started.

    collect    waits for the drafts. Called once.
    on_device  returns their tokens before the host has read them, on the target's device. None if the host takes part
               in drafting.
    """

    collect: Callable[[], T_co]
    on_device: Callable[[], Any] = _not_on_device


class Drafter(ABC):
    """Base class of all drafters. One thread calls it. `open`, `close`, `commit` and `expand` must be implemented.

    info         the model. Without a tokenizer hash: for targets with any tokenizer.
    activations  the target's hidden states that it reads, with `observe` and `knows`. NO_ACTIVATIONS: none.
    width        how many numbers a row of hidden states has, all layers together.
    maker        turns its logits into children, a `specq.drafting.draft_model.children.ChildMaker`. It may be
                 replaced. None: the drafter has no logits.
    masks        for sessions with a grammar, by id, what it allows behind the nodes on a path. Drafters that do not
                 take masks ignore them.
    """

    info: ModelInfo
    activations: ActivationRequest = NO_ACTIVATIONS
    width: int = 0
    maker: Any = None
    masks: Mapping[int, MaskBehind] = MappingProxyType({})

    @property
    def takes_masks(self) -> bool:
        """Whether it drafts only what `masks` allow, by the ids of its own `info`."""
        return False

    @property
    def has_chains(self) -> bool:
        """Whether a chain costs less than the same levels one by one."""
        return False

    @abstractmethod
    def open(self, session_id: int, token_ids: Int32Array, params: SamplingParams, owner: str = "") -> None:
        """Start a session with this context i32[n].

        `params` are the parameters to draft with. `draws_children` shows whether children are drawn. Data kept from
        texts is shared only among sessions of one owner, as in `Engine.open`.
        """

    @abstractmethod
    def close(self, session_id: int) -> None:
        """Forget a session; unknown ones are ignored."""

    @abstractmethod
    def commit(self, session_id: int, token_ids: Int32Array, path: Sequence[int]) -> None:
        """Append committed tokens i32[m]; `path` has the node ids of the first len(path) <= m tokens.

        Nodes that do not descend from the last token's node are removed. Its descendants stay valid. If len(path) < m,
        all nodes are removed.
        """

    def rewind(self, session_id: int, length: int) -> bool:
        """Forget a session's tokens beyond `length` and all its nodes, and keep what was computed for the rest.

        Returns whether this was possible. If not, the caller opens the session again.
        """
        return False

    @abstractmethod
    def expand(self, requests: Sequence[Expansion]) -> list[Children]:
        """Answer all requests in one batched pass.

        Several requests may belong to one session. A request never asks for the child of a node that the same call
        creates.
        """

    def expand_chain(self, requests: Sequence[Expansion], depth: int) -> list[list[Children]]:
        """Answer each request with the children at `depth` levels, each below the first child of the level before.

        A request's child_ids list the ids of all levels, one level after the other, the same number for each level.
        This default makes one `expand` call a level. A chain ends early where a node has no children.
        """
        answers: list[list[Children]] = [[] for _ in requests]
        ids, alive = [level_ids(request, depth) for request in requests], list(range(len(requests)))
        for level in range(depth):
            asked = [
                Expansion(requests[i].session_id, ids[i][level - 1][0] if level else requests[i].node_id, ids[i][level])
                for i in alive
            ]
            for i, children in zip(alive, self.expand(asked), strict=True):
                answers[i].append(children)
            alive = [i for i in alive if len(answers[i][-1].token_ids)]
            if not alive:
                break
        return answers

    def in_chains(self) -> ChainDrafter:
        """Return an object that drafts chains for sessions of its own, with the same model and memory."""
        return NodeChains(self)

    def observe(self, session_id: int, first: int, states: Float32Array) -> None:  # noqa: B027 - need not be written
        """Store rows f32[n, width] of hidden states for an open session.

        Each row stands before a token of the text, the first row before the token at position `first`. Known rows are
        skipped. After a gap the text starts anew. The tokens may arrive later.
        """

    def knows(self, session_id: int) -> bool:
        """Return whether an open session has hidden states; else `expand` returns no children."""
        return True


class ChainDrafter(ABC):
    """Drafts one chain a round for each of many sessions at once, in arrays. One thread calls it.

    - masks: for sessions with a grammar, by id, what it allows behind drafted tokens. A drafter that drafts level by
      level on the host drafts no other tokens. It may ignore them.
    - forced: for some of these, the tokens that the grammar forces behind drafted ones. They are drafted, too, and do
      not count as levels. Chains then have more tokens than levels. `takes_forced`: whether it drafts them.
    """

    info: ModelInfo
    masks: Mapping[int, MaskBehind] = MappingProxyType({})
    forced: Mapping[int, ForcedBehind] = MappingProxyType({})
    takes_forced: bool = False

    @abstractmethod
    def open(self, session_id: int, token_ids: Int32Array, params: SamplingParams, owner: str = "") -> None:
        """Start a session, between two rounds; see `Drafter.open`."""

    @abstractmethod
    def close(self, session_id: int) -> None:
        """Forget a session, between two rounds; unknown ones are ignored."""

    @abstractmethod
    def commit(self, session_ids: Sequence[int], num_tokens: IntpArray, token_ids: Int32Array) -> IntpArray:
        """Append committed tokens: `num_tokens` for each session, at least one.

        Returns i64[sessions]: the number of tokens that each session's last chain had predicted. If this raises, the
        state is unchanged.
        """

    @abstractmethod
    def start(self, session_ids: Sequence[int], depth: int, width: int) -> Pending[Chains]:
        """Begin a round: a chain for each session. It ends when the chains are collected.

        On a device the tokens are a tensor i32[depth * sessions * width], level by level, below `info.num_tokens`.
        There every chain has the full depth. Raises EngineError, with the state unchanged, if the KV cache is full.
        """


class NodeChains(ChainDrafter):
    """Drafts chains node by node, with any drafter."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.info = drafter, drafter.info
        self._drafted: dict[int, list[tuple[int, int]]] = {}  # for each session's last chain: tokens and node ids
        self._errors: dict[int, Exception] = {}  # exceptions of sessions that could not follow their text
        self._node_ids = count()

    def open(self, session_id: int, token_ids: Int32Array, params: SamplingParams, owner: str = "") -> None:
        """Start a session; see `ChainDrafter`."""
        self.drafter.open(session_id, token_ids, params, owner)

    def close(self, session_id: int) -> None:
        """Forget a session; see `ChainDrafter`."""
        self._drafted.pop(session_id, None)
        self._errors.pop(session_id, None)
        self.drafter.close(session_id)

    def commit(self, session_ids: Sequence[int], num_tokens: IntpArray, token_ids: Int32Array) -> IntpArray:
        """Append committed tokens; see `ChainDrafter`.

        If the drafter raises for a session, a request for its chain raises the exception.
        """
        parts = np.split(token_ids, np.cumsum(num_tokens)[:-1])
        return np.array([self._follow(*one) for one in zip(session_ids, parts, strict=True)], np.intp)

    def _follow(self, session_id: int, token_ids: Int32Array) -> int:
        path: list[int] = []
        for token, (foreseen, node_id) in zip(token_ids.tolist(), self._drafted.pop(session_id, ()), strict=False):
            if token != foreseen:
                break
            path.append(node_id)
        try:
            self.drafter.commit(session_id, token_ids, path)
        except EngineLostError:
            raise
        except Exception as error:  # noqa: BLE001 - the other sessions have already committed
            self._errors[session_id] = error
        return len(path)

    def start(self, session_ids: Sequence[int], depth: int, width: int) -> Pending[Chains]:
        """Draft chains; see `ChainDrafter`. The host has read them when this returns."""
        for session_id in session_ids:
            if session_id in self._errors:
                raise self._errors[session_id]
        requests = [
            Expansion(session_id, CONTEXT, tuple(islice(self._node_ids, depth * width))) for session_id in session_ids
        ]
        answers = self.drafter.expand_chain(requests, depth)
        shape = len(requests), depth, width
        token_ids, scores = np.full(shape, NO_TOKEN, np.int32), np.zeros(shape, np.float32)
        distributions: list[Sequence[DraftDistribution]] = []
        for i, (request, levels) in enumerate(zip(requests, answers, strict=True)):
            for level, children in enumerate(levels):
                size = min(width, len(children.token_ids))
                token_ids[i, level, :size], scores[i, level, :size] = children.token_ids[:size], children.scores[:size]
            distributions.append(_distributions(levels))
            firsts = [ids[0] for ids in level_ids(request, depth)]
            self._drafted[request.session_id] = list(zip(token_ids[i, :, 0].tolist(), firsts, strict=True))
        chains = Chains(token_ids, scores, distributions)
        return Pending(lambda: chains)


def _distributions(levels: Sequence[Children]) -> tuple[DraftDistribution, ...]:
    """Return what the children of each level were drawn from; () for point masses."""
    return tuple(children.distribution for children in levels if children.distribution is not None)


def draws_children(params: SamplingParams) -> bool:
    """Return whether children for these parameters are drawn, with their distribution, or are the likeliest."""
    return strategy(params.strategy).samples_drafts(params)


def ranking_params(params: SamplingParams) -> SamplingParams:
    """Return the parameters by which point masses are ranked.

    Where the verifier draws by itself, its random numbers must not choose the tokens that it judges.
    """
    return replace(params, temperature=0.0) if draws_children(params) else params


def level_ids(request: Expansion, depth: int) -> list[tuple[int, ...]]:
    """Return the child ids of each level."""
    width = len(request.child_ids) // depth
    return [request.child_ids[level * width : (level + 1) * width] for level in range(depth)]
