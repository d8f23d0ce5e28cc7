"""A session at the verifier: what is committed, and its place among the draft trees of all sessions.

What a step reads of it (lengths, limits, flags) stands in the arrays of the trees, so that a step reads it for all
sessions at once; the attributes here read and write the same places.

Rules: only `specq.verifier.step.commit` changes the transcript, of all sessions of a step at once. No I/O, no clock, no
model. How drafts come onto the tree is in `specq.verifier.sessions.grafting`.

The states of a session at a verifier, and which event leads from which to which.

A session waits until there is room for its context in the engine, runs there, and ends once. Where room is short it is
evicted, and waits again; one that has ended keeps its KV until the broker closes it, or until others need the room. A
session that failed is closed.

Rule: `Session.note` is the only place that changes a state; an event that the table does not have is a bug, and raises.
Whether a session takes part in the next step is no state: it follows from its counts
(`specq.verifier.sessions.open_sessions`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Self

import numpy as np

from specq.engines import Engine
from specq.protocol import (
    MODES,
    NO_SCRATCH,
    History,
    Int32Array,
    LogprobRecord,
    ModelInfo,
    Open,
    SamplingParams,
    ScratchRows,
    SessionStats,
    Speculation,
)
from specq.text import StopMatcher, TextCodec
from specq.verification import make_rows, strategy, traits_of
from specq.verifier.sessions.history import Past
from specq.verifier.trees import MAX_END_IDS, MAX_LIVE_NODES, NONE, DraftTrees, Lane


class SessionState(StrEnum):
    """Where a session stands."""

    WAITING = "waiting"  # not in the engine: it is new, or was evicted
    RUNNING = "running"  # in the engine
    ENDED = "ended"  # it has a finish reason, and its KV
    FREED = "freed"  # it has a finish reason, and no KV
    CLOSED = "closed"  # the verifier has no more of it


class SessionEvent(StrEnum):
    """What happens to a session."""

    ADMITTED = "admitted"  # it was opened in the engine
    EVICTED = "evicted"  # it was closed in the engine to make room
    FINISHED = "finished"  # a step came to the end of its text
    CLOSED = "closed"  # by the broker, or since it failed


Ways = Mapping[SessionEvent, SessionState]

_CLOSES: Ways = {SessionEvent.CLOSED: SessionState.CLOSED}
TRANSITIONS: Mapping[SessionState, Ways] = {
    SessionState.WAITING: {SessionEvent.ADMITTED: SessionState.RUNNING, **_CLOSES},
    SessionState.RUNNING: {
        SessionEvent.EVICTED: SessionState.WAITING,
        SessionEvent.FINISHED: SessionState.ENDED,
        **_CLOSES,
    },
    SessionState.ENDED: {SessionEvent.EVICTED: SessionState.FREED, **_CLOSES},
    SessionState.FREED: _CLOSES,
    SessionState.CLOSED: {},
}
IN_ENGINE = frozenset({SessionState.RUNNING, SessionState.ENDED})
HAVE_ENDED = frozenset({SessionState.ENDED, SessionState.FREED})


def after(state: SessionState, event: SessionEvent) -> SessionState:
    """Return the state that an event leads to; AssertionError for one that cannot happen in this state."""
    following = TRANSITIONS[state].get(event)
    assert following is not None, f"a session that is {state} cannot be {event}"
    return following


SYNC_PATIENCE = 3  # heartbeats


class ArrayField:
    """An attribute of a session that stands in the arrays; `kind` 0 where the session is closed."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, session: Session, owner: type) -> Any:
        return (
            self.kind(getattr(session.trees.views, self.name)[session.place]) if session.place != NONE else self.kind()
        )

    def __set__(self, session: Session, value: Any) -> None:
        if session.place != NONE:
            getattr(session.trees.views, self.name)[session.place] = value


