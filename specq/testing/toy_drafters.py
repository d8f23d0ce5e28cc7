"""Toy drafters for the text of `specq.testing.toy`: for draft workers, and of each kind for a verifier.

`commit_one` is for one session at a chain drafter, which takes many at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from specq.drafting import ChainDrafter, Chains, Children, Drafter, Expansion, Pending, draws_children
from specq.drafting.interface import NodeChains
from specq.drafting.medusa.interface import HiddenRow
from specq.drafting.trees.interface import DeviceNodes, Grown, TreeRequest
from specq.drafting.trees.ranked import Ranked
from specq.protocol import (
    DraftDistribution,
    EngineError,
    Float32Array,
    Int32Array,
    IntpArray,
    ModelInfo,
    SamplingParams,
)
from specq.testing.growth import Growth, grow, lines_of
from specq.testing.toy import VOCAB, next_token, toy_info, toy_text
from specq.verifier.sources import Followed


class ToyProposer(Drafter):
    """Drafts the toy target's tokens, with a wrong first choice at every `wrong_every`-th position (0: never).

    The right token is then the second choice, or missing if `blind`. Sampled children are drawn from a distribution
    that gives the first choice half of the weight.
    """

    def __init__(self, info: ModelInfo | None = None, *, wrong_every: int = 0, blind: bool = False) -> None:
        self.info = info or toy_info("toy-draft")
        self.wrong_every, self.blind = wrong_every, blind
        self.random = np.random.default_rng(1)
        self.contexts: dict[int, list[int]] = {}
        self.params: dict[int, SamplingParams] = {}
        self.nodes: dict[int, dict[int, list[int]]] = {}  # session -> node id -> its path of tokens
        self.pass_s, self.busy_s = 0.001, 0.0  # one pass and all passes, by the clock of a simulated world

    def open(self, session_id: int, token_ids: Int32Array, params: SamplingParams, owner: str = "") -> None:
        self.contexts[session_id], self.params[session_id] = token_ids.tolist(), params
        self.nodes[session_id] = {-1: []}

    def close(self, session_id: int) -> None:
        for table in (self.contexts, self.params, self.nodes):
            table.pop(session_id, None)

    def commit(self, session_id: int, token_ids: Int32Array, path: Sequence[int]) -> None:
        tokens = token_ids.tolist()
        nodes = self.nodes[session_id]
        assert [nodes[node_id][-1] for node_id in path] == tokens[: len(path)], "the path is not what was committed"
        kept = {
            i: p[len(tokens) :] for i, p in nodes.items() if len(path) == len(tokens) and p[: len(tokens)] == tokens
        }
        self.contexts[session_id].extend(tokens)
        self.nodes[session_id] = {-1: []} | {i: p for i, p in kept.items() if p}

    def expand(self, requests: Sequence[Expansion]) -> list[Children]:
        self.busy_s += self.pass_s
        return [self._children(request) for request in requests]

    def _children(self, request: Expansion) -> Children:
        nodes = self.nodes[request.session_id]
        path = nodes[request.node_id]
        context = self.contexts[request.session_id] + path
        right = next_token(context, self.params[request.session_id].seed)
        others = [1 + (right + k) % (VOCAB - 1) for k in range(len(request.child_ids))]
        wrong = self.wrong_every and len(context) % self.wrong_every == 0
        ranked = ([others[0], *([] if self.blind else [right]), *others[1:]] if wrong else [right, *others])[
            : len(request.child_ids)
        ]
        children = self._drawn(ranked) if draws_children(self.params[request.session_id]) else _ranked(ranked)
        for node_id, token in zip(request.child_ids, children.token_ids.tolist(), strict=False):
            nodes[node_id] = [*path, token]
        return children

    def _drawn(self, ranked: list[int]) -> Children:
        ids = np.array(ranked, np.int32)
        weights = np.array([60_000, *[60_000 // len(ranked)] * (len(ranked) - 1)], np.uint16)
        order = self.random.permutation(len(ranked)) if self.random.random() < 0.5 else np.arange(len(ranked))
        return Children(ids[order], np.full(len(ranked), np.log(0.5), np.float32), DraftDistribution(ids, weights))


def _ranked(ranked: list[int]) -> Children:
    chances = [0.8, *[0.1] * (len(ranked) - 1)]
    return Children(np.array(ranked, np.int32), np.log(np.array(chances, np.float32)))


class ToyChains(NodeChains):
    """Chains for a verifier's own drafter: a `ToyProposer`, level by level.

    It checks that sessions are opened and closed between two rounds.
    """

    drafter: ToyProposer

    def __init__(self, drafter: ToyProposer | None = None) -> None:
        super().__init__(drafter or ToyProposer())
        self.most_sessions = 1000  # its capacity
        self.num_started: list[int] = []  # sessions of each round
        self.begun: Chains | None = None

    def open(self, session_id: int, token_ids: Int32Array, params: SamplingParams, owner: str = "") -> None:
        assert self.begun is None
        super().open(session_id, token_ids, params, owner)

    def close(self, session_id: int) -> None:
        assert self.begun is None
        super().close(session_id)

    def start(self, session_ids: Sequence[int], depth: int, width: int) -> Pending[Chains]:
        if len(self.drafter.contexts) > self.most_sessions:
            raise EngineError("no room")
        self.begun = super().start(session_ids, depth, width).collect()
        self.num_started.append(len(session_ids))
        return Pending(self.collect)

    def collect(self) -> Chains:
        """Return the chains of the current round."""
        assert self.begun is not None
        chains, self.begun = self.begun, None
        return chains


class UnreadToyChains(ToyChains):
    """The same, but its tokens are on a device before the host reads them.

    `failing`: errors of rounds that cannot be read, by the number of the round.
    """

    def __init__(self, drafter: ToyProposer | None = None) -> None:
        super().__init__(drafter)
        self.failing: dict[int, Exception] = {}
        self.num_unread = 0  # rounds requested before they were read

    def start(self, session_ids: Sequence[int], depth: int, width: int) -> Pending[Chains]:
        return Pending(super().start(session_ids, depth, width).collect, self.on_device)

    def on_device(self) -> Any:
        """Return the tokens of the current round's chains. See `ChainDrafter.start`."""
        assert self.begun is not None
        token_ids = self.begun.token_ids
        if token_ids.min() < 0 or any(self.begun.distributions):
            return None
        self.num_unread += 1
        return token_ids.swapaxes(0, 1).reshape(-1)

    def collect(self) -> Chains:
        chains = super().collect()
        error = self.failing.pop(len(self.num_started), None)
        if error is not None:
            raise error
        return chains


