"""What a verifier reports: the verdict of a round, tokens that are sent again, and that a session failed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from specq.protocol import COLOCATED_LANE, Fault, Int32Array, Open, SessionFailed, Verdict
from specq.runtime import Faults
from specq.verifier.rounds import NO_FLAGS, Round
from specq.verifier.session import Session


def verdicts_of(
    rounds: Iterable[Round], min_accept_prob: int, step_us: int, started: float, faults: Faults
) -> Iterator[Verdict]:
    """Yield the verdicts of rounds; `faults` gets the sessions for which that raises."""
    for done in rounds:
        try:
            verdict = verdict_of(done, min_accept_prob, (step_us, done.waited_us(started)))
        except Exception as error:  # noqa: BLE001 - as in `Faults.of`, which costs more, for each session of each step
            faults.note(done.session, "committed", error)
        else:
            yield verdict


def verdict_of(done: Round, min_accept_prob: int, us: tuple[int, int]) -> Verdict:
    """Return the verdict of a round; `us`: the step's time and the longest wait of a node, as in `Verdict`."""
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
        origins=np.frombuffer(done.origins, np.uint8),
        node_lanes=NO_FLAGS if _has_one_remote_lane(done.session) else done.lanes,
    )


def verdict_again(session: Session, base_len: int, min_accept_prob: int) -> Verdict:
    """Return one verdict with all that was committed from `base_len` on; it names no nodes."""
    origins = np.array(session.origins[base_len - session.opened_len :], np.uint8)
    return _verdict(
        session, base_len, np.array(session.token_ids[base_len:], np.int32), min_accept_prob, origins=origins
    )


def _verdict(session: Session, base_len: int, token_ids: Int32Array, min_accept_prob: int, **of_round: Any) -> Verdict:
    """Return a verdict with what any verdict on a session carries; the session has committed the tokens already."""
    return Verdict(
        session_id=session.session_id,
        epoch=session.epoch,
        base_len=base_len,
        finish=session.finish,
        min_accept_prob=min_accept_prob,
        seen=session.trees.seen(session.place),
        stats=session.stats.to_dict() if session.finish else {},
        token_ids=token_ids,
        **session.logprobs.arrays(base_len - session.opened_len),
        **of_round,
    )


def _has_one_remote_lane(session: Session) -> bool:
    """Return whether all nodes are of the only drafter, which need not be said then; the verifier's own lanes are named always."""
    seen = session.trees.seen(session.place)
    return len(seen) == 2 and seen[0] < COLOCATED_LANE


def failure(session: Session | Open, fault: Fault) -> SessionFailed:
    """Return the message that a session cannot go on, or cannot be opened."""
    return SessionFailed(session_id=session.session_id, epoch=session.epoch, reason=fault.reason, retry=fault.retry)
