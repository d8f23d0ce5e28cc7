"""A draft worker without its sockets: verdicts in, drafts out, one drafter inside.

For each session it keeps the committed context and the drafted tree beyond it. The tree grows best first. Each pass
expands the nodes likeliest to lie on the target's path, in one batched call over all sessions. A drafter never waits.
It receives verdicts between passes, and they cut the tree and move its root.

Rules: a drafter's output is only a hint. It may be useless, with a poor model or a verifier too busy for extra tokens.
Then the drafter backs off: it sends no drafts and makes an occasional pass. A draft names positions, so late, doubled
or lost messages do no harm. If several verdicts in a row use none of the sent nodes, the nodes were lost, and are sent
again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import structlog

from specq.drafting import Children, Drafter, Expansion, as_drafter
from specq.drafting.worker.draft_nodes import AcceptanceStats, NewChain
from specq.drafting.worker.grammars import DraftGrammars
from specq.drafting.worker.session import DraftSession, chains_of, drafts_of
from specq.grammar import GrammarBuilder
from specq.protocol import (
    CAPABILITIES,
    GRAMMAR_CAPABILITIES,
    Activations,
    Assign,
    Clock,
    Draft,
    Heartbeat,
    Hello,
    Message,
    ProtocolError,
    Release,
    SpecqError,
    Verdict,
    Verdicts,
    spans_of,
    trace_events,
)
from specq.runtime import Faults, Tracer, in_halves, traced
from specq.verification import reason_against

log = structlog.get_logger(__name__)

MOST_REFUSED = 1000  # refused sessions that are remembered
# Maximum chains of a pass, for few sessions. Each further chain makes a pass longer, and no verdict is received during
# it.
CHAIN_WIDTH = 2


class _Chosen(NamedTuple):
    """The nodes of a session that a pass expands."""

    session: DraftSession
    nodes: list[int]

    @property
    def session_id(self) -> int:
        return self.session.session_id


class DraftWorker:
    """Sessions, a drafter, and the body of the loop between them."""

    def __init__(
        self,
        drafter: Drafter,
        *,
        incarnation: int,
        width: int = 8,
        fan_out: int = 3,
        max_ahead: int = 32,
        chain: int = 1,
        grammar_builder: GrammarBuilder | None = None,
    ) -> None:
        """Set the bounds of a pass, and what builds the grammars of jobs (None: it drafts without).

        A pass expands at most `width` nodes, but at least one a session. Each gets `fan_out` children, up to
        `max_ahead` tokens deep. `chain` levels are drafted below each node at once, if the drafter has chains.
        """
        self.drafter, self.incarnation = as_drafter(drafter), incarnation
        self.width, self.fan_out, self.max_ahead = width, fan_out, max_ahead
        self.chain = chain if self.drafter.has_chains else 1
        self._reads_states = bool(self.drafter.activations.layers)
        self.sessions: dict[int, DraftSession] = {}
        self.grammars = DraftGrammars(grammar_builder)
        if self.grammars.are_followed:
            self.drafter.masks = self.grammars.masks
        self.acceptance_stats: dict[str, AcceptanceStats] = {}  # by strategy: drawn nodes are accepted less often
        self.state = "ready"
        self.num_passes = self.num_drafts = self.num_nodes = 0  # passes, and drafts and nodes that were sent
        self.tracer = Tracer()
        self._refused: dict[int, int] = {}  # epochs of sessions for which an exception was raised
        self._handlers: dict[type[Message], Callable[..., None]] = {
            Assign: self._assign,
            Release: self._release,
            Verdict: self._verdict,
            Verdicts: self._verdicts,
            Clock: self._clock,
            Activations: self._activations,
        }

    def handle(self, message: Message, broker: str = "") -> None:
        """Handle one message of a broker. `broker`: its name, if there are several.

        Raises ProtocolError for one that is not for a drafter, or for a session of another broker.
        """
        handler = self._handlers.get(type(message))
        if handler is None:
            raise ProtocolError(f"a drafter does not accept {message.TYPE}")
        try:
            handler(message, broker)
        except SpecqError:
            raise
        except Exception as error:
            about = message if isinstance(message, Assign | Verdict) else None
            raise self._not_handled(message.TYPE, about, error) from error

    def _not_handled(self, kind: str, about: DraftSession | Assign | Verdict | None, error: Exception) -> ProtocolError:
        """Refuse the session that a message was about; return the error to report."""
        log.error("message_handling_failed", kind=kind, **traced(error))
        if about is not None:
            self._refuse(about)
        return ProtocolError(f"a {kind} could not be handled: {type(error).__name__}")

    def _refuse(self, session: DraftSession | Assign | Verdict) -> None:
        """Stop drafting for a session that raised an exception, until it gets another epoch."""
        self._refused[session.session_id] = session.epoch
        if len(self._refused) > MOST_REFUSED:
            del self._refused[next(iter(self._refused))]
        self.sessions.pop(session.session_id, None)
        self.grammars.forget(session.session_id)
        self.tracer.end(session.session_id)
        with Faults().of(session, "closed"):
            self.drafter.close(session.session_id)

    def _assign(self, message: Assign, broker: str) -> None:
        if not 0 < message.prompt_len <= len(message.token_ids):
            length = len(message.token_ids)
            raise ProtocolError(f"a context of {length} tokens with a prompt of {message.prompt_len}")
        if reason := reason_against(message.params.strategy):
            raise ProtocolError(reason)
        _check_tokens(int(message.token_ids.min()))
        if self._refused.get(message.session_id) == message.epoch:
            return
        known = self.sessions.get(message.session_id)
        if known is not None and known.broker != broker and known.epoch >= message.epoch:
            raise ProtocolError(f"an assign from {broker or 'a broker'} that lost the session to another broker")
        if known is not None and (known.epoch, known.lane) == (message.epoch, message.lane):
            return
        if known is not None:
            self.grammars.forget(message.session_id)
            self.drafter.close(message.session_id)
        acceptance_stats = self.acceptance_stats.setdefault(message.params.strategy, AcceptanceStats())
        session = DraftSession(
            message, acceptance_stats, fan_out=self.fan_out, max_ahead=self.max_ahead, chain=self.chain
        )
        session.broker = broker
        self.sessions[message.session_id] = session
        self.drafter.open(message.session_id, message.token_ids, session.params, message.owner)
        self.grammars.begin(session, message.prompt_len, message.owner)
        if message.trace:
            self.tracer.open(message.session_id, broker)
            self._note(message.session_id, trace_events.ASSIGNED, message.lane, len(message.token_ids))

    def _clock(self, message: Clock, broker: str) -> None:
        self.tracer.take_clock(message, broker)

    def _note(self, session_id: int, kind: trace_events.Kind, *values: int) -> None:
        if self.tracer.is_on:
            self.tracer.note(session_id, kind, self.tracer.clock(), *values)

    def forget_broker(self, broker: str) -> None:
        """Drop the sessions of a broker that will not come back."""
        for session in [session for session in self.sessions.values() if session.broker == broker]:
            self._drop(session)
        self.tracer.forget(broker)

    def _known(self, session_id: int, kind: str, broker: str) -> DraftSession | None:
        """Return a session that a message concerns. Raises ProtocolError if another broker assigned it."""
        session = self.sessions.get(session_id)
        if session is not None and session.broker != broker:
            raise ProtocolError(f"a {kind} from {broker or 'a broker'} for a session of another broker")
        return session

    def _release(self, message: Release, broker: str) -> None:
        session = self._known(message.session_id, message.TYPE, broker)
        if session is not None and session.epoch <= message.epoch:
            self._drop(session)

    def _drop(self, session: DraftSession) -> None:
        del self.sessions[session.session_id]
        self.grammars.forget(session.session_id)
        self._note(session.session_id, trace_events.RELEASED, session.length)
        self.tracer.end(session.session_id)
        self.drafter.close(session.session_id)

    def _verdicts(self, message: Verdicts, broker: str) -> None:
        """Follow each verdict of a step; then raise the first failure's ProtocolError, if any."""
        message.check()
        numbers = message.session_ids.tolist(), message.epochs.tolist(), message.base_lens.tolist()
        spans = spans_of(message.num_tokens), spans_of(message.num_nodes)
        errors = list[SpecqError]()
        for session_id, epoch, *own in zip(*numbers, *spans, strict=True):
            try:
                session = self._known(session_id, Verdict.TYPE, broker)
                if session is not None and session.epoch == epoch:
                    self._follow(session, message, *own)
            except SpecqError as error:
                errors.append(error)
            except Exception as error:  # noqa: BLE001 - a verdict harms no session but its own
                errors.append(self._not_handled(Verdict.TYPE, session, error))
        if errors:
            raise errors[0]

    def _verdict(self, message: Verdict, broker: str) -> None:
        session = self._known(message.session_id, message.TYPE, broker)
        if session is None or session.epoch != message.epoch:
            return
        if message.finish:
            num_tokens = len(message.token_ids)
            self._note(message.session_id, trace_events.VERDICT_ARRIVED, message.base_len, num_tokens)
            self._drop(session)
            return
        tokens, nodes = slice(0, len(message.token_ids)), slice(0, len(message.node_ids))
        self._follow(session, message, message.base_len, tokens, nodes)

    def _follow(
        self, session: DraftSession, message: Verdict | Verdicts, base_len: int, tokens: slice, nodes: slice
    ) -> None:
        """Apply the verdict on a session: these tokens and nodes of the message."""
        token_ids = message.token_ids[tokens]
        committed = token_ids.tolist()
        _check_tokens(min(committed, default=0))
        self._note(session.session_id, trace_events.VERDICT_ARRIVED, base_len, len(committed))
        known = session.length - base_len
        if session.draws_children and not known:
            session.learn(message.node_ids[nodes], message.mask[nodes], message.node_lanes[nodes])
        if 0 <= known < len(committed):  # otherwise it is old, or there is a gap that the broker will fill
            fresh = committed[known:]
            path = session.commit(fresh)
            self.grammars.commit(session.session_id, fresh)
            self.drafter.commit(session.session_id, token_ids[known:], path)
        session.adjust(message.min_accept_prob, was_used=nodes.start < nodes.stop)

    def _activations(self, message: Activations, broker: str) -> None:
        session = self._known(message.session_id, message.TYPE, broker)
        if session is None or (session.epoch, session.lane) != (message.epoch, message.lane):
            return
        if not self._reads_states:
            raise ProtocolError("this drafter reads no hidden states")
        asked, width = self.drafter.activations, self.drafter.width
        if (message.tap_layers, message.tap_form, message.width) != (asked.layers, asked.form, width):
            raise ProtocolError(
                f"hidden states of layers {message.tap_layers} in {message.tap_form}, {message.width} numbers a row; "
                f"this drafter reads layers {asked.layers} in {asked.form}, {width} a row"
            )
        self.drafter.observe(message.session_id, message.first, message.rows())

    @property
    def has_work(self) -> bool:
        return any(map(self._needs_pass, self.sessions.values()))

    def _needs_pass(self, session: DraftSession) -> bool:
        """Return whether a session has a node to expand, or waits for an answer.

        Returns True if the check raises, so that `step` finds the cause.
        """
        try:
            return session.owes_chain or next(self._frontier(session), None) is not None
        except Exception:  # noqa: BLE001 - see above
            return True

    def _frontier(self, session: DraftSession) -> Iterator[tuple[float, int]]:
        """Return what may be expanded next, unless hidden states that the drafter needs are missing.

        A session that waits for an answer gets one anyway, if necessary an empty one.
        """
        if self._reads_states and not session.is_answer and not self.drafter.knows(session.session_id):
            return iter(())
        return session.frontier()

    def step(self) -> list[Draft]:
        """Run one pass: expand the likeliest nodes of all sessions; return the drafts to send."""
        self.grammars.take(self.sessions)
        faults = Faults()
        chosen = self._choose(faults)
        done = in_halves(list(chosen.values()), self._expand, faults, "drafted for")
        grown = [(one.session, own) for part, found in done for one, own in zip(part, found, strict=True)]
        waiting = [one for one in self.sessions.values() if one.owes_chain and one.session_id not in chosen]
        sending: list[DraftSession] = []
        for session, own in (*grown, *((one, []) for one in waiting)):  # their chains may be complete already
            with faults.of(session, "drafted for"):
                for chain in own:
                    session.grow(chain)
                if session.draft():
                    sending.append(session)
        drafts = [draft for _, made in in_halves(sending, drafts_of, faults, "drafted for") for draft in made]
        self.num_passes += bool(done)
        self.num_drafts += len(drafts)
        for draft in drafts:
            self.num_nodes += len(draft.token_ids)
            self._note(draft.session_id, trace_events.DRAFT_SENT, draft.lane, len(draft.token_ids), draft.base_len)
        self._drop_faulty(faults)
        return drafts

    def _expand(self, some: Sequence[_Chosen]) -> list[list[NewChain]]:
        """Draft below the chosen nodes of some sessions; return the new chains of each session."""
        pairs = [(one.session, node) for one in some for node in one.nodes]
        counts = [session.chain_below(node) for session, node in pairs]
        depth, width = max(map(len, counts)), max(map(max, counts))
        requests = [self._request(session, node, depth * width) for session, node in pairs]
        answers = self.drafter.expand_chain(requests, depth)
        chains = iter(chains_of(pairs, list(map(_cut, answers, counts)), requests, width))
        return [list(islice(chains, len(one.nodes))) for one in some]

    def _drop_faulty(self, faults: Faults) -> None:
        """Forget sessions for which drafting failed.

        The broker assigns them again when heartbeats do not list them. Sessions with an unexpected exception are then
        refused.
        """
        for session_id, fault in faults.found.items():
            session = self.sessions[session_id]
            if fault.retry:
                self._drop(session)
            else:
                self._refuse(session)

    def _choose(self, faults: Faults) -> dict[int, _Chosen]:
        """Return the nodes to expand, by session."""
        found = in_halves(list(self.sessions.values()), self._offers, faults, "drafted for")
        offers = [offer for _, of_part in found for offer in of_part]
        width = self.width if self.chain == 1 else min(self.width, CHAIN_WIDTH)
        best = heapq.nlargest(max(width, len(self.sessions)), offers, key=itemgetter(0))
        chosen: dict[int, _Chosen] = {}
        for _, session, node in best:
            chosen.setdefault(session.session_id, _Chosen(session, [])).nodes.append(node)
        return chosen

    def _offers(self, some: Sequence[DraftSession]) -> list[tuple[float, DraftSession, int]]:
        """Return (log-probability, session, node) for each node of some sessions that may be expanded."""
        return [(log_prob, session, node) for session in some for log_prob, node in self._frontier(session)]

    def _request(self, session: DraftSession, node: int, num_ids: int) -> Expansion:
        first = session.next_id
        session.next_id += num_ids
        return Expansion(session.session_id, session.tree.node_ids[node], tuple(range(first, session.next_id)))

    def hello(self, name: str) -> Hello:
        """Return what the broker must know of this drafter."""
        asked = self.drafter.activations
        return Hello(
            role="draft",
            name=name,
            incarnation=self.incarnation,
            model=self.drafter.info,
            tap_layers=asked.layers,
            tap_form=asked.form,
            tap_window=asked.window,
            capabilities=(*CAPABILITIES, *(GRAMMAR_CAPABILITIES if self.grammars.are_followed else ())),
        )

    def heartbeat(self) -> Heartbeat:
        """Return this drafter's state and the length of each session as it knows it."""
        sessions = list(self.sessions.values())
        return Heartbeat(
            incarnation=self.incarnation,
            state=self.state,
            load=len(sessions),
            steps=self.num_passes,
            pending=int(self.has_work),
            metrics={"drafts": self.num_drafts, "draft_nodes": self.num_nodes},
            session_ids=np.array([s.session_id for s in sessions], np.int64),
            epochs=np.array([s.epoch for s in sessions], np.int64),
            lengths=np.array([s.length for s in sessions], np.int32),
        )


def _check_tokens(least: int) -> None:
    """Raise ProtocolError if the least id is negative; drafters accept tokens that only the target has."""
    if least < 0:
        raise ProtocolError("token ids below 0")


def _cut(levels: Sequence[Children], counts: Sequence[int]) -> list[Children]:
    """Return at most this many children of each level."""
    pairs = zip(levels, counts, strict=False)
    return [level.first(count) if len(level.token_ids) > count else level for level, count in pairs]
