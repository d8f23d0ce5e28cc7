"""The steps of many sessions as arrays. The verifier plans them, the engine runs them and the judge judges them.

It has no objects per session. A batch is also a sequence of `SessionStep`, for code that reads the steps singly. These
objects are made at the first access.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from operator import is_
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from specq.protocol import (
    NO_SCORED,
    NO_SCRATCH,
    NO_TOKENS,
    NO_TREE,
    BoolArray,
    DraftDistributions,
    Float32Array,
    History,
    Int32Array,
    IntpArray,
    SamplingParams,
    ScoredRows,
    ScratchRows,
    SessionStep,
    Tree,
    UInt8Array,
)
from specq.verification.device_tokens import DeviceTokens, known_parents, known_tokens
from specq.verification.host_kernels import Rows, make_rows
from specq.verification.judgements import ends_of, starts_of
from specq.verification.token_masks import TokenMasks

# What a session's parameters need from judging beside tokens: traits. Several may be set.
SHAPED, WITH_LOGPROBS, WITH_GRAMMAR = 1, 2, 4
NO_SCORES: Float32Array = np.zeros(0, np.float32)
NO_SCORES.flags.writeable = False


class Extra(NamedTuple):
    """The optional parts of a step, which few steps have: see `SessionStep` and `Tree`."""

    history: History | None = None
    scratch: ScratchRows = NO_SCRATCH
    distributions: DraftDistributions | None = None
    scored: ScoredRows = NO_SCORED


NO_EXTRA = Extra()


def traits_of(params: SamplingParams) -> int:
    """Return the traits of a session with these parameters."""
    is_shaped = params.needs_history or bool(params.logit_bias or params.allowed_token_ids)
    return SHAPED * is_shaped + WITH_LOGPROBS * (params.logprobs >= 0) + WITH_GRAMMAR * bool(params.grammar)


class StepBatch(Sequence[SessionStep]):
    """Steps of n sessions, with the fields of `SessionStep`, one session after the other.

    - `base_lens`: i64[n], as in `SessionStep`.
    - `sampling`: [n] of `host_kernels.ROW`, the sampling parameters of each session's rows, without places.
    - `traits`: u8[n].
    - `starts`: i32[n].
    - `num_tokens`, `num_nodes`: i64[n].
    - `is_judged`: bool[n].
    - `token_ids`: i32[all], each session's tokens, then its tree's.
    - `parents`, `scores`: [nodes], of all trees.
    - `extras`: by place, for the sessions that have them.
    - `fed_by`: None, or i32[n] if the step before is not collected yet. For a session whose one token only the device
      knows, its place among the sessions judged there. -1 for all others. `token_ids` then holds any token of the
      vocabulary.
    - `drafted`: None, or the tokens for which handles stand in `token_ids`. The host may not have read these drafted
      tokens yet. It may not have read their parents either. Then any node of the parent's level stands for the parent
      in `parents`.
    - `masks`: those of sessions with a grammar. None if no session has one.
    """

    def __init__(
        self,
        *,
        session_ids: list[int],
        params: list[SamplingParams],
        sampling: Rows,
        traits: UInt8Array,
        starts: Int32Array,
        num_tokens: IntpArray,
        is_judged: BoolArray,
        token_ids: Int32Array,
        num_nodes: IntpArray,
        parents: Int32Array = NO_TOKENS,
        scores: Float32Array = NO_SCORES,
        extras: Mapping[int, Extra] | None = None,
        fed_by: Int32Array | None = None,
        drafted: DeviceTokens | None = None,
        masks: TokenMasks | None = None,
    ) -> None:
        self.fed_by, self.drafted, self.masks = fed_by, drafted, masks
        self.session_ids, self.params, self.sampling, self.traits = session_ids, params, sampling, traits
        self.starts, self.num_tokens, self.is_judged, self.token_ids = starts, num_tokens, is_judged, token_ids
        self.num_nodes, self.parents, self.scores, self.extras = num_nodes, parents, scores, extras or {}
        self.base_lens: IntpArray = starts + num_tokens
        self.has_scratch = any(extra.scratch is not NO_SCRATCH for extra in self.extras.values())
        # Whether all steps are judged, and whether each session computes one judged token and no other row.
        self.are_judged = int(np.count_nonzero(is_judged)) == len(session_ids)
        num_single = int(np.count_nonzero(num_tokens == 1)) if len(token_ids) == len(session_ids) else -1
        self.is_plain = num_single == len(session_ids) and self.are_judged and not self.has_scratch

    @staticmethod
    def of(steps: Sequence[SessionStep]) -> StepBatch:
        """Return the same steps as arrays."""
        if isinstance(steps, StepBatch):
            return steps
        params = [step.params for step in steps]
        extras = {
            i: Extra(step.history, step.scratch, step.tree.distributions, step.scored)
            for i, step in enumerate(steps)
            if not (step.history is None and step.scratch is NO_SCRATCH and step.tree.distributions is None)
            or step.scored is not NO_SCORED
        }
        batch = StepBatch(
            session_ids=[step.session_id for step in steps],
            params=params,
            sampling=make_rows(params, [0] * len(steps)),
            traits=np.array([traits_of(own) for own in params], np.uint8),
            starts=np.array([step.start for step in steps], np.int32),
            num_tokens=np.array([len(step.token_ids) for step in steps], np.intp),
            is_judged=np.array([step.judged for step in steps], np.bool_),
            token_ids=_joined([part for step in steps for part in (step.token_ids, step.tree.token_ids)], np.int32),
            num_nodes=np.array([step.tree.num_nodes for step in steps], np.intp),
            parents=_joined([step.tree.parents for step in steps], np.int32),
            scores=_joined([step.tree.scores for step in steps], np.float32),
            extras=extras,
        )
        batch.__dict__["_steps"] = list(steps)
        return batch

    # --- arrays -----------------------------------------------------------------------------------------------------

    @cached_property
    def sizes(self) -> IntpArray:
        """Return the number of tokens and nodes, i64[n]."""
        return self.num_tokens + self.num_nodes

    @cached_property
    def ends(self) -> IntpArray:
        """Return the end of each session's tokens and nodes in `token_ids`, i64[n]."""
        return ends_of(self.sizes)

    @cached_property
    def is_node(self) -> BoolArray:
        """Return which of `token_ids` are nodes, bool[all]."""
        found = np.ones(len(self.token_ids), np.bool_)
        if len(self.token_ids) == len(self.session_ids) + len(self.parents):  # one token each
            found[self.ends - self.sizes] = False
        else:
            found[:] = np.arange(len(found)) >= (self.ends - self.num_nodes).repeat(self.sizes)
        return found

    @property
    def node_tokens(self) -> Int32Array:
        """Return the tokens of all trees, i32[nodes]."""
        return self.token_ids[self.is_node] if len(self.parents) else NO_TOKENS

    @cached_property
    def num_rows(self) -> IntpArray:
        """Return the number of tokens, nodes and scratch rows, i64[n]."""
        if not self.has_scratch:
            return self.sizes
        found = self.sizes.copy()
        for i, extra in self.extras.items():
            found[i] += extra.scratch.num_rows
        return found

    def judged(self) -> StepBatch:
        """Return the judged steps."""
        return self if self.are_judged else self.take(self.is_judged.nonzero()[0])

    def take(self, places: IntpArray) -> StepBatch:
        """Return the steps at some ascending places."""
        chosen = np.zeros(len(self), np.bool_)
        chosen[places] = True
        of_nodes = chosen.repeat(self.num_nodes)
        which = places.tolist()
        return StepBatch(
            session_ids=[self.session_ids[i] for i in which],
            params=[self.params[i] for i in which],
            sampling=self.sampling[places],
            traits=self.traits[places],
            starts=self.starts[places],
            num_tokens=self.num_tokens[places],
            is_judged=self.is_judged[places],
            token_ids=self.token_ids[chosen.repeat(self.sizes)],
            num_nodes=self.num_nodes[places],
            parents=self.parents[of_nodes],
            scores=self.scores[of_nodes],
            extras={i: self.extras[place] for i, place in enumerate(which) if place in self.extras},
            fed_by=None if self.fed_by is None else self.fed_by[places],
            drafted=self.drafted,
            masks=self.masks,
        )

    @property
    def scored(self) -> dict[int, ScoredRows]:
        """Return the scored rows, by the place of their step. Steps without such rows are left out."""
        return {i: extra.scored for i, extra in self.extras.items() if extra.scored.num_rows}

    @property
    def first_rows(self) -> IntpArray:
        """Return the start of each session's rows, i64[n]."""
        return starts_of(self.num_rows)

    def fed(self, token_ids: Int32Array) -> StepBatch:
        """Return the same steps with all tokens known. `token_ids` i32[n]: those of the fed sessions."""
        assert self.fed_by is not None
        found, is_fed = copy(self), self.fed_by >= 0
        found.token_ids, found.fed_by = self.token_ids.copy(), None
        found.token_ids[(self.ends - self.sizes)[is_fed]] = token_ids[is_fed]
        found.__dict__.pop("_steps", None)
        return found

    def goes_on(self, before: StepBatch) -> bool:
        """Return whether these steps are those of `before`, each one token further (`further`), but for the masks.

        They must have the same sessions in the same order.
        """
        return (
            self.fed_by is not None
            and self.is_plain
            and before.is_plain
            and not (self.extras or before.extras)
            and np.array_equal(self.fed_by, np.arange(len(self)))
            and np.array_equal(self.starts, before.base_lens)
            and np.array_equal(self.traits, before.traits)
            and all(map(is_, self.params, before.params))
        )

    def further(self) -> StepBatch:
        """Return the plain steps that follow these plain ones.

        Each session computes its newly emitted token, and is judged again.
        """
        found = StepBatch.__new__(StepBatch)  # faster than `copy`, which would cost more than the rest of this method
        found.__dict__.update(self.__dict__)
        found.starts, found.base_lens = self.starts + np.int32(1), self.base_lens + 1
        found.fed_by = np.arange(len(self), dtype=np.int32)
        found.__dict__.pop("_steps", None)
        return found

    def as_read(self) -> StepBatch:
        """Return the same steps with the drafted tokens, if these have been read."""
        return self if self.drafted is None or self.drafted.values is None else self._known

    def known(self) -> StepBatch:
        """Return the same steps with the drafted tokens, which must have been read."""
        return self if self.drafted is None else self._known

    @cached_property
    def _known(self) -> StepBatch:
        assert self.drafted is not None
        found = copy(self)
        found.token_ids, found.drafted = known_tokens(self.token_ids, self.drafted), None
        found.parents = known_parents(self.parents, self.node_tokens, self.drafted)
        found.__dict__.pop("_steps", None)
        return found

    def without_params(self) -> StepBatch:
        """Return the same steps without the sessions' parameters, for a receiver that has them already, and masks.

        Parameters are most of the data to transfer. The receiver sets both.
        """
        found = copy(self)
        found.params, found.masks = [], None
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process: the arrays, without the objects made from them."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_steps", "_known")}

    # --- one by one -------------------------------------------------------------------------------------------------

    @cached_property
    def _steps(self) -> list[SessionStep]:
        """Return the steps as objects."""
        ends, node_ends = self.ends.tolist(), ends_of(self.num_nodes).tolist()
        firsts, node_firsts = [0, *ends], [0, *node_ends]
        starts, is_judged, num_tokens = self.starts.tolist(), self.is_judged.tolist(), self.num_tokens.tolist()
        found = []
        for i, (session_id, params) in enumerate(zip(self.session_ids, self.params, strict=True)):
            extra, first, nodes = self.extras.get(i, NO_EXTRA), firsts[i], slice(node_firsts[i], node_ends[i])
            tokens = slice(first, first + num_tokens[i])
            tree = NO_TREE
            if nodes.start < nodes.stop:
                own = self.token_ids[tokens.stop : ends[i]]
                tree = Tree(own, self.parents[nodes], self.scores[nodes], extra.distributions)
            step = self.token_ids[tokens], params, tree, is_judged[i], extra.history, extra.scratch, extra.scored
            found.append(SessionStep(session_id, starts[i], *step))
        return found

    def __len__(self) -> int:
        return len(self.session_ids)

    def __iter__(self) -> Iterator[SessionStep]:
        return iter(self._steps)

    @overload
    def __getitem__(self, index: int) -> SessionStep: ...
    @overload
    def __getitem__(self, index: slice) -> StepBatch: ...
    def __getitem__(self, index: int | slice) -> SessionStep | StepBatch:
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        return self._steps[index]


def _joined(arrays: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *arrays], dtype=dtype)
