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

from specq.drafting.draft_model.kv_trees import NO_SLOT, Node
from specq.drafting.eagle3.row_head import EagleRows, RowHead
from specq.drafting.interface import CONTEXT, Expansion
from specq.drafting.trees.remote import FedDrafter, FedSession
from specq.drafting.trees.texts import FollowedText
from specq.protocol import BoolArray, ModelInfo, SamplingParams
from specq.verification import Logits

MOST_PREDICTED = 64  # committed tokens without true states
MOST_TREE_ROWS = 1024  # rows of a session; beyond this all are computed again


@dataclass(slots=True)
class _Session(FedSession):
    """A text and the tree below it.

    tail     the committed tokens behind those with rows from true states. Their `slot`, and that of `nodes`, is the
             row's index in the range of the cache.
    states   the output of each row, by slot.
    known    the part of the text below which the rows were computed: its first token, and how many rows.
    """

    tail: list[Node] = field(default_factory=list)
    states: dict[int, Any] = field(default_factory=dict)
    known: tuple[int, int] = (0, 0)

    def advance(self, token_ids: list[int], path: Sequence[int]) -> None:
        """Append committed tokens, also to the tail; see `FedSession`."""
        own = [self.nodes[node_id] for node_id in path]
        for i, token in enumerate(token_ids[len(path) :], len(path)):
            own.append(Node(token, self.length + i, CONTEXT))
        FedSession.advance(self, token_ids, path)
        self.tail += own

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


class EagleTrees(FedDrafter[_Session]):
    """Drafts trees from hidden states that a verifier sends. See the module."""

    most_unknown = MOST_PREDICTED

    def __init__(self, head: RowHead, info: ModelInfo, **options: Any) -> None:
        """Set up sessions for a head; options as for `FedDrafter`."""
        super().__init__(head, info, **options)
        self._eagle = head

    def _session(self, params: SamplingParams, token_ids: list[int]) -> _Session:
        return _Session(params, len(token_ids), token_ids=token_ids)

    def _logits_behind(self, requests: Sequence[Expansion]) -> Logits:
        lines = self._lines(requests)
        self._compute(lines)
        return self._eagle.logits([self._state(line) for line in lines])

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
