"""Plan the next forward pass: its sessions, with the tokens and nodes of each.

Every decoding session has at least its plain row (rule 5: never slower than no speculation). Prefills are split into
chunks that fit the room that is left. Beside decoding sessions, chunks also fit the time that these can spare
(`specq.verifier.control.prefill_limit`). `specq.verifier.step.node_choice` chooses the draft nodes.

`plan` is pure: sessions in, a plan out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from specq.grammar import StepMasks
from specq.protocol import (
    NO_SCRATCH,
    NO_TOKENS,
    BoolArray,
    Int32Array,
    IntpArray,
    ScratchRows,
)
from specq.verification import NO_EXTRA, NO_SCORES, WITH_GRAMMAR, DeviceTokens, Extra, StepBatch, ends_of
from specq.verifier.control.prefill_limit import UNLIMITED, PrefillLimit, filled, longest_s
from specq.verifier.models.step_curve import StepCurve
from specq.verifier.sessions.open_sessions import without_background
from specq.verifier.sessions.session import Session
from specq.verifier.step.node_choice import NO_CHAINS, NO_SHARES, Chosen, Shares, choose_nodes
from specq.verifier.step.scored_rows import MAX_SCORED, limit_scored, scored_rows
from specq.verifier.trees import NONE


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The next step's work for each session that takes part, in order of precedence.

    goodput  expected tokens a second.
    background_s  the expected seconds of the rows that `background_s` limits.
    """

    shares: Shares
    num_rows: int
    goodput: float
    background_s: float = 0.0


def plan(
    sessions: Sequence[Session],
    curve: StepCurve,
    *,
    max_rows: int,
    free_slots: int,
    max_chain: int = 0,
    even_chains: Mapping[int, int] = NO_CHAINS,
    before: Shares | None = None,
    drafted: DeviceTokens | None = None,
    prefill: PrefillLimit = UNLIMITED,
    max_scored: int = MAX_SCORED,
    saved_s: float = 0.0,
    background_s: float | None = None,
) -> StepPlan:
    """Plan the next step.

    sessions   in order of precedence; all are in the same draft trees.
    max_rows   most rows of a step.
    free_slots  most KV slots that the step may take.
    max_chain, even_chains  as of the engine.
    before     the newest step in flight, if any. It supplies the last token of sessions whose last token is unknown.
               All committed tokens of such sessions have KV, or will have it then.
    drafted    the tokens behind the handles on the trees, if any.
    prefill    limits the rows of prompts beside decoding sessions.
    max_scored  most rows of prompts whose log-probabilities are wanted.
    saved_s    seconds that a step without nodes saves, compared with the curve. It saves them because the next step is
               launched early.
    background_s  seconds that rows of prompts may take, all of them in the background. 0: they are not. None: no
               session is in the background beside others.
    """
    room = min(max_rows, free_slots)
    if not sessions or room < 1:
        return StepPlan(NO_SHARES, 0, 0.0)
    chunks = _chunks(
        sessions, _Limits(max_rows, room, curve, prefill, max_scored, background_s), is_fed=before is not None
    )
    num_rows = chunks.num_tokens
    decoding = chunks.decoding()
    num_rows += _fit_scratch(decoding, room - num_rows)
    # If a session's last token comes from the step in flight, the nodes after it are not known.
    most = _most_nodes(num_rows, room - num_rows, curve) if before is None else 0
    drafting = decoding if background_s is None else without_background(decoding)
    chosen = choose_nodes(drafting, num_rows, most, curve, max_chain, saved_s, even_chains)
    if len(drafting) < len(decoding):
        chosen = _among(chosen, np.array([not session.is_background for session in decoding]))
    num_rows += len(chosen.nodes)
    goodput = (len(decoding) + chosen.tokens) / curve(num_rows, len(chosen.nodes))
    return StepPlan(_shares(chunks, chosen, before, drafted), num_rows, goodput, chunks.background_s)


def _among(chosen: Chosen, has_nodes: BoolArray) -> Chosen:
    """Return nodes that were chosen for some sessions, as nodes of all; `has_nodes` marks the former."""
    counts = np.zeros(len(has_nodes), np.int64)
    counts[has_nodes] = np.diff(chosen.firsts)
    return chosen._replace(firsts=np.append(0, counts.cumsum()))


def _most_nodes(num_rows: int, room: int, curve: StepCurve) -> int:
    """Return how many nodes a step with `num_rows` other rows may have.

    The limit keeps the step from being silent for too long (`prefill_limit`).
    """
    longest = longest_s(curve(num_rows))
    if room <= 0 or curve(num_rows + room, room) <= longest:
        return room
    return int(np.searchsorted(curve.times(num_rows, room + 1), longest, "right")) - 1


