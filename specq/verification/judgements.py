"""The judgements of a step's sessions as arrays.

They are also a sequence of `Judgement`, for code that reads them singly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

from specq.protocol import NO_TOKENS, EngineError, Fault, Int32Array, Int64Array, IntpArray, Judgement, Logprobs

CORRECTION = -1  # in place of a node


def ends_of(counts: IntpArray) -> IntpArray:
    """Return the ends of runs with the given lengths, i64[runs].

    A single run avoids `cumsum`, which would cost too much for a step of one session.
    """
    return counts if len(counts) == 1 else counts.cumsum()


def starts_of(counts: IntpArray) -> IntpArray:
    """Return the starts of runs with the given lengths, i64[runs]."""
    return ends_of(counts) - counts


def places_in_runs(counts: IntpArray) -> IntpArray:
    """Return for each element of consecutive runs its place in its run, i64[all]."""
    ends = ends_of(counts)
    found: IntpArray = np.arange(ends[-1] if len(ends) else 0) - (ends - counts).repeat(counts)
    return found


class NodePaths(NamedTuple):
    """Accepted paths of n steps.

    - `firsts` i64[n]: the start of each step's nodes.
    - `lengths` i64[n]: the length of each path.
    - `nodes` i32[all nodes]: each path from its start on, numbered as in the step's own tree.
    """

    firsts: Int64Array
    lengths: Int64Array
    nodes: Int32Array

    def joined(self) -> Int32Array:
        """Return the nodes of all paths, one path after the other, i32[sum of lengths]."""
        places = (self.firsts - ends_of(self.lengths) + self.lengths).repeat(self.lengths)
        found: Int32Array = self.nodes[places + np.arange(len(places))]
        return found


class Judgements(Sequence[Judgement]):
    """Judgements of n sessions, with the fields of `Judgement`, one session after the other.

    - `num_tokens`: i64[n], emitted tokens. 0 for a fault.
    - `token_ids`: i32[all].
    - `nodes`: i32[all], the nodes that the tokens accept. CORRECTION for the last token of each session.
    - `logprobs`, `faults`: by place, for the sessions that have them.
    """

    def __init__(
        self,
        session_ids: Sequence[int],
        num_tokens: IntpArray,
        token_ids: Int32Array,
        nodes: Int32Array,
        logprobs: dict[int, Logprobs] | None = None,
        faults: dict[int, Fault] | None = None,
    ) -> None:
        self.session_ids, self.num_tokens, self.token_ids, self.nodes = session_ids, num_tokens, token_ids, nodes
        self.logprobs: dict[int, Logprobs] = logprobs or {}
        self.faults: dict[int, Fault] = faults or {}

    @property
    def are_single(self) -> bool:
        """Return whether each has one token."""
        return len(self.token_ids) == len(self.session_ids) and not self.faults

    @staticmethod
    def of(judgements: Sequence[Judgement]) -> Judgements:
        """Return the same as arrays.

        Raises EngineError for an inconsistent judgement. In arrays it would take tokens of another session.
        """
        if isinstance(judgements, Judgements):
            return judgements
        for one in judgements:
            if len(one.token_ids) != (len(one.path) + 1 if one.fault is None else 0):
                raise EngineError(
                    f"session {one.session_id} was judged wrongly: {len(one.token_ids)} tokens for a path of "
                    f"{len(one.path)} nodes"
                )
        nodes = chain.from_iterable((*one.path, CORRECTION) for one in judgements if one.fault is None)
        return Judgements(
            [one.session_id for one in judgements],
            np.array([len(one.token_ids) for one in judgements], np.intp),
            np.concatenate([NO_TOKENS, *(one.token_ids for one in judgements)], dtype=np.int32),
            np.fromiter(nodes, np.int32),
            {i: one.logprobs for i, one in enumerate(judgements) if one.logprobs is not None},
            {i: one.fault for i, one in enumerate(judgements) if one.fault is not None},
        )

    @staticmethod
    def of_tokens(session_ids: Sequence[int], token_ids: Int32Array) -> Judgements:
        """Return judgements of one token each, which accept no nodes."""
        nodes = np.empty(len(token_ids), np.int32)
        nodes.fill(CORRECTION)
        num_tokens = np.empty(len(token_ids), np.intp)
        num_tokens.fill(1)
        return Judgements(session_ids, num_tokens, token_ids, nodes)

    @staticmethod
    def of_paths(
        session_ids: Sequence[int], paths: NodePaths, drafted: npt.NDArray[np.integer], last: Int32Array
    ) -> Judgements:
        """Return judgements that accept the nodes of paths and then emit `last` i32[n].

        `drafted`: the tokens of all nodes [nodes].
        """
        num_tokens, accepted = paths.lengths + 1, paths.joined()
        is_node = np.ones(len(accepted) + len(last), np.bool_)
        is_node[ends_of(num_tokens) - 1] = False
        nodes, token_ids = np.full(len(is_node), CORRECTION, np.int32), np.empty(len(is_node), np.int32)
        nodes[is_node] = accepted
        token_ids[is_node] = drafted[paths.firsts.repeat(paths.lengths) + accepted]
        token_ids[~is_node] = last
        return Judgements(session_ids, num_tokens, token_ids, nodes)

    def take(self, places: IntpArray) -> Judgements:
        """Return the judgements at some ascending places."""
        chosen = np.zeros(len(self), np.bool_)
        chosen[places] = True
        of_tokens, which = chosen.repeat(self.num_tokens), places.tolist()
        return Judgements(
            [self.session_ids[i] for i in which],
            self.num_tokens[places],
            self.token_ids[of_tokens],
            self.nodes[of_tokens],
            {i: self.logprobs[place] for i, place in enumerate(which) if place in self.logprobs},
            {i: self.faults[place] for i, place in enumerate(which) if place in self.faults},
        )

    def with_logprobs(self, logprobs: dict[int, Logprobs]) -> Judgements:
        """Return the same with log-probabilities."""
        return Judgements(self.session_ids, self.num_tokens, self.token_ids, self.nodes, logprobs, self.faults)

    @cached_property
    def _each(self) -> list[Judgement]:
        ends = ends_of(self.num_tokens).tolist()
        spans = map(slice, [0, *ends], ends)
        return [
            Judgement(
                session_id,
                tuple(self.nodes[span][:-1].tolist()),
                self.token_ids[span],
                self.logprobs.get(i),
                self.faults.get(i),
            )
            for i, (session_id, span) in enumerate(zip(self.session_ids, spans, strict=True))
        ]

    def __len__(self) -> int:
        return len(self.session_ids)

    def __iter__(self) -> Iterator[Judgement]:
        return iter(self._each)

    @overload
    def __getitem__(self, index: int) -> Judgement: ...
    @overload
    def __getitem__(self, index: slice) -> list[Judgement]: ...
    def __getitem__(self, index: int | slice) -> Judgement | list[Judgement]:
        return self._each[index]
