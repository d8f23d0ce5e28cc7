"""The messages of a verifier: a step's verdicts, repeated tokens, and failed sessions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, overload

import numpy as np

from specq.protocol import (
    LEAST_OWN_LANE,
    Activations,
    Fault,
    Int32Array,
    Message,
    Open,
    SessionFailed,
    Verdict,
    Verdicts,
)
from specq.runtime import Faults
from specq.verification import WITH_LOGPROBS
from specq.verifier.sessions.session import Session
from specq.verifier.step.rounds import NO_FLAGS, Round, Rounds
from specq.verifier.trees import MAX_LANES

MANY = 4  # number of verdicts from which one message of arrays is cheaper than separate messages
MOST_US = 2**31 - 1
LANE_NUMBERS = np.arange(MAX_LANES)


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

    @property
    def session_ids(self) -> list[int]:
        """The sessions that the messages concern."""
        own: list[int] = [] if self._verdicts is None else self._verdicts.session_ids.tolist()
        others = (*self._activations, *self._messages)
        return own + [getattr(message, "session_id", -1) for message in others]

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
        seen=np.stack([trees.lane_id[lanes], trees.newest_id[lanes]], 1).ravel().astype(np.int32),
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
