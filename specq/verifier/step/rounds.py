"""A round is what one step commits to one session. The rounds of all sessions of a step are stored in arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, overload

import numpy as np

from specq.protocol import (
    CORRECTED,
    NO_TOKENS,
    ORIGIN_CODES,
    ORIGIN_OF_LANE,
    PLAIN,
    Float64Array,
    Int32Array,
    IntpArray,
    UInt8Array,
)
from specq.verification import ends_of, starts_of
from specq.verifier.sessions.session import Session
from specq.verifier.trees import NONE, DraftTrees
from specq.verifier.trees.arrays import FIRST_OWN_LANE, MAX_TABLE_SIZE

NO_FLAGS: UInt8Array = np.zeros(0, np.uint8)
NO_FLAGS.flags.writeable = False

PLAIN_CODE = ORIGIN_CODES[PLAIN]
# The columns of `Rounds`.
OF_SESSIONS = "places", "base_lens", "num_tokens", "num_nodes", "first_arrived"
OF_TOKENS = "token_ids", "origins"
OF_NODES = "nodes", "node_ids", "lanes", "is_accepted", "levels", "offers"


class Round(NamedTuple):
    """The round of one session: what a step committed to it.

    base_len    the committed length before the round.
    token_ids   i32[m]: the accepted path, then the correction or bonus, up to the token that ends the text.
    nodes       i32[n]: the verified nodes; path: the places of the accepted nodes among them.
    origins     u8[m]: the code of each token's origin (`specq.protocol.logprobs`).
    node_ids    i32[n], lanes u8[n], is_accepted u8[n]: the same nodes, as a verdict reports them.
    first_arrived  when the oldest node arrived; 0 without nodes.
    """

    session: Session
    base_len: int
    token_ids: Int32Array
    origins: UInt8Array
    nodes: Int32Array
    node_ids: Int32Array
    lanes: UInt8Array
    is_accepted: UInt8Array
    first_arrived: float

    @property
    def path(self) -> tuple[int, ...]:
        return tuple(self.is_accepted.nonzero()[0].tolist())

    def waited_us(self, started: float) -> int:
        """Return the microseconds that the oldest verified node had waited when the step started."""
        return int((started - self.first_arrived) * 1e6) if len(self.nodes) else 0


class Rounds(Sequence[Round]):
    """Rounds of n sessions, in arrays.

    The fields are those of `Round`, one session after the other.

    places, base_lens, num_tokens, num_nodes  [n].
    first_arrived  f64[n].
    token_ids, origins  [all].
    nodes, node_ids, lanes, is_accepted  [nodes].
    path        i64[all]: the place of each token's node in `nodes`; NONE for the last token of each session, unless
                that token was cut off.
    """

    def __init__(
        self,
        sessions: list[Session],
        places: IntpArray,
        base_lens: Int32Array,
        num_tokens: IntpArray,
        token_ids: Int32Array,
        num_nodes: IntpArray,
        nodes: Int32Array,
        path: IntpArray,
    ) -> None:
        self.sessions, self.places, self.base_lens = sessions, places, base_lens
        self.num_tokens, self.token_ids = num_tokens, token_ids
        self.num_nodes, self.nodes = num_nodes, nodes
        self.origins: UInt8Array = np.empty(len(token_ids), np.uint8)
        self.origins.fill(PLAIN_CODE)
        self.node_ids, self.lanes, self.is_accepted = NO_TOKENS, NO_FLAGS, NO_FLAGS
        self.levels, self.offers = NO_TOKENS, NO_TOKENS
        self.first_arrived: Float64Array = np.zeros(len(sessions))
        if len(nodes):
            self._note_nodes(sessions[0].trees)
            self._note_path(sessions[0].trees, path)

    @property
    def num_finished(self) -> int:
        """The number of sessions that have ended."""
        return int(np.count_nonzero(self.sessions[0].trees.has_ended[self.places])) if self.sessions else 0

    @property
    def num_without_room(self) -> int:
        """The number of sessions that ended without drafts, for example because one token was left."""
        if not self.num_finished:
            return 0
        return int(np.count_nonzero(self.sessions[0].trees.has_ended[self.places] & (self.num_nodes == 0)))

    def _note_nodes(self, trees: DraftTrees) -> None:
        """Store what a verdict reports of the verified nodes, since the commit may remove them."""
        self.node_ids = trees.node_id[self.nodes]
        self.lanes = trees.lane_id[trees.node_lane[self.nodes]].astype(np.uint8)
        drafted = self.num_nodes > 0
        firsts = starts_of(self.num_nodes)[drafted]
        self.first_arrived[drafted] = np.minimum.reduceat(trees.arrived[self.nodes], firsts)
        explains = trees.explains[self.places] & drafted
        if np.count_nonzero(explains):
            ends = ends_of(self.num_nodes)
            for i in explains.nonzero()[0].tolist():
                own = self.nodes[ends[i] - self.num_nodes[i] : ends[i]]
                self.sessions[i].explained = _explained(own, trees)

    def _note_path(self, trees: DraftTrees, path: IntpArray) -> None:
        """Store which nodes were accepted, and the origin of each token.

        The target's own token is a correction if the path's end has a verified child.
        """
        is_drafted, own = path != NONE, np.arange(len(self))
        accepted, of_tokens = path[is_drafted], own.repeat(self.num_tokens)
        self.is_accepted = np.zeros(len(self.nodes), np.uint8)
        self.is_accepted[accepted] = 1
        ends = np.empty(len(self), np.int32)
        ends.fill(NONE)
        ends[of_tokens[is_drafted]] = self.nodes[accepted]  # of several in a session, the last one is written last
        parents = trees.parent[self.nodes]
        self.levels = trees.position[self.nodes] - self.base_lens.repeat(self.num_nodes)
        self.offers = offers_of(trees, self.nodes)
        hangs = parents == ends.repeat(self.num_nodes)
        codes = np.empty(len(self), np.uint8)  # of the target's own tokens
        codes.fill(PLAIN_CODE)
        codes[own.repeat(self.num_nodes)[hangs]] = ORIGIN_CODES[CORRECTED]
        self.origins = codes[of_tokens]
        self.origins[is_drafted] = ORIGIN_OF_LANE[self.lanes[accepted]]

    def take(self, which: IntpArray) -> Rounds:
        """Return some of the rounds, by ascending places."""
        chosen = np.zeros(len(self), np.bool_)
        chosen[which] = True
        part = Rounds.__new__(Rounds)
        part.sessions = [self.sessions[i] for i in which.tolist()]
        of_tokens, of_nodes = chosen.repeat(self.num_tokens), chosen.repeat(self.num_nodes)
        for names, places in ((OF_SESSIONS, which), (OF_TOKENS, of_tokens), (OF_NODES, of_nodes)):
            for name in names:
                setattr(part, name, getattr(self, name)[places])
        return part

    @cached_property
    def _each(self) -> list[Round]:
        firsts, node_firsts, arrived = 0, 0, self.first_arrived.tolist()
        counts = zip(self.num_tokens.tolist(), self.num_nodes.tolist(), strict=True)
        found = []
        for i, (num_tokens, num_nodes) in enumerate(counts):
            span, own = slice(firsts, firsts + num_tokens), slice(node_firsts, node_firsts + num_nodes)
            firsts, node_firsts = span.stop, own.stop
            done = Round(
                *(self.sessions[i], int(self.base_lens[i]), self.token_ids[span], self.origins[span]),
                nodes=self.nodes[own],
                node_ids=self.node_ids[own],
                lanes=self.lanes[own],
                is_accepted=self.is_accepted[own],
                first_arrived=arrived[i],
            )
            found.append(done)
        return found

    def __len__(self) -> int:
        return len(self.sessions)

    def __iter__(self) -> Iterator[Round]:
        return iter(self._each)

    @overload
    def __getitem__(self, index: int) -> Round: ...
    @overload
    def __getitem__(self, index: slice) -> list[Round]: ...
    def __getitem__(self, index: int | slice) -> Round | list[Round]:
        return self._each[index]


# i32[256]: the bit of each lane in `Rounds.offers`. All lanes of remote drafters share the lowest bit.
BIT_OF_LANE: Int32Array = 1 << np.maximum(np.arange(256, dtype=np.int32) - (FIRST_OWN_LANE - 1), 0)


def offers_of(trees: DraftTrees, nodes: Int32Array) -> Int32Array:
    """Return the bits of the lanes that drafted each node, i32[n]."""
    refs, table_next = trees.first_ref[nodes], trees.table_next.reshape(-1)
    at, found = np.arange(len(nodes)), np.zeros(len(nodes), np.int32)
    while True:
        is_named = refs != NONE
        at, refs = at[is_named], refs[is_named]
        if not len(at):
            return found
        found[at] |= BIT_OF_LANE[trees.lane_id[refs // MAX_TABLE_SIZE]]
        refs = table_next[refs]


def _explained(nodes: Int32Array, trees: DraftTrees) -> dict[str, Any]:
    """Return what a verdict reports of verified nodes to a job with the option `explain`."""
    places = {node: place for place, node in enumerate(nodes.tolist())}
    parents = [places.get(parent, NONE) for parent in trees.parent[nodes].tolist()]
    probs = np.exp(np.minimum(trees.score[nodes], 0.0)).astype(np.float32)
    return {"node_tokens": trees.token[nodes], "node_parents": np.array(parents, np.int32), "node_probs": probs}


NOTHING = np.zeros(0, np.intp)
NO_ROUNDS = Rounds([], NOTHING, NO_TOKENS, NOTHING, NO_TOKENS, NOTHING, NO_TOKENS, NOTHING)


def in_one(parts: Sequence[Rounds]) -> Rounds:
    """Join the rounds of several parts of a step."""
    parts = [part for part in parts if len(part)]
    if len(parts) < 2:
        return parts[0] if parts else NO_ROUNDS
    joined = Rounds.__new__(Rounds)
    joined.sessions = [session for part in parts for session in part.sessions]
    for name in (*OF_SESSIONS, *OF_TOKENS, *OF_NODES):
        setattr(joined, name, np.concatenate([getattr(part, name) for part in parts]))
    return joined