class _Chunks(NamedTuple):
    """Sessions, their places, and the committed tokens that the step computes.

    Each session has at least one such token.

    is_judged  whether these tokens are all that the session has.
    """

    sessions: list[Session]
    places: IntpArray
    starts: Int32Array
    sizes: IntpArray
    is_judged: BoolArray
    num_tokens: int
    background_s: float = 0.0  # as of `StepPlan`

    def decoding(self) -> list[Session]:
        """Return the sessions that get a token in this step."""
        if np.count_nonzero(self.is_judged) == len(self.sessions):
            return self.sessions
        return [self.sessions[i] for i in self.is_judged.nonzero()[0].tolist()]


class _Limits(NamedTuple):
    """The limits of a step's rows: `room` is `max_rows`, or less if KV slots are short."""

    max_rows: int
    room: int
    curve: StepCurve
    prefill: PrefillLimit
    max_scored: int
    background_s: float | None


def _chunks(sessions: Sequence[Session], limits: _Limits, *, is_fed: bool) -> _Chunks:
    """Return how many tokens the step computes of each session, within the room.

    is_fed  whether the step in flight supplies a token where no token is known.
    """
    trees, chosen = sessions[0].trees, list(sessions)
    places = np.array([session.place for session in chosen], np.intp)
    starts = trees.kv_len[places]
    pending = (trees.length[places] - starts).astype(np.intp)
    if is_fed:
        np.maximum(pending, 1, out=pending)
    if (num_tokens := int(pending.sum())) == len(chosen) <= limits.room:
        return _Chunks(chosen, places, starts, pending, pending > 0, num_tokens)
    wanted, background_s = _beside_decoding(chosen, starts, pending, limits, is_late=is_fed)
    sizes = filled(wanted, limits.room)
    if np.count_nonzero(trees.has_extras[places]):
        limit_scored(chosen, sizes, limits.max_scored)
    some = sizes.nonzero()[0]
    if len(some) < len(chosen):
        chosen = [chosen[i] for i in some.tolist()]
        places, starts, pending, sizes = places[some], starts[some], pending[some], sizes[some]
    return _Chunks(chosen, places, starts, sizes, sizes == pending, int(sizes.sum()), background_s)


def _beside_decoding(
    sessions: list[Session], starts: Int32Array, pending: IntpArray, limits: _Limits, *, is_late: bool
) -> tuple[IntpArray, float]:
    """Return how many tokens of each session the step may compute, and `StepPlan.background_s`.

    The step limits prompt rows, and so does the time that decoding sessions can spare.
    """
    is_prompt = pending > 1
    num_decoding = len(pending) - int(np.count_nonzero(is_prompt))
    if num_decoding == len(pending):
        return pending, 0.0
    prompts = is_prompt.nonzero()[0]
    chunks, room = (starts[prompts], pending[prompts]), max(limits.room - num_decoding, 1)
    room = limits.prefill.most_rows(chunks, num_decoding, room, limits.curve, is_late=is_late)
    if not num_decoding:
        return filled(pending, room), 0.0
    sizes = pending.copy()
    if limits.background_s:
        prompts = prompts[np.argsort(pending[prompts], kind="stable")]  # what has begun comes to its end
        chunks = starts[prompts], pending[prompts]
        rows, added_s = limits.prefill.within(
            chunks, num_decoding, room, limits.curve, limits.background_s, is_late=is_late
        )
        sizes[prompts] = filled(chunks[1], rows)
        return sizes, added_s
    is_free = [not sessions[i].yields_to_decode and sessions[i].length <= limits.max_rows for i in prompts.tolist()]
    sizes[prompts] = limits.prefill.sizes(chunks, np.array(is_free), num_decoding, room, limits.curve, is_late=is_late)
    return sizes, 0.0


def _fit_scratch(sessions: Sequence[Session], room: int) -> int:
    """Remove the scratch rows that do not fit; return the number that is left."""
    if not sessions or not np.count_nonzero(sessions[0].trees.num_scratch):
        return 0
    taken = 0
    for session in sessions:
        count = session.scratch.num_rows
        if count > room - taken:
            session.scratch = NO_SCRATCH
        else:
            taken += count
    return taken


def _below(rows: ScratchRows, num_nodes: int) -> ScratchRows:
    """Return scratch rows placed behind that many nodes; their parents are -1 or earlier scratch rows."""
    if not (rows.num_rows and num_nodes):
        return rows
    return replace(rows, parents=np.where(rows.parents < 0, -1, rows.parents + num_nodes).astype(np.int32))


