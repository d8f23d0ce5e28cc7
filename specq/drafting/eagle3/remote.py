"""`eagle3`: an EAGLE-3 head (arXiv 2503.01840) in a draft worker, away from the target whose hidden states it reads.

The verifier sends the states of the text (`Activations`). Their rows are computed as beside the verifier
(`specq.drafting.eagle3.row_head`). For tokens committed since then and for drafted nodes, the head continues with its
own states, as SSD's EAGLE mode does. When true states arrive, all rows beyond them are computed again. Each waits until
a node below it is expanded. Children that were drafted before stay, because they are only hints.

The head drafts nothing without states, or beyond MOST_PREDICTED tokens without states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from specq.drafting.draft_model.children import ChildMaker, ChildRequest
from specq.drafting.draft_model.kv_trees import NO_SLOT, Node, TreeSession
from specq.drafting.eagle3.row_head import EagleRows, RowHead
from specq.drafting.interface import CONTEXT, NO_CHILDREN, Children, Drafter, Expansion
from specq.drafting.trees.texts import FollowedText
from specq.protocol import (
    ActivationRequest,
    BoolArray,
    Float32Array,
    Int32Array,
    ModelInfo,
    SamplingParams,
)
from specq.verifier.sources import Followed

MOST_PREDICTED = 64  # committed tokens without true states
MOST_WAITING = 4096  # rows of states whose tokens are not known yet
MOST_TREE_ROWS = 1024  # rows of a session; beyond this all are computed again


@dataclass(slots=True)
class _Session(TreeSession):
    """A text and the tree below it.

    tail     the committed tokens behind those with rows from true states. Their `slot`, and that of `nodes`, is the
             row's index in the range of the cache.
    states   the output of each row, by slot.
    waiting  states [n, width] that stand before the tokens from `first` on, ascending.
    known    the part of the text below which the rows were computed: its first token, and how many rows.
    """

    token_ids: list[int] = field(default_factory=list)
    tail: list[Node] = field(default_factory=list)
    states: dict[int, Any] = field(default_factory=dict)
    waiting: list[tuple[int, Any]] = field(default_factory=list)
    known: tuple[int, int] = (0, 0)

    def above(self, node_id: int) -> list[Node]:
        """Return the tail, the node's ancestors, and the node: all between the true rows and its children."""
        return self.tail + [self.nodes[i] for i in self.line(node_id)]

    def forget_rows(self) -> None:
        """Let all rows beyond those from true states be computed again."""
        for node in (*self.tail, *self.nodes.values()):
            node.slot = NO_SLOT
        self.states.clear()

    def follow(self, end: int) -> None:
        """Let the tail be the committed tokens from position `end` on."""
        kept = self.tail[max(len(self.tail) - (self.length - end), 0) :]
        before = self.token_ids[end : self.length - len(kept)]
        self.tail = [Node(token, end + i, CONTEXT) for i, token in enumerate(before)] + kept


class _Line(NamedTuple):
    """What must be computed for an expansion."""

    session: _Session
    text: FollowedText
    nodes: list[Node]


