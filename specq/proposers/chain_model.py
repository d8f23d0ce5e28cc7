"""A draft model that drafts one chain a round for each of many sessions, all in arrays: for a colocated drafter.

Where `DraftModel` keeps a tree a session, grows it ahead of the verdicts and re-roots it, nothing is drafted ahead here: a
chain starts at the committed context, a verdict follows it some way, and the next one starts anew. KV of what was followed
is kept. `start` only gives the device its work, so that the host is free until `finish`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specq.engines.torch import ChainStart, LoadedModel, RowPacker
from specq.proposers.chain_source import NO_TOKEN, Chains
from specq.proposers.contexts import Contexts
from specq.proposers.interface import Children
from specq.proposers.making import ChildMaker, ChildRequest
from specq.protocol import NO_TOKENS, DraftDistribution, Float32Array, Int32Array, SamplingParams


@dataclass(slots=True)
class _Drafted:
    """A session's last chain: its first tokens; `slots` i32 has the KV of as many of them as it is long."""

    token_ids: list[int]
    slots: Int32Array


@dataclass(slots=True)
class _Part:
    """Some of the sessions of a round, by index; `wait` returns tokens and scores [depth, sessions, width], and the draft
    distributions."""

    indices: list[int]
    wait: Callable[[], tuple[Int32Array, Float32Array, list[Sequence[DraftDistribution]]]]


