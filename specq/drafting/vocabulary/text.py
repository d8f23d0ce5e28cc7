"""`text`: string-level matching (Timor et al. 2025).

The source is "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies",
string-level exact match.

The draft model continues the text greedily in its own tokens. Its output becomes text, which the target's tokenizer
cuts. So any proposer can draft any token of the target. But nodes are point masses with one child each, even if the job
samples.

A piece of text becomes target tokens only when its last token cannot grow. That is when another token follows it, when
the draft has ended, or after `MOST_PIECES`, because a round must not wait without end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from specq.drafting.interface import CONTEXT, NO_CHILDREN, Children, Expansion
from specq.drafting.vocabulary.retelling import RetellingDrafter, RetoldSession
from specq.protocol import EngineError, Int32Array, SamplingParams
from specq.text import Retold, Vocabularies, whole_characters

MOST_PIECES = 3  # draft tokens that one token of the target waits for
_NO_TEXT = b"\0"  # stands for a special token in the drafted text
NEARLY_SURE = -1e-6  # log-probability of a token that begins inside one of the draft model's tokens


class Told(NamedTuple):
    """A drafted token of the target, its log-probability, and where it ends in the drafted text."""

    token_id: int
    score: float
    end: int


class _Piece(NamedTuple):
    """A token of the draft model: its node, and where it ends in the drafted text."""

    node_id: int
    token_id: int
    end: int


@dataclass(slots=True)
class DraftedText:
    """The chain that follows a session's text.

    pieces   the draft model's tokens after its own context.
    `told`     the target's tokens after the context that are certain.
    ended    no more can be drafted.
    """

    vocabularies: Vocabularies
    pieces: list[_Piece] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    ended: bool = False
    _data: bytearray = field(default_factory=bytearray)
    _scores: dict[int, float] = field(default_factory=dict)  # by the byte where a piece begins
    _told_end: int = 0  # where the certain tokens end in the text
    _num_waiting: int = 0  # pieces since the last certain token

    @property
    def node_id(self) -> int:
        """The draft model's node at the end of the chain."""
        return self.pieces[-1].node_id if self.pieces else CONTEXT

    def add(self, node_id: int, token_id: int, score: float) -> None:
        """Append a drafted token."""
        draft = self.vocabularies.draft
        spelled = draft.tokens[token_id] if token_id < len(draft.tokens) else None
        if spelled is None:
            self.end()
        self._scores[len(self._data)] = min(score, NEARLY_SURE)
        self._data += spelled or _NO_TEXT
        self.pieces.append(_Piece(node_id, token_id, len(self._data)))
        self._num_waiting += 1
        if spelled is None:
            self._tell_special(token_id)
        else:
            self._tell(keeps_last=self._num_waiting < MOST_PIECES)

    def end(self) -> None:
        """Convert the rest to target tokens: the draft model has ended."""
        self._tell(keeps_last=False)
        self.ended = True

    def _tell_special(self, token_id: int) -> None:
        """Convert a special token, if the target has it and all text before it is converted; else drop it."""
        special_id = self.vocabularies.target_special(token_id)
        if special_id is not None and self._told_end == len(self._data) - len(_NO_TEXT):
            score, self._told_end = self._scores[self._told_end], len(self._data)
            self.told.append(Told(special_id, score, self._told_end))

    def _tell(self, *, keeps_last: bool) -> None:
        """Convert the rest of the text to tokens of the target, as far as that is exact."""
        data = bytes(self._data[self._told_end :])
        data = data[: whole_characters(data)]
        target = self.vocabularies.target
        token_ids = target.encode(data)
        if target.decode(token_ids) != data:
            self.ended = True
            return
        for token_id in token_ids[:-1] if keeps_last else token_ids:
            begin, self._told_end = self._told_end, self._told_end + len(target.tokens[token_id] or b"")
            score = sum(score for at, score in self._scores.items() if begin <= at < self._told_end)
            self.told.append(Told(token_id, min(score, NEARLY_SURE), self._told_end))
            self._num_waiting = int(keeps_last)

    def follow(self, count: int) -> list[_Piece]:
        """Remove the first `count` tokens of the target, which were committed.

        Returns the draft model's tokens that are committed with them, up to the same end.
        """
        end = self.told[count - 1].end if count else 0
        followed = [piece for piece in self.pieces if piece.end <= end]
        start = followed[-1].end if followed else 0
        del self.told[:count], self.pieces[: len(followed)], self._data[:start]
        self.told = [told._replace(end=told.end - start) for told in self.told]
        self.pieces = [piece._replace(end=piece.end - start) for piece in self.pieces]
        self._scores = {at - start: score for at, score in self._scores.items() if at >= start}
        self._told_end -= start
        return followed