class ToyHeads:
    """Heads that know the toy texts of one prompt, and check the states that they receive.

    The states must be those from which the target made the last tokens. The first choice is wrong at every
    `wrong_every`-th position (0: never). The right token is then the second, or missing if `blind`.
    """

    def __init__(self, prompt: Sequence[int], num_heads: int = 4, *, wrong_every: int = 0, blind: bool = False) -> None:
        self.prompt, self.num_heads = list(prompt), num_heads
        self.wrong_every, self.blind = wrong_every, blind
        self.num_started: list[int] = []  # contexts of each round

    def start(
        self, states: Sequence[HiddenRow], params: Sequence[SamplingParams], lengths: Sequence[int], count: int
    ) -> Pending[Ranked]:
        self.num_started.append(len(states))
        count = min(count, VOCAB - 2)
        token_ids = np.zeros((len(states), self.num_heads, count), np.int32)
        for i, (state, of_context, length) in enumerate(zip(states, params, lengths, strict=True)):
            text = [*self.prompt, *toy_text(self.prompt, length + self.num_heads, of_context.seed)]
            _, position, token = state.values[state.row].tolist()
            assert (position, token) == (length - 2, text[length - 2]), "this is not the row that made the last token"
            for head in range(self.num_heads):
                token_ids[i, head] = self._ranked(text, length + head)[:count]
        scores = np.log(np.array([0.7, *[0.2 / count] * (count - 1)], np.float32))
        return Pending(lambda: Ranked(token_ids, np.broadcast_to(scores, token_ids.shape).copy()))

    def _ranked(self, text: Sequence[int], place: int) -> list[int]:
        right = text[place]
        others = [1 + (right + k) % (VOCAB - 1) for k in range(VOCAB - 2)]
        if not self.wrong_every or place % self.wrong_every:
            return [right, *others]
        return [others[0], *([] if self.blind else [right]), *others[1:]]