class Session:
    """One open session. `limit` is the committed length at which it ends, `end_ids` the tokens that end it sooner.

    state         see `specq.verifier.sessions.session`; finish: the reason why it has ended, once it has
    kv_len        tokens whose KV is there
    owner         whose sessions share KV and texts with it
    cached_tokens of the prompt's tokens, how many had KV when it was first opened in the engine; None: it was not yet
    journaled     tokens that the broker has confirmed
    """

    kv_len, limit, journaled = ArrayField(int), ArrayField(int), ArrayField(int)
    num_live = ArrayField(int)  # nodes on the tree
    explains = ArrayField(bool)  # verdicts say what was verified
    drafted_at = ArrayField(int)  # the newest position that a draft spoke of
    cached_at = ArrayField(int)  # the base length of the verdict that has `cached_tokens`; NONE: none has
    beats_waited = ArrayField(int)  # heartbeats since a synchronous session began to wait for a draft

    def __init__(self, message: Open, end_ids: tuple[int, ...] = (), trees: DraftTrees | None = None) -> None:
        self.session_id, self.epoch = message.session_id, message.epoch
        self.owner = message.owner
        self.cached_tokens: int | None = None
        self._says_cached = message.by_owner
        self.params: SamplingParams = message.params
        rule = strategy(message.params.strategy)
        self.takes_distributions = rule.samples_drafts(message.params)  # draft nodes may be sampled; else point masses
        self.follows_own = not self.takes_distributions and rule.follows_own(message.params)  # as of `Strategy`
        self.prompt_len, self.end_ids = message.prompt_len, end_ids
        self.token_ids: list[int] = message.token_ids.tolist()
        self._context = message.token_ids  # the same, as far as it was asked for as an array
        self._past = Past(message.params, message.prompt_len, end_ids)
        self.logprobs = LogprobRecord(message.params.logprobs)  # of the tokens from opened_len on
        self.opened_len = len(self.token_ids)
        self.origins = bytearray()  # of the tokens from opened_len on: codes of `specq.protocol.origins`
        self._stop_matcher: StopMatcher | None = None
        self.finish = ""
        self.state = SessionState.WAITING
        self.speculation: Speculation = message.speculation
        self.explained: dict[
            str, Any
        ] = {}  # if verdicts shall say what was verified: of the last nodes, as fields of `Verdict`
        self.waits = message.speculation.waits  # for its drafters: in each round, or where it has no draft
        self.takes_drafts = message.speculation.mode != "plain" and rule.uses_drafts
        self._scratch: ScratchRows = NO_SCRATCH
        # Whether its prompt yields to sessions that decode: more did than waited when its turn came. None: it has not
        # come.
        self.yields_to_decode: bool | None = None
        self.waited_for = 0  # its first how many tokens it has last waited for another session to compute
        self.trees = DraftTrees() if trees is None else trees  # one for all sessions of a verifier
        self.place = self.trees.open(message.token_ids, takes_distributions=self.takes_distributions)
        self._set_states(message)

    @classmethod
    def of(cls, message: Open, model: ModelInfo, trees: DraftTrees, codec: TextCodec | None) -> Self:
        """Return the session that a message opens at a model; without a codec there are no stop strings."""
        params, added = message.params, model.added_eos_ids if message.former_ends else ()
        ends = () if params.ignore_eos else tuple(end for end in model.eos_ids if end not in added)
        session = cls(message, params.stop_token_ids + ends, trees)
        if params.stop and codec is not None:
            prompt, generated = np.split(message.token_ids, [message.prompt_len])
            session.stop_matcher = matcher = StopMatcher(codec, params.stop, params.min_tokens, prompt)
            matcher.push(generated.tolist())
        return session

    def _set_states(self, message: Open) -> None:
        t, place, length = self.trees, self.place, len(self.token_ids)
        t.session_id[place], t.epoch[place] = message.session_id, message.epoch
        t.limit[place], t.journaled[place] = length + message.tokens_left, length
        t.last_token[place] = self.token_ids[-1]
        for name in ("kv_len", "num_scratch", "is_open", "has_ended"):
            getattr(t, name)[place] = 0
        t.end_ids[place] = (*self.end_ids, *(NONE,) * MAX_END_IDS)[:MAX_END_IDS]
        t.ends_by_text[place] = len(self.end_ids) > MAX_END_IDS
        takes_chains = self.takes_drafts and not self.speculation.has_fixed_shape
        t.longest_chain[place] = longest_chain(self.speculation, MAX_LIVE_NODES) if takes_chains else 0
        t.explains[place], t.cached_at[place] = message.explain, NONE
        t.mode[place], t.traits[place] = MODES.index(self.speculation.mode), traits_of(self.params)
        t.needs_history[place] = self.params.needs_history
        t.sampling[place] = make_rows([self.params], [0])[0]
        t.has_extras[place] = self.takes_distributions or self.params.needs_history

    def note(self, event: SessionEvent) -> None:
        """Change the state by what has happened; AssertionError if it cannot happen in this state."""
        self.state = after(self.state, event)
        if self.state is not SessionState.CLOSED:
            self.trees.is_open[self.place] = self.state in IN_ENGINE
            self.trees.has_ended[self.place] = self.state in HAVE_ENDED

    @property
    def is_open(self) -> bool:
        """Whether it is in the engine."""
        return self.state in IN_ENGINE

    def end(self, reason: str) -> None:
        """Note that a step came to the end of its text, and why that is the end."""
        self.finish = reason
        self.note(SessionEvent.FINISHED)

    @property
    def stop_matcher(self) -> StopMatcher | None:
        """Of the job's stop strings."""
        return self._stop_matcher

    @stop_matcher.setter
    def stop_matcher(self, matcher: StopMatcher) -> None:
        self._stop_matcher = matcher
        if self.place != NONE:
            self.trees.ends_by_text[self.place] = True

    @property
    def scratch(self) -> ScratchRows:
        """What a source wants computed beside the next token."""
        return self._scratch

    @scratch.setter
    def scratch(self, rows: ScratchRows) -> None:
        self._scratch = rows
        if self.place != NONE:
            self.trees.num_scratch[self.place] = rows.num_rows
            self.trees.has_extras[self.place] |= rows.num_rows > 0

    @property
    def length(self) -> int:
        return len(self.token_ids)

    def open_in(self, engine: Engine) -> None:
        """Open it in the engine, which may share KV with sessions of the same owner; raises what the engine does."""
        self.kv_len = engine.open(self.session_id, self.context(), self.owner)
        self.note(SessionEvent.ADMITTED)
        if self.cached_tokens is None:
            self.cached_tokens = min(self.kv_len, self.prompt_len)
            if self._says_cached and self.cached_tokens:
                self.cached_at = self.opened_len

    @property
    def num_pending(self) -> int:
        """Committed tokens whose KV is not there yet; 1 for a decoding session."""
        return self.length - int(self.kv_len)

    def context(self) -> Int32Array:
        """Return the transcript as an array, i32[length]. It is made anew when tokens have come since it was last asked
        for."""
        if len(self._context) < self.length:
            self._context = np.array(self.token_ids, np.int32)
        return self._context

    def history(self) -> History | None:
        """Return what judging needs of the past, if the parameters ask for it."""
        return self._past.history(self.token_ids)

    def up_to_end(self, token_ids: list[int]) -> tuple[int, str]:
        """Return how many tokens there are up to the first that ends the text, and the finish reason or "". A stop
        string's matcher takes in the tokens: call it once for each round."""
        room = self.limit - self.length
        tokens = token_ids[:room]
        num_kept = next((i + 1 for i, token in enumerate(tokens) if token in self.end_ids), None)
        if self._stop_matcher is not None:
            stopped = self._stop_matcher.push(tokens[:num_kept])
            num_kept = num_kept if stopped is None else stopped + 1
        if num_kept is not None:
            return num_kept, "stop"
        if len(tokens) < room:
            return len(tokens), ""
        return len(tokens), "stop" if self._ends_in_stop_string() else "length"

    def _ends_in_stop_string(self) -> bool:
        """Return whether a text that ends here does so with a stop string: one of unfinished characters (U+FFFD)."""
        if self._stop_matcher is None:
            return False
        self._stop_matcher.finish()
        return self._stop_matcher.matched

    # --- drafts -----------------------------------------------------------------------------------------------------

    def wait_a_beat(self) -> None:
        """Note a heartbeat in which the session waits for a draft."""
        self.beats_waited += 1

    @property
    def stats(self) -> SessionStats:
        return self.trees.stats(self.place)

    def lane(self, lane_id: int) -> Lane | None:
        """Return what is known of one drafter."""
        return self.trees.lane(self.place, lane_id)

    def forget_drafts(self) -> None:
        """Drop all that was drafted, and what is known of drafters; that costs speed only."""
        if self.place != NONE:
            self.trees.operations.forget(self.place)

    def close(self) -> None:
        """Give up the session's place in the trees; drafts for it have no effect any more."""
        if self.state is SessionState.CLOSED:
            return
        self.note(SessionEvent.CLOSED)
        place, self.place = self.place, NONE
        self.trees.close(place)


def longest_chain(speculation: Speculation, most: int) -> int:
    """Return how long a chain a job allows, at most `most` nodes."""
    return min([most, *(bound for bound in (speculation.max_depth, speculation.max_nodes) if bound)])
