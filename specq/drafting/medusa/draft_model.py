"""`draft-model` with Medusa heads: a small target decodes with its heads. So it drafts its tokens in fewer passes.

The pass for a node also computes guesses below it. Heads make them from the hidden state of the row before it. After
the pass, the model's own output at these rows is known. If a child of the model was guessed, its own children need no
pass. So every child is the model's. It is made from its logits by the same `ChildMaker` as those of a draft model
without heads, drawn or ranked. Heads only decide what is computed in advance.

A guess has a KV slot, as a node has. It becomes a node when its token is among the children of its parent. The other
guesses are discarded as soon as that node's children are made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from specq.drafting.draft_model.children import ChildRequest
from specq.drafting.draft_model.contexts import Contexts
from specq.drafting.draft_model.kv_trees import NO_SLOT, Asked, KvTrees, TreeSession
from specq.drafting.interface import CONTEXT, NO_CHILDREN, Children, Expansion
from specq.drafting.medusa.interface import HeadSource, HiddenRow
from specq.engines.native import RowPacker
from specq.protocol import Float32Array, Int32Array, SamplingParams

RANKS = 3  # choices of a head that may be guessed
MOST_GUESSES = 12  # rows of a pass
LEAST_CHANCE = 0.1  # of a guess, by the heads

_Path = tuple[float, tuple[int, ...]]  # a log-probability, and ranks


@dataclass(slots=True, eq=False)
class _Guess:
    """A token that was computed below a node, with its logits [columns], and the guesses below it by token."""

    token_id: int
    slot: int
    logits: Any
    state: HiddenRow
    below: dict[int, _Guess] = field(default_factory=dict)

    def each(self) -> Iterator[_Guess]:
        """Yield this guess and all below."""
        yield self
        for guess in self.below.values():
            yield from guess.each()


@dataclass(slots=True)
class _Known:
    """The data of a session's nodes, and of its context.

    states   hidden states of computed rows.
    logits   of nodes that were computed as guesses, until their children are made.
    guesses  the guesses below nodes, by token.
    before   the state of the row from which the context's last token was made.
    """

    states: dict[int, HiddenRow] = field(default_factory=dict)
    logits: dict[int, Any] = field(default_factory=dict)
    guesses: dict[int, dict[int, _Guess]] = field(default_factory=dict)
    before: HiddenRow | None = None


class _Planned(NamedTuple):
    """A guess of a pass, below the requested node or below an earlier guess of the same pass.

    above: the index of that guess. -1: none.
    """

    node_id: int
    above: int
    token_id: int
    position: int


class _Plan(NamedTuple):
    """What a pass computes for a session.

    num_pending   tokens of the context without KV.
    node_ids      the requested nodes.
    fresh         the requested nodes without KV.
    guesses       the guesses below them, parents first.
    """

    session_id: int
    session: TreeSession
    num_pending: int
    node_ids: list[int]
    fresh: list[int]
    guesses: list[_Planned]

    @property
    def num_own(self) -> int:
        return self.num_pending + len(self.fresh)


class MedusaModel(KvTrees):
    """Drafts with contexts of a model, and heads for it. Other arguments as in `KvTrees`."""

    def __init__(
        self,
        contexts: Contexts,
        heads: HeadSource,
        *,
        distribution_size: int = 32,
        rng: np.random.Generator | None = None,
    ) -> None:
        super().__init__(contexts, distribution_size, rng)
        self._heads = heads
        self._known: dict[int, _Known] = {}

    # --- sessions -----------------------------------------------------------------------------------------------------

    def open(self, session_id: int, token_ids: Int32Array, params: SamplingParams, owner: str = "") -> None:
        """Start a session. See `Drafter.open`."""
        super().open(session_id, token_ids, params, owner)
        self._known[session_id] = _Known()

    def close(self, session_id: int) -> None:
        """Forget a session; see `Drafter.close`."""
        self._forget(session_id)
        super().close(session_id)
        self._known.pop(session_id, None)

    def rewind(self, session_id: int, length: int) -> bool:
        """Forget committed tokens beyond `length`, and all nodes; see `Drafter.rewind`."""
        self._forget(session_id)
        return super().rewind(session_id, length)

    def _forget(self, session_id: int) -> None:
        known = self._known.get(session_id)
        if known is not None:
            self._drop(guess for below in known.guesses.values() for guess in below.values())
            self._known[session_id] = _Known()

    def commit(self, session_id: int, token_ids: Int32Array, path: Sequence[int]) -> None:
        """Append committed tokens and move the root of the nodes; see `Drafter.commit`.

        The data of the node that now ends the context becomes the context's. After a correction the heads' predictions
        there are kept.
        """
        if not len(token_ids):
            return
        known, session = self._known[session_id], self._sessions[session_id]
        last, num_left = path[-1] if path else CONTEXT, len(token_ids) - len(path)
        above = session.nodes[last].parent if path else CONTEXT
        before = {0: known.states.get(above), 1: known.states.get(last)}.get(num_left)
        super().commit(session_id, token_ids, path)
        kept = {node_id: node_id for node_id in session.nodes}
        if not self._num_pending(session):
            kept[last] = CONTEXT
        self._known[session_id] = _Known(
            {kept[i]: state for i, state in known.states.items() if i in kept},
            {kept[i]: logits for i, logits in known.logits.items() if i in kept},
            {kept[i]: below for i, below in known.guesses.items() if i in kept},
            before,
        )
        self._drop(guess for i, below in known.guesses.items() if i not in kept for guess in below.values())

    def _drop(self, guesses: Iterator[_Guess]) -> None:
        slots = [guess.slot for top in guesses for guess in top.each()]
        self._pool.give(np.array(slots, np.int32))

    # --- children -----------------------------------------------------------------------------------------------------

    def expand(self, requests: Sequence[Expansion]) -> list[Children]:
        """Answer all requests, with one pass for nodes that were not guessed.

        Nodes at the model's maximum length get no children. See `Drafter.expand`. Raises EngineError, with the state
        unchanged, if there are too few KV slots.
        """
        wanted = [request for request in requests if self._may_have_children(request)]
        asked = self._asked(one for one in wanted if one.node_id not in self._known[one.session_id].logits)
        with self._contexts.alive():
            found = self._compute(asked) if asked else {}
            rows = [self._logits(request, found) for request in wanted]
            made = iter(self._make(wanted, rows) if wanted else ())
        answers = [next(made) if self._may_have_children(request) else NO_CHILDREN for request in requests]
        for request in wanted:
            self._known[request.session_id].logits.pop(request.node_id, None)
        for request, children in zip(requests, answers, strict=True):
            self._keep(request, children)
        return answers

    def _logits(self, request: Expansion, found: dict[tuple[int, int], Any]) -> Any:
        logits = self._known[request.session_id].logits.get(request.node_id)
        return found[request.session_id, request.node_id] if logits is None else logits

    def _make(self, wanted: Sequence[Expansion], rows: Sequence[Any]) -> list[Children]:
        """Make the requested children of each row of logits."""
        sessions = [self._sessions[request.session_id] for request in wanted]
        counts = [
            ChildRequest(
                session.params, session.child_position(request.node_id), len(request.child_ids), request.session_id
            )
            for session, request in zip(sessions, wanted, strict=True)
        ]
        made = self.maker.make(counts, _stacked(rows), self.limit_vocab)
        return [children.first(len(request.child_ids)) for children, request in zip(made, wanted, strict=True)]

    def _keep(self, request: Expansion, children: Children) -> None:
        """Store children as nodes. Guessed children keep their data; the other guesses are discarded."""
        session, known = self._sessions[request.session_id], self._known[request.session_id]
        session.add(request, session.child_position(request.node_id), children)
        below = known.guesses.pop(request.node_id, {})
        for child_id, token_id in zip(request.child_ids, children.token_ids.tolist(), strict=False):
            guess = below.pop(token_id, None)
            if guess is None:
                continue
            session.nodes[child_id].slot = guess.slot
            known.states[child_id], known.logits[child_id] = guess.state, _copied(guess.logits)
            known.guesses[child_id] = guess.below
            for further in guess.below.values():
                for one in further.each():
                    one.logits = _copied(one.logits)  # release the memory of the pass's other rows
        self._drop(iter(below.values()))

    # --- a pass -------------------------------------------------------------------------------------------------------

    def _compute(self, asked: Asked) -> dict[tuple[int, int], Any]:
        """Compute pending tokens, requested nodes, and guesses below them; return each node's logits."""
        self._contexts.prefill(self._pool.places(asked))
        plans = self._plans(asked)
        sizes = [plan.num_own + len(plan.guesses) for plan in plans]
        with self._contexts.taken(sum(sizes)) as taken:
            parts = np.split(taken, np.cumsum(sizes)[:-1])
            packer = RowPacker()
            for plan, slots in zip(plans, parts, strict=True):
                self._pack(packer, plan, slots)
            output = self._contexts.run_with_states(packer.pack())
        logits = output.logits
        states, found, first = _copied(output.hidden), {}, 0  # the pass may reuse its own memory
        for plan, slots in zip(plans, parts, strict=True):
            rows = range(first, first + len(plan.node_ids) + len(plan.guesses))
            first = rows.stop
            self._settle(plan, slots)
            known = self._known[plan.session_id]
            for node_id, row in zip(plan.node_ids, rows, strict=False):
                known.states[node_id] = HiddenRow(states, row)
                found[plan.session_id, node_id] = logits[row]
                self._drop(iter(known.guesses.pop(node_id, {}).values()))
            self._add_guesses(plan, slots[plan.num_own :], logits, states, rows[len(plan.node_ids) :])
        return found

    def _plans(self, asked: Asked) -> list[_Plan]:
        """Return what to compute, with fewer guesses if slots are short."""
        guesses = self._guess(asked)
        plans = []
        for session_id, node_ids in asked.items():
            session = self._sessions[session_id]
            fresh = [i for i in node_ids if i != CONTEXT and session.nodes[i].slot == NO_SLOT]
            own = guesses.get(session_id, [])
            plans.append(_Plan(session_id, session, self._num_pending(session), node_ids, fresh, own))
        if sum(plan.num_own + len(plan.guesses) for plan in plans) > self.free_slots:
            plans = [plan._replace(guesses=[]) for plan in plans]
        return plans

    def _guess(self, asked: Asked) -> dict[int, list[_Planned]]:
        """Return the heads' likeliest tokens below the requested nodes, at most MOST_GUESSES in all."""
        places: list[tuple[int, int]] = []
        states: list[HiddenRow] = []
        for session_id, node_ids in asked.items():
            for node_id in node_ids:
                state = self._state_before(session_id, node_id)
                if state is not None:
                    places.append((session_id, node_id))
                    states.append(state)
        if not places:
            return {}
        sessions = [self._sessions[session_id] for session_id, _ in places]
        positions = [session.child_position(node_id) for session, (_, node_id) in zip(sessions, places, strict=True)]
        ranked = self._heads.start(states, [session.params for session in sessions], positions, RANKS).collect()
        candidates = [
            (score, i, path)
            for i, position in enumerate(positions)
            for score, path in _likely_paths(ranked.scores[i], self.info.max_length - 1 - position)
        ]
        # Parents first: a guess is never likelier than its parent.
        candidates.sort(key=lambda one: (-one[0], len(one[2])))
        found: dict[int, list[_Planned]] = {}
        numbers: dict[tuple[int, tuple[int, ...]], int] = {}
        for _, i, path in candidates[:MOST_GUESSES]:
            session_id, node_id = places[i]
            own = found.setdefault(session_id, [])
            numbers[i, path] = len(own)
            depth = len(path) - 1
            token_id = int(ranked.token_ids[i, depth, path[-1]])
            own.append(_Planned(node_id, numbers.get((i, path[:-1]), -1), token_id, positions[i] + depth))
        return found

    def _state_before(self, session_id: int, node_id: int) -> HiddenRow | None:
        """Return the state before a node's token, or the context's last one; None if unknown."""
        known = self._known[session_id]
        if node_id == CONTEXT:
            return known.before
        return known.states.get(self._sessions[session_id].nodes[node_id].parent)

    def _pack(self, packer: RowPacker, plan: _Plan, slots: Int32Array) -> None:
        """Add a session's rows, in these slots: its context's pending tokens, nodes, guesses."""
        session = plan.session
        pending, fresh, guessed = np.split(slots, [plan.num_pending, plan.num_own])
        self._contexts.pack(packer, plan.session_id, pending, judged=plan.node_ids[0] == CONTEXT)
        slot_of = dict(zip(plan.fresh, fresh.tolist(), strict=True))
        lineages: dict[int, list[int]] = {CONTEXT: []}
        for node_id in plan.node_ids:
            if node_id != CONTEXT:
                node = session.nodes[node_id]
                slot = slot_of.get(node_id, node.slot)
                lineages[node_id] = [*session.lineage(node.parent), slot]
                packer.add_node(node.token_id, slot, node.position, session.length, lineages[node_id])
        of_guesses: list[list[int]] = []
        for guess, slot in zip(plan.guesses, guessed.tolist(), strict=True):
            above = lineages[guess.node_id] if guess.above < 0 else of_guesses[guess.above]
            of_guesses.append([*above, slot])
            packer.add_node(guess.token_id, slot, guess.position, session.length, of_guesses[-1])

    def _settle(self, plan: _Plan, slots: Int32Array) -> None:
        """After the pass, commit the pending tokens to the table, and give nodes their slots."""
        pending, fresh, _ = np.split(slots, [plan.num_pending, plan.num_own])
        for node_id, slot in zip(plan.fresh, fresh.tolist(), strict=True):
            plan.session.nodes[node_id].slot = slot
        self._contexts.settle(plan.session.place, np.array([plan.num_pending]), pending)

    def _add_guesses(self, plan: _Plan, slots: Int32Array, logits: Any, states: Any, rows: Sequence[int]) -> None:
        """Store a session's guesses, given their slots and their rows of the pass."""
        guesses, made = self._known[plan.session_id].guesses, list[_Guess]()
        for planned, slot, row in zip(plan.guesses, slots.tolist(), rows, strict=True):
            made.append(_Guess(planned.token_id, slot, logits[row], HiddenRow(states, row)))
            if planned.above < 0:
                guesses.setdefault(planned.node_id, {})[planned.token_id] = made[-1]
            else:
                made[planned.above].below[planned.token_id] = made[-1]


def _copied(values: Any) -> Any:
    """Return an array, or a tensor of torch, in memory of its own."""
    return values.copy() if isinstance(values, np.ndarray) else values.clone()


def _stacked(rows: Sequence[Any]) -> Any:
    if isinstance(rows[0], np.ndarray):
        return np.stack(rows)
    import torch

    return torch.stack(list(rows))


def _likely_paths(scores: Float32Array, most_deep: int) -> list[_Path]:
    """Return the likely paths of ranks with their log-probabilities, given log-probabilities f32[places, ranks]."""
    found, level = list[_Path](), list[_Path]([(0.0, ())])
    least = float(np.log(LEAST_CHANCE))
    for of_place in scores[: max(most_deep, 0)].tolist():
        level = [
            (above + score, (*path, rank))
            for above, path in level
            for rank, score in enumerate(of_place)
            if above + score >= least
        ]
        found += level
    return found
