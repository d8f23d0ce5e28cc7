"""The parts that sessions have in a step: as arrays for all of them, and one by one for whoever looks at one
session."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np

from specq.protocol import MODES, NO_TOKENS, BoolArray, Int32Array, IntpArray, SessionStep
from specq.verification import StepBatch, ends_of
from specq.verifier.sessions.session import Session


@dataclass(frozen=True, slots=True)
class ScheduledSession:
    """One session's part in a step; nodes i32[n]: those of its tree that are verified, as in `step.tree`."""

    session: Session
    step: SessionStep
    nodes: Int32Array

    @property
    def session_id(self) -> int:
        return self.session.session_id

    @property
    def is_decoding(self) -> bool:
        """Whether all of the session's text but the last token has its KV already."""
        return self.step.judged and len(self.step.token_ids) == 1


class Shares(Sequence[ScheduledSession]):
    """The parts of n sessions.

    places      i64[n]: of the sessions among the trees; batch: their steps
    nodes       i32[all]: those that are verified, of one session after the other, so many of each as its step has
    """

    def __init__(self, sessions: list[Session], places: IntpArray, batch: StepBatch, nodes: Int32Array) -> None:
        self.sessions, self.places, self.batch, self.nodes = sessions, places, batch, nodes

    def prompts(self) -> tuple[int, int]:
        """Return how many rows are of prompts, and how many sessions come to the end of theirs, and so to their first
        token."""
        if self.batch.are_judged and np.count_nonzero(self.batch.num_tokens == 1) == len(self):
            return 0, 0
        is_prompt = self._are_prompts()
        return int(self.batch.num_tokens[is_prompt].sum()), int(np.count_nonzero(self.batch.is_judged & is_prompt))

    @property
    def num_decoding(self) -> int:
        """How many of the sessions have no rows of prompts."""
        return len(self) - int(np.count_nonzero(self._are_prompts()))

    def prompt_chunks(self) -> tuple[Int32Array, IntpArray]:
        """Return where the step's parts of prompts start, i32[n], and how many rows they have, i64[n]."""
        is_prompt = self._are_prompts()
        return self.batch.starts[is_prompt], self.batch.num_tokens[is_prompt]

    def _are_prompts(self) -> BoolArray:
        are_prompts: BoolArray = ~self.batch.is_judged | (self.batch.num_tokens > 1)
        return are_prompts

    @property
    def modes(self) -> set[str]:
        """The modes of the sessions."""
        return (
            {MODES[mode] for mode in set(self.sessions[0].trees.mode[self.places].tolist())} if self.sessions else set()
        )

    def judged(self) -> Shares:
        """Return the parts that are judged."""
        return self if self.batch.are_judged else self.take(self.batch.is_judged.nonzero()[0])

    def known(self) -> Shares:
        """Return the parts with drafted tokens that have been read by now."""
        if self.batch.drafted is None:
            return self
        return Shares(self.sessions, self.places, self.batch.known(), self.nodes)

    def take(self, which: IntpArray) -> Shares:
        """Return some of the parts, in the same order."""
        chosen = np.zeros(len(self), np.bool_)
        chosen[which] = True
        sessions = [self.sessions[i] for i in which.tolist()]
        return Shares(
            sessions, self.places[which], self.batch.take(which), self.nodes[chosen.repeat(self.batch.num_nodes)]
        )

    @cached_property
    def _each(self) -> list[ScheduledSession]:
        ends = ends_of(self.batch.num_nodes).tolist()
        spans = map(slice, [0, *ends], ends)
        parts = zip(self.sessions, self.batch, spans, strict=True)
        return [ScheduledSession(session, step, self.nodes[span]) for session, step, span in parts]

    def __len__(self) -> int:
        return len(self.sessions)

    def __iter__(self) -> Iterator[ScheduledSession]:
        return iter(self._each)

    @overload
    def __getitem__(self, index: int) -> ScheduledSession: ...
    @overload
    def __getitem__(self, index: slice) -> Shares: ...
    def __getitem__(self, index: int | slice) -> ScheduledSession | Shares:
        return self.take(np.arange(len(self))[index]) if isinstance(index, slice) else self._each[index]


NO_SHARES = Shares([], np.zeros(0, np.intp), StepBatch.of([]), NO_TOKENS)
