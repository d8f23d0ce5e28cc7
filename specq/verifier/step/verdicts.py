"""What a step's judgements change and report: the commit for all sessions at once, and the verifier's messages.

A commit brings tokens to transcripts and counts to trees. Messages are a step's verdicts, repeated tokens, and failed
sessions.

Rule: only this module changes a transcript."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np

from specq.grammar import commit_each
from specq.protocol import (
    LEAST_OWN_LANE,
    Activations,
    EngineLostError,
    Fault,
    Int32Array,
    IntpArray,
    Message,
    Open,
    SessionFailed,
    Verdict,
    Verdicts,
)
from specq.runtime import Faults
from specq.verification import CORRECTION, WITH_GRAMMAR, WITH_LOGPROBS, Judgements, ends_of, places_in_runs, starts_of
from specq.verifier.sessions.session import Session
from specq.verifier.step.node_choice import Shares
from specq.verifier.step.rounds import NO_FLAGS, NO_ROUNDS, NOTHING, Round, Rounds
from specq.verifier.trees import MAX_LANES, NONE

MANY = 4  # number of verdicts from which one message of arrays is cheaper than separate messages
MOST_US = 2**31 - 1
LANE_NUMBERS = np.arange(MAX_LANES)
T = TypeVar("T")


class Reports(Sequence[Message]):
    """A step's messages, one for each session; `packed` returns as few messages as possible."""

    def __init__(
        self, verdicts: Verdicts | None, messages: Sequence[Message], activations: Sequence[Activations] = ()
    ) -> None:
        """`activations` come first, then `verdicts`, then the other messages."""
        self._verdicts, self._messages, self._activations = verdicts, messages, activations

    def packed(self) -> list[Message]:
        """Return the messages to send."""
        return [*self._activations, *([self._verdicts] if self._verdicts is not None else ()), *self._messages]

    def and_of(self, messages: Sequence[Message]) -> Reports:
        """Return the same with further messages."""
        return Reports(self._verdicts, [*self._messages, *messages], self._activations) if messages else self

    def behind(self, activations: Sequence[Activations]) -> Reports:
        """Return the same behind hidden states, so that a reader has them before the tokens."""
        return Reports(self._verdicts, self._messages, activations) if activations else self

    def by_reader(self, reader_of: Callable[[int], T]) -> Iterator[tuple[T, list[Message]]]:
        """Yield each reader and its messages, as few as possible. `reader_of` returns the reader of a session."""
        of_verdicts = [] if self._verdicts is None else [*map(reader_of, self._verdicts.session_ids.tolist())]
        others = [*self._activations, *self._messages]
        readers = dict.fromkeys([*of_verdicts, *(reader_of(_session_of(one)) for one in others)])
        if len(readers) == 1:
            yield from ((reader, self.packed()) for reader in readers)
            return
        for reader in readers:
            places = [i for i, of_verdict in enumerate(of_verdicts) if of_verdict == reader]
            part = self._verdicts.take(places) if self._verdicts is not None and places else None
            own = [one for one in others if reader_of(_session_of(one)) == reader]
            activations = [one for one in own if isinstance(one, Activations)]
            yield reader, Reports(part, own[len(activations) :], activations).packed()

    @cached_property
    def _each(self) -> list[Message]:
        return [*self._activations, *(self._verdicts.each() if self._verdicts is not None else ()), *self._messages]

    def __len__(self) -> int:
        return len(self._each)

    def __iter__(self) -> Iterator[Message]:
        return iter(self._each)

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> list[Message]: ...
    def __getitem__(self, index: int | slice) -> Message | list[Message]:
        return self._each[index]


NO_REPORTS = Reports(None, ())


def _session_of(message: Message) -> int:
    session_id: int = getattr(message, "session_id", -1)
    return session_id


def verdicts_of(rounds: Rounds, min_accept_prob: int, step_us: int, started: float, faults: Faults) -> Reports:
    """Return the verdicts of a step's rounds; sessions whose verdict raises are added to `faults`."""
    if not len(rounds):
        return NO_REPORTS
    together, alone = None, _alone(rounds)
    if len(alone) < len(rounds):
        others = rounds.take(np.delete(np.arange(len(rounds)), alone)) if alone else rounds
        together = _verdicts(others, min_accept_prob, step_us, started)
    own = list[Message]()
    for i in alone:
        done = rounds[i]
        with faults.of(done.session, "committed"):
            own.append(verdict_of(done, min_accept_prob, (step_us, done.waited_us(started))))
    return Reports(together, own)