@dataclass(slots=True)
class _Session(RetoldSession):
    """A session and its drafted text.

    nodes          for each node the number of drafted tokens up to its end, counted from the session's beginning.
    num_followed   how many of these were committed.
    """

    drafted: DraftedText
    nodes: dict[int, int] = field(default_factory=dict)
    num_followed: int = 0
    next_id: int = 0  # of the draft model's nodes

    def depth(self, node_id: int) -> int:
        """Return how many drafted tokens lead from the context to a node; 0 for the context."""
        if node_id == CONTEXT:
            return 0
        if node_id not in self.nodes:
            raise EngineError(f"draft node {node_id} is unknown or was removed")
        return self.nodes[node_id] - self.num_followed


class TextVocabulary(RetellingDrafter[_Session]):
    """Drafts text that the target's tokenizer cuts. See the module; the arguments are those of `RetellingDrafter`."""

    def _session(self, token_ids: list[int], params: SamplingParams) -> _Session:
        greedy = replace(params, temperature=0.0)
        return _Session(greedy, Retold(self.vocabularies, token_ids), DraftedText(self.vocabularies))

    def commit(self, session_id: int, token_ids: Int32Array, path: Sequence[int]) -> None:
        """Keep the drafts beyond the committed tokens if all of these were drafted; else start from scratch."""
        session, tokens, followed = self._sessions[session_id], token_ids.tolist(), len(path)
        pieces = session.drafted.follow(followed)
        own = [piece.token_id for piece in pieces]
        session.text.follow(tokens[:followed], own)
        if own:
            self.draft.commit(session_id, np.array(own, np.int32), [piece.node_id for piece in pieces])
        session.num_followed += followed
        session.nodes = {i: end for i, end in session.nodes.items() if end > session.num_followed}
        if followed < len(tokens):
            session.nodes.clear()
            session.drafted = DraftedText(self.vocabularies)
            self._correct(session_id, tokens[followed:])

    def expand(self, requests: Sequence[Expansion]) -> list[Children]:
        """Draft as far as the requested nodes need, all sessions in a pass. Each node has at most one child."""
        depths = [self._sessions[request.session_id].depth(request.node_id) for request in requests]
        needed = dict[int, int]()
        for request, depth in zip(requests, depths, strict=True):
            if request.child_ids:
                needed[request.session_id] = max(needed.get(request.session_id, 0), depth + 1)
        while short := [i for i, count in needed.items() if self._is_short(self._sessions[i].drafted, count)]:
            self._draft_on(short)
        return [self._answer(request, depth) for request, depth in zip(requests, depths, strict=True)]

    def _is_short(self, drafted: DraftedText, count: int) -> bool:
        return len(drafted.told) < count and not drafted.ended

    def _draft_on(self, session_ids: Sequence[int]) -> None:
        """Let the draft model draft one more of its tokens for each session."""
        sessions = [self._sessions[session_id] for session_id in session_ids]
        asked = [
            Expansion(session_id, session.drafted.node_id, (session.next_id,))
            for session_id, session in zip(session_ids, sessions, strict=True)
        ]
        for session, children in zip(sessions, self.draft.expand(asked), strict=True):
            if len(children.token_ids):
                session.drafted.add(session.next_id, int(children.token_ids[0]), float(children.scores[0]))
                session.next_id += 1
            else:
                session.drafted.end()

    def _answer(self, request: Expansion, depth: int) -> Children:
        session = self._sessions[request.session_id]
        if not request.child_ids or depth >= len(session.drafted.told):
            return NO_CHILDREN
        told = session.drafted.told[depth]
        session.nodes[request.child_ids[0]] = session.num_followed + depth + 1
        return Children(np.array([told.token_id], np.int32), np.array([told.score], np.float32))