class EagleTrees(Drafter):
    """Drafts trees from hidden states that a verifier sends. See the module."""

    def __init__(
        self,
        head: RowHead,
        info: ModelInfo,
        *,
        form: str,
        window: int,
        distribution_size: int = 32,
        rng: np.random.Generator | None = None,
    ) -> None:
        """Set up sessions for a head.

        info           of the head, with the tokenizer and the sizes of its target.
        form, window   as in `ActivationRequest`.
        """
        self.info, self.activations = info, ActivationRequest(head.layers, form, window)
        self.width, self._eagle = head.width, head
        self._maker = ChildMaker(distribution_size, rng or np.random.default_rng(), head.token_ids)
        self._sessions: dict[int, _Session] = {}

    # --- texts
    # ------------------------------------------------------------------------------------------------------------

    def open(self, session_id: int, token_ids: Int32Array, params: SamplingParams, owner: str = "") -> None:
        """Start a session; see `Drafter.open`."""
        self._sessions[session_id] = _Session(params, len(token_ids), token_ids=token_ids.tolist())

    def close(self, session_id: int) -> None:
        """Forget a session; see `Drafter.close`."""
        self._sessions.pop(session_id, None)
        self._eagle.close(session_id)

    def commit(self, session_id: int, token_ids: Int32Array, path: Sequence[int]) -> None:
        """Append committed tokens and move the root of the nodes; see `Drafter.commit`."""
        session = self._sessions[session_id]
        own = [session.nodes[node_id] for node_id in path]
        for i, token in enumerate(token_ids[len(path) :].tolist(), len(path)):
            own.append(Node(token, session.length + i, CONTEXT))
        session.cut(path[-1] if len(path) and len(path) == len(token_ids) else None)
        session.tail += own
        session.token_ids += token_ids.tolist()
        session.length = len(session.token_ids)
        self._feed(session_id, session)

    def observe(self, session_id: int, first: int, states: Float32Array) -> None:
        """Store the target's hidden states; see `Drafter.observe`."""
        session = self._sessions[session_id]
        session.waiting.append((first, self._eagle.copied(states)))
        self._feed(session_id, session)
        while sum(len(rows) for _, rows in session.waiting) > MOST_WAITING:
            session.waiting.pop(0)

    def knows(self, session_id: int) -> bool:
        """Return whether there are states to draft from; see `Drafter.knows`."""
        known = self._eagle.known(session_id)
        return known > 0 and self._sessions[session_id].length - known <= MOST_PREDICTED

    def _feed(self, session_id: int, session: _Session) -> None:
        """Give the head the states whose tokens are known by now."""
        waiting, session.waiting = session.waiting, []
        for first, rows in waiting:
            count = min(max(session.length - first, 0), len(rows))
            if count:
                token_ids = session.token_ids[first : first + count]
                self._eagle.observe(rows, [Followed(session_id, first, token_ids, range(count))])
            if count < len(rows):
                session.waiting.append((first + count, rows[count:]))

    # --- drafts
    # -----------------------------------------------------------------------------------------------------------

    def expand(self, requests: Sequence[Expansion]) -> list[Children]:
        """Draft the children of all requested nodes; none at the maximum length or without states.

        See `Drafter.expand`.
        """
        positions = [self._sessions[one.session_id].child_position(one.node_id) for one in requests]
        asked = [
            i
            for i, (one, position) in enumerate(zip(requests, positions, strict=True))
            if one.child_ids and position < self.info.max_length and self.knows(one.session_id)
        ]
        found = [NO_CHILDREN] * len(requests)
        if not asked:
            return found
        lines = self._lines([requests[i] for i in asked])
        self._compute(lines)
        logits = self._eagle.logits([self._state(line) for line in lines])
        wanted = [
            ChildRequest(line.session.params, positions[i], len(requests[i].child_ids), requests[i].session_id)
            for i, line in zip(asked, lines, strict=True)
        ]
        for i, children in zip(asked, self._maker.make(wanted, logits, self.info.num_tokens), strict=True):
            found[i] = children.first(len(requests[i].child_ids))
            self._sessions[requests[i].session_id].add(requests[i], positions[i], found[i])
        return found

    def _lines(self, requests: Sequence[Expansion]) -> list[_Line]:
        """Compute the new rows from true states; return for each request the line below them."""
        ids = list(dict.fromkeys(one.session_id for one in requests))
        self._eagle.follow(ids)
        for session_id in ids:
            session, text = self._sessions[session_id], self._eagle.texts[session_id]
            if session.known != (text.first, text.length):
                session.known = text.first, text.length
                session.follow(text.end)
                session.forget_rows()
            elif len(session.states) > MOST_TREE_ROWS:
                session.forget_rows()
        return [
            _Line(
                self._sessions[one.session_id],
                self._eagle.texts[one.session_id],
                self._sessions[one.session_id].above(one.node_id),
            )
            for one in requests
        ]

    def _compute(self, lines: Sequence[_Line]) -> None:
        """Compute the missing rows, level by level, in one pass each for all sessions."""
        for level in zip_longest(*(_missing(line) for line in lines)):
            self._pass([(line, depth) for line, depth in zip(lines, level, strict=True) if depth is not None])

    def _pass(self, wanted: Sequence[tuple[_Line, int]]) -> None:
        """Compute one row for each line: the node at this depth, whose ancestors are computed. Lines may share it."""
        by_text: dict[int, list[tuple[_Line, int]]] = {}
        for line, depth in {id(line.nodes[depth]): (line, depth) for line, depth in wanted}.values():
            by_text.setdefault(line.text.place, []).append((line, depth))
        groups = list(by_text.values())
        rows = [row for own in groups for row in own]
        firsts = [own[0][0].text.length + len(own[0][0].session.states) for own in groups]
        self._eagle.cache.reserve(max(first + len(own) for first, own in zip(firsts, groups, strict=True)))
        counts = np.array([len(own) for own in groups])
        slots = np.concatenate([first + np.arange(len(own)) for first, own in zip(firsts, groups, strict=True)])
        nodes = [line.nodes[depth] for line, depth in rows]
        found = self._eagle.run(
            EagleRows(
                [own[0][0].text.place for own in groups],
                counts,
                [self._state(line, depth) for line, depth in rows],
                np.array([node.token_id for node in nodes]),
                np.array([node.position - 1 for node in nodes]),  # the position of the state before it
                slots,
                _seen(groups, firsts),
            )
        )
        given = [state for of_text in found for state in of_text]
        for (line, _), node, slot, state in zip(rows, nodes, slots.tolist(), given, strict=True):
            node.slot, line.session.states[slot] = slot, state

    def _state(self, line: _Line, depth: int | None = None) -> Any:
        """Return the state [hidden] before the node at this depth of a line, or behind the whole line."""
        before = line.nodes if depth is None else line.nodes[:depth]
        return line.session.states[before[-1].slot] if before else self._eagle.last(line.text)


def _seen(groups: Sequence[Sequence[tuple[_Line, int]]], firsts: Sequence[int]) -> BoolArray:
    """Return which rows of its text each row of a pass sees, as in `EagleRows`.

    firsts: where the rows of each text are kept.
    """
    most = max(map(len, groups))
    is_seen = np.zeros((len(groups), most, max(firsts) + most), np.bool_)
    for of_text, group, first in zip(is_seen, groups, firsts, strict=True):
        for i, (line, depth) in enumerate(group):
            of_text[i, : line.text.length] = True
            of_text[i, [*(node.slot for node in line.nodes[:depth]), first + i]] = True
    return is_seen


def _missing(line: _Line) -> Iterator[int]:
    """Yield the depths of a line's nodes whose rows must be computed: the first missing one and all after."""
    first = next((i for i, node in enumerate(line.nodes) if node.slot == NO_SLOT), len(line.nodes))
    return iter(range(first, len(line.nodes)))