class ToyTrees:
    """A head that knows the toy texts of one prompt, and checks that it gets each row once, with the token behind it.

    The first choice is wrong at every `wrong_every`-th position (0: never). The right token is then the second, or
    missing if `blind`. After a wrong token its output is useless.
    """

    layers = (0, 1)
    limit_vocab = VOCAB
    runs_beside_host = False

    def __init__(self, *, wrong_every: int = 0, blind: bool = False) -> None:
        self.wrong_every, self.blind = wrong_every, blind
        self.texts: dict[int, list[int]] = {}  # session -> its tokens; 0 if unknown
        self.num_started: list[int] = []  # contexts of each round
        self.num_levels = 0

    def observe(self, values: Float32Array, followed: Sequence[Followed]) -> None:
        for one in followed:
            assert len(one.rows) == len(one.token_ids) > 0
            text = self.texts.setdefault(one.session_id, [0] * one.first)
            for place, (row, token) in enumerate(zip(one.rows, one.token_ids, strict=True), one.first):
                before = text[place - 1] if place <= len(text) and text[place - 1] else values[row][2]
                expected = [0, place - 1, before, 1, place - 1, before]
                assert values[row].tolist() == expected, "these are not the states before this token"
                text[place:] = [0] * (place - len(text)) + [token]

    def known(self, session_id: int) -> int:
        return len(self.texts.get(session_id, ()))

    def close(self, session_id: int) -> None:
        self.texts.pop(session_id, None)

    def start(self, requests: Sequence[TreeRequest]) -> Sequence[Pending[Grown]]:
        self.num_started.append(sum(len(one.session_ids) for one in requests))
        return [_growing(self.growth(one), one) for one in requests]

    def growth(self, request: TreeRequest) -> Growth:
        """Return the growth that ranks tokens for a request's trees, level by level."""
        texts = [[list(self.texts[session_id])] for session_id in request.session_ids]
        return ToyGrowth(self, texts, [params.seed for params in request.params])


def _growing(growth: Growth, request: TreeRequest) -> Pending[Grown]:
    """Return trees that a toy head grows.

    Trees of given level sizes are available before they are read, as on a device.
    """
    grown = cache(partial(grow, growth, request))

    def on_device() -> DeviceNodes | None:
        if not request.level_sizes:
            return None
        return DeviceNodes(grown().token_ids, lines_of(grown().parents, grown().depths))

    return Pending(grown, on_device)


class ToyGrowth:
    """Trees of a toy head. `texts`: of each row of the last level, from the beginning."""

    def __init__(self, head: ToyTrees, texts: list[list[list[int]]], seeds: list[int]) -> None:
        self._head, self._texts, self._seeds = head, texts, seeds

    def ranked(self, count: int) -> Ranked:
        self._head.num_levels += 1
        count = min(count, VOCAB - 2)
        token_ids = [
            [self._choices(text, seed)[:count] for text in of_context]
            for of_context, seed in zip(self._texts, self._seeds, strict=True)
        ]
        found = np.array(token_ids, np.int32)
        scores = np.log(np.array([0.7, *[0.2 / count] * (count - 1)], np.float32))
        return Ranked(found, np.broadcast_to(scores, found.shape).copy())

    def expand(self, parents: IntpArray, token_ids: Int32Array) -> None:
        self._texts = [
            [[*texts[parent], token] for parent, token in zip(behind, tokens, strict=True)]
            for texts, behind, tokens in zip(self._texts, parents.tolist(), token_ids.tolist(), strict=True)
        ]

    def _choices(self, text: Sequence[int], seed: int) -> list[int]:
        right = next_token(text, seed)
        others = [1 + (right + k) % (VOCAB - 1) for k in range(VOCAB - 2)]
        if not self._head.wrong_every or len(text) % self._head.wrong_every:
            return [right, *others]
        return [others[0], *([] if self._head.blind else [right]), *others[1:]]


def commit_one(chains: ChainDrafter, session_id: int, token_ids: Int32Array) -> int:
    """Append committed tokens to a session. Return how many of the tokens its last chain had predicted."""
    return int(chains.commit([session_id], np.array([len(token_ids)]), token_ids)[0])
