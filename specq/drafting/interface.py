"""What a draft worker needs of whatever drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self, runtime_checkable

import numpy as np

from specq.config import OwnOptions
from specq.protocol import (
    NO_TOKENS,
    ActivationRequest,
    DraftDistribution,
    Float32Array,
    Int32Array,
    ModelInfo,
    SamplingParams,
)
from specq.verification import strategy

CONTEXT = -1  # the node id that stands for the committed context


@dataclass(frozen=True, slots=True)
class Expansion:
    """A request for the children of one node.

    node_id   CONTEXT: what follows the committed context; else a node returned by an earlier `expand` and not cut since
    child_ids the ids that the children shall bear; their number is the number of children wanted
    """

    session_id: int
    node_id: int
    child_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Children:
    """The answer: at most len(child_ids) tokens, likeliest first, or in the order in which they were drawn.

    token_ids i32[c]; scores f32[c]: log-probability that the target commits the token, given that it commits the parent
                (of a drawn one: also given that it rejects the earlier siblings; known before the token was drawn)
    distribution   what they were drawn from, without replacement; None: they are point masses
    """

    token_ids: Int32Array
    scores: Float32Array
    distribution: DraftDistribution | None = None

    def first(self, count: int) -> Self:
        """Return the first `count` of them."""
        return replace(self, token_ids=self.token_ids[:count], scores=self.scores[:count])


NO_CHILDREN = Children(NO_TOKENS, np.zeros(0, np.float32))


class Proposer(Protocol):
    """What a draft worker needs of whatever drafts. Driven by one thread."""

    info: ModelInfo

    def open(self, session_id: int, token_ids: Int32Array, params: SamplingParams, owner: str = "") -> None:
        """Start a session with this context i32[n]; `params` are those to draft with; `draws_children` says whether
        children are drawn. What is kept of texts is shared among sessions of one owner only, as of `Engine.open`."""
        ...

    def commit(self, session_id: int, token_ids: Int32Array, path: Sequence[int]) -> None:
        """Append committed tokens i32[m]; `path` has the node ids of the first len(path) <= m of them. All nodes that
        do not descend from the last token's node are gone; descendants of it stay valid. If len(path) < m, all nodes
        are gone."""
        ...

    def close(self, session_id: int) -> None:
        """Forget a session; unknown ones are ignored."""
        ...

    def expand(self, requests: Sequence[Expansion]) -> list[Children]:
        """Answer all requests in one batched pass. Several requests may be of one session; a request never asks for
        the child of a node that the same call creates."""
        ...


@runtime_checkable
class RewindableProposer(Protocol):
    """A proposer that can take back what was committed, and keeps what it computed of the rest."""

    def rewind(self, session_id: int, length: int) -> None:
        """Forget the tokens of a session beyond so many, and all its nodes."""
        ...


@runtime_checkable
class ActivationReader(Protocol):
    """A proposer that reads the target's hidden states of the texts it drafts for; `activations`: which of them."""

    activations: ActivationRequest

    @property
    def width(self) -> int:
        """How many numbers a row has, of all layers together."""
        ...

    def observe(self, session_id: int, first: int, states: Float32Array) -> None:
        """Take in rows f32[n, width] of an open session, each of which stands before a token of the text, the first
        before the one at position `first`. What is known is skipped; behind a gap the text begins anew. The tokens may
        come later."""
        ...

    def knows(self, session_id: int) -> bool:
        """Return whether there are states of an open session to draft from; else `expand` gives no children."""
        ...


def draws_children(params: SamplingParams) -> bool:
    """Return whether children for these parameters are drawn, with their draft distribution; else they are the
    likeliest."""
    return strategy(params.strategy).samples_drafts(params)


def ranking_params(params: SamplingParams) -> SamplingParams:
    """Return by which parameters point masses are ranked. Where the verifier draws by itself, its noise must not choose
    what it judges."""
    return replace(params, temperature=0.0) if draws_children(params) else params


@dataclass(frozen=True, slots=True)
class ProposerSpec:
    """What a table has of a proposer before it is loaded. So the module of a spec imports neither torch nor a model.

    make          makes the proposer, given a model's directory or hub name and the keyword arguments that
                  `specq.processes.draft` names; here the heavy imports are
    options       the keys of [draft.NAME], which `make` takes as keyword arguments, too
    needs_model   False: it drafts from the text alone, and there is nothing to load or to warm up
    takes_heads   `make` takes `heads`, too: a directory of heads for the model
    reads_target  it reads the hidden states of a target: the model is a directory of heads, and `make` takes the
                  directory, GGUF file or hub name of the `target` and its `target_name`, too
    package       what must be installed for `make` to work, besides what the engine needs; "": nothing more
    takes_gguf    whether it loads GGUF files
    """

    make: Callable[..., Proposer]
    options: type[OwnOptions] = OwnOptions
    needs_model: bool = True
    takes_heads: bool = False
    reads_target: bool = False
    package: str = ""
    takes_gguf: bool = True


@runtime_checkable
class ChainProposer(Protocol):
    """A proposer that may have chains of its own."""

    @property
    def has_chains(self) -> bool:
        """Whether a chain costs it less than its levels one by one."""
        ...

    def expand_chain(self, requests: Sequence[Expansion], depth: int) -> list[list[Children]]:
        """Answer each request with the children at `depth` levels, those of a level below the first child of the one
        before. A request's child_ids are those of all levels, one level after the other, equally many at each."""
        ...


def expand_chain(proposer: Proposer, requests: Sequence[Expansion], depth: int) -> list[list[Children]]:
    """Draft chains as `ChainProposer.expand_chain` does, with any proposer."""
    if depth > 1 and isinstance(proposer, ChainProposer):
        return proposer.expand_chain(requests, depth)
    return chain_by_passes(proposer, requests, depth)


def chain_by_passes(proposer: Proposer, requests: Sequence[Expansion], depth: int) -> list[list[Children]]:
    """Draft chains by one `expand` a level; a chain ends early where a node has no children."""
    answers: list[list[Children]] = [[] for _ in requests]
    alive = list(range(len(requests)))
    for level in range(depth):
        asked = [_level(requests[i], level, depth) for i in alive]
        for i, children in zip(alive, proposer.expand(asked), strict=True):
            answers[i].append(children)
        alive = [i for i in alive if len(answers[i][-1].token_ids)]
        if not alive:
            break
    return answers


def _level(request: Expansion, level: int, depth: int) -> Expansion:
    """Return the request for one level of a chain."""
    ids = level_ids(request, depth)
    parent = request.node_id if level == 0 else ids[level - 1][0]
    return Expansion(request.session_id, parent, ids[level])


def level_ids(request: Expansion, depth: int) -> list[tuple[int, ...]]:
    """Return the child ids of each level."""
    width = len(request.child_ids) // depth
    return [request.child_ids[level * width : (level + 1) * width] for level in range(depth)]
