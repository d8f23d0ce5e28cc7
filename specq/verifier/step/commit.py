"""Commit what the engine judged, for all sessions of a step at once: tokens onto transcripts, counts onto trees.

Rule: only this module changes a transcript.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from specq.protocol import EngineLostError, Int32Array, IntpArray
from specq.runtime import Faults
from specq.verification import CORRECTION, Judgements, ends_of, places_in_runs, starts_of
from specq.verifier.sessions.session import Session
from specq.verifier.step.rounds import NO_ROUNDS, NOTHING, Rounds
from specq.verifier.step.shares import Shares
from specq.verifier.trees import NONE


def commit(
    shares: Shares, judgements: Judgements, min_accept_prob: int, faults: Faults, *, is_late: bool = False
) -> Rounds:
    """Commit what was judged of these shares, of all sessions at once, and count it; return the rounds of those without
    a fault.

    is_late     sessions may have ended, been closed or evicted since the step was launched: what it says of them is not
                looked at
    """
    shares = shares.judged()
    if len(judgements) != len(shares):  # whose is whose is not known, so none of the sessions can go on here
        raise EngineLostError(f"the engine gave {len(judgements)} judgements for {len(shares)} sessions")
    if is_late:
        gone = [i for i, session in enumerate(shares.sessions) if not session.is_open or session.finish]
        shares, judgements = _without(gone, shares, judgements)
    for i, fault in judgements.faults.items():
        faults.add(shares[i], fault)
    shares, judgements = _without(judgements.faults, shares, judgements)
    kept = _up_to_end(shares, judgements, faults)
    shares, judgements = _without(kept.failed, shares, judgements)
    if not len(shares):
        return NO_ROUNDS
    trees = shares.sessions[0].trees
    if not judgements.are_single:
        trees.kv_len[shares.places] += judgements.num_tokens - 1
    rounds = _rounds(shares, judgements, np.delete(kept.num_tokens, kept.failed) if kept.failed else kept.num_tokens)
    _append(rounds)
    for session, reason in kept.finished:
        session.end(reason)
    counted = rounds.num_nodes, rounds.nodes, rounds.is_accepted
    trees.operations.count(rounds.places, *counted, min_accept_prob)  # trees as they were verified
    trees.operations.commit(rounds.places, rounds.num_tokens, rounds.token_ids, rounds.num_nodes)
    return rounds


def _without(left_out: Collection[int], shares: Shares, judgements: Judgements) -> tuple[Shares, Judgements]:
    if not left_out:
        return shares, judgements
    rest = np.delete(np.arange(len(shares)), list(left_out))
    return shares.take(rest), judgements.take(rest)


class _Kept(NamedTuple):
    """How many tokens of each judgement are kept, i64[n]; which sessions end there, and why; and the places of those
    that failed."""

    num_tokens: IntpArray
    finished: list[tuple[Session, str]]
    failed: list[int]


def _up_to_end(shares: Shares, judgements: Judgements, faults: Faults) -> _Kept:
    """Find where texts end; take in log-probabilities up to there."""
    if not len(shares):
        return _Kept(judgements.num_tokens, [], [])
    trees, places, sessions = shares.sessions[0].trees, shares.places, shares.sessions
    room = trees.limit[places] - trees.length[places]
    kept = judgements.num_tokens if judgements.are_single else np.minimum(judgements.num_tokens, room)
    finishes, by_text, failed = dict[int, str](), list[int](), list[int]()
    is_full = room == 1 if judgements.are_single else kept == room
    if np.count_nonzero(is_full):
        finishes = dict.fromkeys(is_full.nonzero()[0].tolist(), "length")
    for i, count in _first_ends(judgements, trees.end_ids[places]).items():
        if count <= kept[i]:
            kept[i], finishes[i] = count, "stop"
    ends_by_text = trees.ends_by_text[places]
    if np.count_nonzero(ends_by_text):
        by_text = ends_by_text.nonzero()[0].tolist()
    for i in sorted({*by_text, *judgements.logprobs}):
        with faults.of(sessions[i], "committed"):
            if i in by_text:
                kept[i], finishes[i] = sessions[i].up_to_end(judgements[i].token_ids.tolist())
            if i in judgements.logprobs:
                sessions[i].logprobs.add(judgements.logprobs[i], int(kept[i]))
        failed += [i] if faults.found and sessions[i] in faults else []
    return _Kept(kept, [(sessions[i], reason) for i, reason in finishes.items() if reason and i not in failed], failed)


def _first_ends(judgements: Judgements, end_ids: Int32Array) -> dict[int, int]:
    """Return, by place, how many tokens there are up to the first that is among the session's end_ids i32[n, most], if
    there is one."""
    num_tokens = judgements.num_tokens
    if not judgements.are_single:
        end_ids = end_ids.repeat(num_tokens, 0)
    is_end = judgements.token_ids[:, None] == end_ids  # [tokens, most]
    if not np.count_nonzero(is_end):
        return {}
    of_tokens = np.arange(len(judgements)).repeat(num_tokens)
    firsts = starts_of(num_tokens)
    at = is_end.nonzero()[0][::-1]  # of several in a session the first counts
    return dict(zip(of_tokens[at].tolist(), (at - firsts[of_tokens[at]] + 1).tolist(), strict=True))


def _rounds(shares: Shares, judgements: Judgements, kept: IntpArray) -> Rounds:
    """Return the rounds that keep so many tokens of each judgement, before they are committed."""
    counts, token_ids, nodes = judgements.num_tokens, judgements.token_ids, judgements.nodes
    num_nodes, sessions = shares.batch.num_nodes, shares.sessions
    if kept is not counts and np.count_nonzero(kept != counts):
        is_kept = places_in_runs(counts) < kept.repeat(counts)
        token_ids, nodes = token_ids[is_kept], nodes[is_kept]
    path = NOTHING
    if len(shares.nodes):
        path = np.where(nodes == CORRECTION, NONE, starts_of(num_nodes).repeat(kept) + nodes)
    base_lens = sessions[0].trees.length[shares.places]
    return Rounds(sessions, shares.places, base_lens, kept, token_ids, num_nodes, shares.nodes, path)


def _append(rounds: Rounds) -> None:
    """Append the rounds' tokens to the sessions' transcripts."""
    tokens, origins, last = rounds.token_ids.tolist(), rounds.origins.tobytes(), rounds.token_ids
    if len(tokens) == len(rounds):
        for session, token, origin in zip(rounds.sessions, tokens, origins, strict=True):
            session.token_ids.append(token)
            session.origins.append(origin)
    else:
        ends = ends_of(rounds.num_tokens)
        spans, last = ends.tolist(), last[ends - 1]
        for session, first, end in zip(rounds.sessions, [0, *spans], spans, strict=False):
            session.token_ids += tokens[first:end]
            session.origins += origins[first:end]
    rounds.sessions[0].trees.last_token[rounds.places] = last
