"""What a draft model said after a session's text, as it becomes tokens of the target: one chain, and no model.

A piece of text is told in the target's tokens only when the token that it ends with cannot grow any more: when another
one follows it, when the draft has ended, or after `MOST_PIECES`, since a round does not wait for ever.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from specq.drafting.interface import CONTEXT
from specq.text import Vocabularies, whole_characters

MOST_PIECES = 3  # tokens of the draft model that one token of the target waits for
_NO_TEXT = b"\0"  # stands in the drafted text for a special token
NEARLY_SURE = -1e-6  # the log-probability of a token that begins within one of the draft model's


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

    pieces   the draft model's tokens after its own context
    told     the target's tokens after the context, those that are certain
    ended    no more can be drafted
    """

    vocabularies: Vocabularies
    pieces: list[_Piece] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    ended: bool = False
    _data: bytearray = field(default_factory=bytearray)
    _scores: dict[int, float] = field(default_factory=dict)  # by the byte that a piece begins with
    _told_end: int = 0  # of the text
    _num_waiting: int = 0  # pieces since the last that was told

    @property
    def node_id(self) -> int:
        """The draft model's node at the end of the chain."""
        return self.pieces[-1].node_id if self.pieces else CONTEXT

    def add(self, node_id: int, token_id: int, score: float) -> None:
        """Append what the draft model drafted."""
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
        """Tell all that is left: the draft model says no more."""
        self._tell(keeps_last=False)
        self.ended = True

    def _tell_special(self, token_id: int) -> None:
        """Tell a special token, if the target has it and all before it is told: none is drafted after one."""
        special_id = self.vocabularies.target_special(token_id)
        if special_id is not None and self._told_end == len(self._data) - len(_NO_TEXT):
            score, self._told_end = self._scores[self._told_end], len(self._data)
            self.told.append(Told(special_id, score, self._told_end))

    def _tell(self, *, keeps_last: bool) -> None:
        """Cut what is not told yet into tokens of the target, as far as that is exact."""
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
        """Take off the first `count` tokens of the target, which were committed; return the draft model's that are
        committed with them: those that end there or before."""
        end = self.told[count - 1].end if count else 0
        followed = [piece for piece in self.pieces if piece.end <= end]
        start = followed[-1].end if followed else 0
        del self.told[:count], self.pieces[: len(followed)], self._data[:start]
        self.told = [told._replace(end=told.end - start) for told in self.told]
        self.pieces = [piece._replace(end=piece.end - start) for piece in self.pieces]
        self._scores = {at - start: score for at, score in self._scores.items() if at >= start}
        self._told_end -= start
        return followed