class ChainModel:
    """Fulfils `ChainSource` with a draft model. Arguments as in `specq.engines.torch.loading.load`; `distribution_size` and
    `rng` as in `specq.proposers.making.ChildMaker`."""

    def __init__(
        self,
        model: str | LoadedModel,
        *,
        device: str = "auto",
        dtype: str = "auto",
        kv_slots: int = 0,
        name: str = "",
        distribution_size: int = 32,
        rng: np.random.Generator | None = None,
    ) -> None:
        self.contexts = Contexts(model, device=device, dtype=dtype, kv_slots=kv_slots, name=name)
        self.info = self.contexts.info
        self.limit_vocab = min(self.info.vocab_size, self.info.num_tokens)
        self._maker = ChildMaker(distribution_size, rng or np.random.default_rng(), self.contexts.token_ids)
        self._drafted: dict[int, _Drafted] = {}
        self._begun: tuple[list[int], Int32Array, list[_Part]] | None = None  # sessions, slots, parts

    @property
    def free_slots(self) -> int:
        return self.contexts.pool.free_slots

    def open(self, session_id: int, token_ids: Int32Array, params: SamplingParams) -> None:
        """Start a session; see `ChainSource`."""
        self.contexts.open(session_id, token_ids, params)

    def close(self, session_id: int) -> None:
        """Forget a session; see `ChainSource`."""
        self._drop(session_id)
        self.contexts.close(session_id)

    def commit(self, session_id: int, token_ids: Int32Array) -> int:
        """Append committed tokens; see `ChainSource`."""
        drafted = self._drafted.pop(session_id, None)
        if drafted is None:
            self.contexts.append(session_id, token_ids, NO_TOKENS)
            return 0
        followed = 0
        for token, foreseen in zip(token_ids.tolist(), drafted.token_ids, strict=False):
            if token != foreseen:
                break
            followed += 1
        self.contexts.append(session_id, token_ids, drafted.slots[:followed])
        self.contexts.pool.give(drafted.slots[followed:])
        return followed

    def _drop(self, session_id: int) -> None:
        drafted = self._drafted.pop(session_id, None)
        if drafted is not None:
            self.contexts.pool.give(drafted.slots)

    def start(self, session_ids: Sequence[int], depth: int, width: int) -> None:
        """Begin to draft chains; see `ChainSource`."""
        assert self._begun is None
        for session_id in session_ids:
            self._drop(session_id)
        with self.contexts.alive():
            self.contexts.prefill(session_ids)
            with self.contexts.taken(len(session_ids) * (depth - 1)) as taken:
                slots = taken.reshape(len(session_ids), depth - 1)
                logits = self._compute(session_ids)
                self._begun = list(session_ids), slots, self._begin(session_ids, slots, logits, depth, width)

    def finish(self) -> Chains:
        """Return the chains that were begun; see `ChainSource`."""
        assert self._begun is not None
        (session_ids, slots, parts), self._begun = self._begun, None
        try:
            with self.contexts.alive():
                found = [part.wait() for part in parts]
        except BaseException:
            self.contexts.pool.give(slots.reshape(-1))
            raise
        depth, _, width = found[0][0].shape
        token_ids = np.empty((len(session_ids), depth, width), np.int32)
        scores = np.empty((len(session_ids), depth, width), np.float32)
        distributions: list[Sequence[DraftDistribution]] = [()] * len(session_ids)
        for part, (its_tokens, its_scores, its_distributions) in zip(parts, found, strict=True):
            token_ids[part.indices], scores[part.indices] = its_tokens.swapaxes(0, 1), its_scores.swapaxes(0, 1)
            for index, of_session in zip(part.indices, its_distributions, strict=False):
                distributions[index] = of_session
        for session_id, own, firsts in zip(session_ids, slots, token_ids[:, :, 0].tolist(), strict=True):
            self._drafted[session_id] = _Drafted(firsts, own)
        return Chains(token_ids, scores, distributions)

    def _compute(self, session_ids: Sequence[int]) -> torch.Tensor:
        """Run what is pending of each session; return logits [sessions, vocab]."""
        sizes = [len(self.contexts.sessions[session_id].pending) for session_id in session_ids]
        with self.contexts.taken(sum(sizes)) as slots:
            shares = np.split(slots, np.cumsum(sizes)[:-1])
            packer = RowPacker()
            for session_id, share in zip(session_ids, shares, strict=True):
                self.contexts.pack(packer, session_id, share, judged=True)
            logits = self.contexts.run(packer)
        for session_id, share in zip(session_ids, shares, strict=True):
            self.contexts.settle(session_id, share)
        return logits

    def _begin(
        self, session_ids: Sequence[int], slots: Int32Array, logits: torch.Tensor, depth: int, width: int
    ) -> list[_Part]:
        """Let the device draft all chains that it can at once; the host takes part in the others."""
        starts = [self._chain_start(i, own) for i, own in zip(session_ids, slots.tolist(), strict=True)]
        drafter, parts = self.contexts.chains, []
        by_device = [i for i, start in enumerate(starts) if drafter and self._fits(drafter, start, depth)]
        lengths, params = [starts[i].length for i in by_device], [starts[i].params for i in by_device]
        if by_device and drafter.takes(params, lengths, depth, width):
            own = logits if len(by_device) == len(starts) else logits[by_device]
            wait = drafter.start(own, [starts[i] for i in by_device], depth, width, self.limit_vocab)
            parts.append(_Part(by_device, lambda: (*wait(), [])))
        else:
            by_device = []
        if rest := sorted(set(range(len(starts))).difference(by_device)):
            found = self._by_passes([starts[i] for i in rest], logits[rest], depth, width)
            parts.append(_Part(rest, lambda: found))
        return parts

    def _fits(self, drafter: Any, start: ChainStart, depth: int) -> bool:
        return start.length + depth <= self.info.max_length and bool(drafter.can_draft(start.params))

    def _chain_start(self, session_id: int, slots: list[int]) -> ChainStart:
        context, table = self.contexts.sessions[session_id], self.contexts.pool.table(session_id)
        return ChainStart(session_id, table, context.length, (), context.length, slots, context.params)

    def _by_passes(
        self, starts: Sequence[ChainStart], logits: torch.Tensor, depth: int, width: int
    ) -> tuple[Int32Array, Float32Array, list[Sequence[DraftDistribution]]]:
        """Draft chains by one pass a level; each ends early where a token has no children."""
        token_ids = np.full((depth, len(starts), width), NO_TOKEN, np.int32)
        scores = np.zeros((depth, len(starts), width), np.float32)
        distributions: list[list[DraftDistribution]] = [[] for _ in starts]
        alive = [i for i, start in enumerate(starts) if start.position < self.info.max_length]
        logits = logits[alive]
        for level in range(depth):
            wanted = [ChildRequest(starts[i].params, starts[i].position + level, width) for i in alive]
            made = self._maker.make(wanted, logits, self.limit_vocab) if wanted else []
            for i, children in zip(alive, made, strict=True):
                _note(children, token_ids[level, i], scores[level, i], distributions[i])
            last = self.info.max_length - level - 1
            alive = [i for i in alive if token_ids[level, i, 0] != NO_TOKEN and starts[i].position < last]
            if not alive or level + 1 == depth:
                break
            logits = self._run_level([starts[i] for i in alive], token_ids[level, alive, 0].tolist(), level)
        return token_ids, scores, [tuple(of_chain) for of_chain in distributions]

    def _run_level(self, starts: Sequence[ChainStart], token_ids: Sequence[int], level: int) -> torch.Tensor:
        """Compute the tokens of one level of some chains; return logits [chains, vocab]."""
        packer = RowPacker()
        for start, token in zip(starts, token_ids, strict=True):
            packer.add_session(start.table)
            packer.add_node(token, start.slots[level], start.position + level, start.length, start.slots[: level + 1])
        return self.contexts.run(packer)


def _note(
    children: Children, token_ids: Int32Array, scores: Float32Array, distributions: list[DraftDistribution]
) -> None:
    """Write one level of a chain into its row of the arrays."""
    count = min(len(token_ids), len(children.token_ids))
    token_ids[:count], scores[:count] = children.token_ids[:count], children.scores[:count]
    if children.distribution is not None:
        distributions.append(children.distribution)