def _shares(chunks: _Chunks, chosen: Chosen, before: Shares | None, drafted: DeviceTokens | None) -> Shares:
    """Return the parts of all sessions; `chosen` has nodes of the decoding sessions."""
    sessions, places, starts, sizes, is_judged, *_ = chunks
    trees, num_nodes = sessions[0].trees, np.zeros(len(sessions), np.intp)
    token_ids, parents, scores = _tokens_of(chunks), NO_TOKENS, NO_SCORES
    if len(chosen.nodes):
        num_nodes[is_judged] = np.diff(chosen.firsts)
        node_tokens, parents, scores = trees.operations.flatten(chosen.firsts, chosen.nodes)
        if drafted is not None and drafted.tree is not None:
            assert drafted.tree.are_first(node_tokens, np.diff(chosen.firsts)), (
                "what stands above these nodes may be missing"
            )
        token_ids = _interleaved(token_ids, sizes, node_tokens, num_nodes)
    batch = StepBatch(
        session_ids=trees.session_id[places].tolist(),
        params=[session.params for session in sessions],
        sampling=trees.sampling[places],
        traits=trees.traits[places],
        starts=starts,
        num_tokens=sizes,
        is_judged=is_judged,
        token_ids=token_ids,
        num_nodes=num_nodes,
        extras=_extras(chunks, num_nodes, chosen.nodes),
        parents=parents,
        scores=scores,
        fed_by=None if before is None else _fed_by(chunks, before),
        drafted=drafted if len(chosen.nodes) else None,
        masks=_masks(chunks),
    )
    return Shares(sessions, places, batch, chosen.nodes)


def _masks(chunks: _Chunks) -> StepMasks | None:
    """Return the masks of the sessions that have a grammar, if there are any."""
    has_grammar = chunks.sessions[0].trees.traits[chunks.places] & WITH_GRAMMAR
    if not np.count_nonzero(has_grammar):
        return None
    some = [chunks.sessions[i] for i in has_grammar.nonzero()[0].tolist()]
    return StepMasks({one.session_id: one.grammar for one in some if one.grammar is not None})


def _fed_by(chunks: _Chunks, before: Shares) -> Int32Array | None:
    """Return `StepBatch.fed_by`, given the newest step in flight."""
    trees = chunks.sessions[0].trees
    is_fed = trees.length[chunks.places] <= chunks.starts
    if not np.count_nonzero(is_fed):
        return None
    judged = before.judged().places
    found = np.full(len(trees.length), NONE, np.int32)
    found[judged] = np.arange(len(judged))
    fed_by: Int32Array = np.where(is_fed, found[chunks.places], np.int32(NONE))
    assert np.array_equal(fed_by != NONE, is_fed), "a session's last token is neither known nor on its way"
    return fed_by


def _tokens_of(chunks: _Chunks) -> Int32Array:
    """Return i32[sum of sizes]: the committed tokens that the step computes.

    A session with a token from the step in flight has its last known token here.
    """
    sessions, places, starts, sizes, is_judged, num_tokens, _ = chunks
    trees = sessions[0].trees
    if num_tokens == len(sessions) == np.count_nonzero(is_judged):
        return trees.last_token[places]
    starts = np.minimum(starts, trees.length[places] - 1)
    spans = zip(sessions, starts.tolist(), (starts + sizes).tolist(), strict=True)
    return np.array([token for session, start, end in spans for token in session.token_ids[start:end]], np.int32)


def _interleaved(token_ids: Int32Array, sizes: IntpArray, of_nodes: Int32Array, num_nodes: IntpArray) -> Int32Array:
    """Return the tokens of each session, followed by the tokens of its nodes."""
    found = np.empty(len(token_ids) + len(of_nodes), np.int32)
    at = ends_of(sizes).repeat(num_nodes) + np.arange(
        len(of_nodes)
    )  # behind the session's tokens and all earlier nodes
    is_token = np.ones(len(found), np.bool_)
    is_token[at] = False
    found[at], found[is_token] = of_nodes, token_ids
    return found


def _extras(chunks: _Chunks, num_nodes: IntpArray, nodes: Int32Array) -> dict[int, Extra]:
    """Return the parts that only few sessions have: a history, scratch rows, draft distributions, scored rows."""
    trees, places = chunks.sessions[0].trees, chunks.places
    has_extras = trees.has_extras[places]
    if not np.count_nonzero(has_extras):
        return {}
    found, ends = dict[int, Extra](), ends_of(num_nodes)
    for i in (has_extras * chunks.is_judged).nonzero()[0].tolist():
        session, count = chunks.sessions[i], int(num_nodes[i])
        own = nodes[ends[i] - count : ends[i]]
        distributions = trees.distributions_of(own) if count and session.takes_distributions else None
        found[i] = Extra(session.history(), _below(session.scratch, count), distributions)
    scored = scored_rows(chunks.sessions, chunks.starts, chunks.sizes, has_extras.nonzero()[0].tolist())
    for i, rows in scored.items():
        found[i] = found.get(i, NO_EXTRA)._replace(scored=rows)
    return found
