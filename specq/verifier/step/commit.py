"""Commit a step's judgements for all sessions at once: tokens to transcripts, counts to trees.

Rule: only this module changes a transcript.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from specq.grammar import commit_each
from specq.protocol import EngineLostError, Int32Array, IntpArray
from specq.runtime import Faults
from specq.verification import CORRECTION, WITH_GRAMMAR, Judgements, ends_of, places_in_runs, starts_of
from specq.verifier.sessions.session import Session
from specq.verifier.step.node_choice import Shares
from specq.verifier.step.rounds import NO_ROUNDS, NOTHING, Rounds
from specq.verifier.trees import NONE


def commit(
    shares: Shares, judgements: Judgements, min_accept_prob: int, faults: Faults, *, is_late: bool = False
) -> Rounds:
    """Commit the judgements of `shares`, for all sessions at once, and count them.

    Returns the rounds of the sessions without a fault.

    is_late  sessions may have ended, or been closed or evicted, since the launch. Results for such sessions are
             discarded.
    """
    shares = shares.judged()
    if len(judgements) != len(shares):  # it is unknown which belongs to which session, so all fail
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
    trees.operations.count(rounds.places, *counted, min_accept_prob)  # the trees as verified, before the commit
    trees.operations.commit(rounds.places, rounds.num_tokens, rounds.token_ids, rounds.num_nodes)
    return rounds


def _without(left_out: Collection[int], shares: Shares, judgements: Judgements) -> tuple[Shares, Judgements]:
    if not left_out:
        return shares, judgements
    rest = np.delete(np.arange(len(shares)), list(left_out))
    return shares.take(rest), judgements.take(rest)


class _Kept(NamedTuple):
    """The number of tokens kept from each judgement, i64[n].

    Also the sessions that end there, with the reason, and the failed sessions' places.
    """

    num_tokens: IntpArray
    finished: list[tuple[Session, str]]
    failed: list[int]


def _up_to_end(shares: Shares, judgements: Judgements, faults: Faults) -> _Kept:
    """Find the ends of texts, and store log-probabilities up to there."""
    if not len(shares):
        return _Kept(judgements.num_tokens, [], [])
    trees, places, sessions = shares.sessions[0].trees, shares.places, shares.sessions
    room = trees.limit[places] - trees.length[places]
    kept = judgements.num_tokens if judgements.are_single else np.minimum(judgements.num_tokens, room)
    finishes, by_text = dict[int, str](), list[int]()
    is_full = room == 1 if judgements.are_single else kept == room
    if np.count_nonzero(is_full):
        finishes = dict.fromkeys(is_full.nonzero()[0].tolist(), "length")
    for i, count in _first_ends(judgements, trees.end_ids[places]).items():
        if count <= kept[i]:
            kept[i], finishes[i] = count, "stop"
    ends_by_text = trees.ends_by_text[places]
    if np.count_nonzero(ends_by_text):
        by_text = ends_by_text.nonzero()[0].tolist()
    for i in by_text:
        with faults.of(sessions[i], "committed"):
            kept[i], finishes[i] = sessions[i].up_to_end(judgements[i].token_ids.tolist())
    with_grammar = (trees.traits[places] & WITH_GRAMMAR).nonzero()[0].tolist()
    if with_grammar:
        which = [i for i in with_grammar if not faults.found or sessions[i] not in faults]
        finishes |= dict.fromkeys(_follow_grammars(sessions, judgements, kept, which, faults), "stop")
    for i, found in judgements.logprobs.items():
        with faults.of(sessions[i], "committed"):
            sessions[i].logprobs.add(found, int(kept[i]))
    failed = [i for i, session in enumerate(sessions) if session in faults] if faults.found else []
    return _Kept(kept, [(sessions[i], reason) for i, reason in finishes.items() if reason and i not in failed], failed)


def _follow_grammars(
    sessions: Sequence[Session], judgements: Judgements, kept: IntpArray, which: Sequence[int], faults: Faults
) -> list[int]:
    """Let grammars follow the kept tokens; return the places of texts that end with these. The rest is not kept."""
    ended, tokens = list[int](), judgements.token_ids.tolist()
    firsts, counts = starts_of(judgements.num_tokens).tolist(), kept.tolist()
    grammars = [grammar for i in which if (grammar := sessions[i].grammar) is not None]
    texts = [tokens[firsts[i] : firsts[i] + counts[i]] for i in which]
    for i, grammar, count in zip(which, grammars, commit_each(grammars, texts), strict=True):
        if not isinstance(count, int):
            faults.note(sessions[i], "committed", count)
        elif grammar.has_ended:
            kept[i] = count
            ended.append(i)
    return ended


def _first_ends(judgements: Judgements, end_ids: Int32Array) -> dict[int, int]:
    """Return, by place, the number of tokens up to the session's first end token, inclusive.

    end_ids  i32[n, most].

    Places without such a token are left out.
    """
    num_tokens = judgements.num_tokens
    if not judgements.are_single:
        end_ids = end_ids.repeat(num_tokens, 0)
    is_end = judgements.token_ids[:, None] == end_ids  # [tokens, most]
    if not np.count_nonzero(is_end):
        return {}
    of_tokens = np.arange(len(judgements)).repeat(num_tokens)
    firsts = starts_of(num_tokens)
    at = is_end.nonzero()[0][::-1]  # of several in a session, the first one is written last
    return dict(zip(of_tokens[at].tolist(), (at - firsts[of_tokens[at]] + 1).tolist(), strict=True))


def _rounds(shares: Shares, judgements: Judgements, kept: IntpArray) -> Rounds:
    """Return the uncommitted rounds that keep this number of tokens of each judgement."""
    counts, token_ids, nodes = judgements.num_tokens, judgements.token_ids, judgements.nodes
    num_nodes, sessions = shares.batch.num_nodes, shares.sessions
    if kept is not counts and np.count_nonzero(kept != counts):
        is_kept = places_in_runs(counts) < kept.repeat(counts)
        token_ids, nodes = token_ids[is_kept], nodes[is_kept]
    path = NOTHING
    if len(shares.nodes):
        path = np.where(nodes == CORRECTION, NONE, starts_of(num_nodes).repeat(kept) + nodes)
    places, base_lens = shares.places, sessions[0].trees.length[shares.places]
    return Rounds(sessions, places, base_lens, kept, token_ids, num_nodes, shares.nodes, path)


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