def _alone(rounds: Rounds) -> Sequence[int]:
    """Return the places of the rounds that need a separate verdict."""
    if len(rounds) < MANY:
        return range(len(rounds))
    trees, places = rounds.sessions[0].trees, rounds.places
    is_special = trees.has_ended[places] | trees.explains[places] | (trees.traits[places] & WITH_LOGPROBS)
    is_special |= trees.cached_at[places] == rounds.base_lens
    found: list[int] = is_special.nonzero()[0].tolist()
    return range(len(rounds)) if len(rounds) - len(found) < MANY else found


def _verdicts(rounds: Rounds, min_accept_prob: int, step_us: int, started: float) -> Verdicts:
    trees, places = rounds.sessions[0].trees, rounds.places
    num_lanes = trees.num_lanes[places]
    lanes = trees.session_lanes[places][num_lanes[:, None] > LANE_NUMBERS]
    waited_s = np.where(rounds.num_nodes > 0, started - rounds.first_arrived, 0.0)
    return Verdicts(
        min_accept_prob=min_accept_prob,
        step_us=min(step_us, MOST_US),
        session_ids=trees.session_id[places],
        epochs=trees.epoch[places],
        base_lens=rounds.base_lens,
        num_tokens=rounds.num_tokens.astype(np.int32),
        num_nodes=rounds.num_nodes.astype(np.int32),
        num_seen=2 * num_lanes,
        waited_us=np.minimum(waited_s * 1e6, MOST_US).astype(np.int32),
        token_ids=rounds.token_ids,
        origins=rounds.origins,
        node_ids=rounds.node_ids,
        mask=rounds.is_accepted,
        node_lanes=rounds.lanes,
        seen=np.array([trees.lane_id[lanes], trees.newest_id[lanes]], np.int32).T.ravel(),
    )


def verdict_of(done: Round, min_accept_prob: int, us: tuple[int, int]) -> Verdict:
    """Return the verdict of a round.

    us  the step's time and the longest wait of a node, as in `Verdict`.
    """
    if not len(done.nodes):
        return _verdict(done.session, done.base_len, done.token_ids, min_accept_prob, us=us)
    return _verdict(
        done.session,
        done.base_len,
        done.token_ids,
        min_accept_prob,
        us=us,
        node_ids=done.node_ids,
        mask=done.is_accepted,
        origins=done.origins,
        node_lanes=NO_FLAGS if _has_one_remote_lane(done.session) and not done.session.explains else done.lanes,
        **done.session.explained,
    )


def verdict_again(session: Session, base_len: int, min_accept_prob: int) -> Verdict:
    """Return one verdict with all tokens committed from `base_len` on; it names no nodes."""
    origins = np.array(session.origins[base_len - session.opened_len :], np.uint8)
    return _verdict(
        session, base_len, np.array(session.token_ids[base_len:], np.int32), min_accept_prob, origins=origins
    )


def _verdict(session: Session, base_len: int, token_ids: Int32Array, min_accept_prob: int, **of_round: Any) -> Verdict:
    """Return a verdict with the common fields; the session has committed the tokens already."""
    return Verdict(
        session_id=session.session_id,
        epoch=session.epoch,
        base_len=base_len,
        finish=session.finish,
        min_accept_prob=min_accept_prob,
        seen=session.trees.seen(session.place),
        stats=session.stats.to_dict() if session.finish else {},
        cached_tokens=session.cached_tokens or 0 if session.cached_at == base_len else 0,
        prompt_rows=session.prompt_rows(base_len),
        token_ids=token_ids,
        **session.logprobs.arrays(base_len - session.opened_len),
        **of_round,
    )


def _has_one_remote_lane(session: Session) -> bool:
    """Return whether all nodes belong to one drafter (its lane can be left out).

    The verifier's own lanes are always named.
    """
    seen = session.trees.seen(session.place)
    return len(seen) == 2 and seen[0] < LEAST_OWN_LANE


def failure(session: Session | Open, fault: Fault) -> SessionFailed:
    """Return the message that a session cannot continue, or cannot be opened."""
    return SessionFailed(session_id=session.session_id, epoch=session.epoch, reason=fault.reason, retry=fault.retry)


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
