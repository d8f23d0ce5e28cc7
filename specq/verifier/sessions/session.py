"""A session at the verifier: its committed tokens, and its place among the draft trees.

A step reads lengths, limits and flags for all sessions at once. So the trees' arrays store these. The attributes here
read and write the same places.

Rules: only `specq.verifier.step.verdicts` changes the transcript, for all sessions of a step at once. No I/O, no clock,
no model. `specq.verifier.sessions.grafting` attaches drafts to the tree.

The module also has a session's states, and the events that lead between them.

A session waits until its context has room in the engine, runs there, and ends once. If room is short it is evicted, and
waits again. An ended session keeps its KV until the broker closes it or others need the room. A failed session is
closed.

Rule: only `Session.note` changes a state. An event that is not in the table is a bug, and raises. Whether a session
takes part in the next step is not a state. It follows from its counts (`specq.verifier.sessions.open_sessions`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Self

import numpy as np

from specq.engines import Engine
from specq.grammar import SessionGrammar
from specq.protocol import (
    MODES,
    NO_SCRATCH,
    History,
    Int32Array,
    LogprobRecord,
    Logprobs,
    ModelInfo,
    Open,
    SamplingParams,
    ScratchRows,
    SessionStats,
    Speculation,
    UInt8Array,
)
from specq.text import StopMatcher, TextCodec
from specq.verification import make_rows, strategy, traits_of
from specq.verifier.sessions.history import Past, PromptScores
from specq.verifier.trees import MAX_END_IDS, MAX_LIVE_NODES, NONE, DraftTrees, Lane

NO_BYTES: UInt8Array = np.zeros(0, np.uint8)


class SessionState(StrEnum):
    """The state of a session at the verifier."""

    WAITING = "waiting"  # not in the engine: it is new, or was evicted
    RUNNING = "running"  # in the engine
    ENDED = "ended"  # it has a finish reason, and its KV
    FREED = "freed"  # it has a finish reason, and no KV
    CLOSED = "closed"  # the verifier has removed it


class SessionEvent(StrEnum):
    """An event in the life of a session."""

    ADMITTED = "admitted"  # it was opened in the engine
    EVICTED = "evicted"  # it was closed in the engine to make room
    FINISHED = "finished"  # a step reached the end of its text
    CLOSED = "closed"  # by the broker, or because it failed


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
    """Return the state that follows an event.

    Raises AssertionError if the event is impossible in this state.
    """
    following = TRANSITIONS[state].get(event)
    assert following is not None, f"a session that is {state} cannot be {event}"
    return following


SYNC_PATIENCE = 3  # in heartbeats


class ArrayField:
    """An attribute of a session that is stored in the arrays.

    For a closed session its value is 0, as a `kind`.
    """

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
    """One open session.

    broker        the name of the broker that opened it.
    limit         the committed length at which it ends.
    end_ids       the tokens that end it sooner.
    state         see `specq.verifier.sessions.session`.
    finish        the reason for its end, once it has ended.
    kv_len        number of tokens with KV.
    owner         sessions of the same owner share KV and texts.
    is_background  it yields to other sessions: see `specq.verifier.control.background`.
    grammar       what the text must follow; None if anything may come, or while it is not built yet.
    cached_tokens  number of prompt tokens that had KV when the engine first opened it; None before that.
    journaled     number of tokens that the broker has confirmed.
    """

    kv_len, limit, journaled = ArrayField(int), ArrayField(int), ArrayField(int)
    num_live = ArrayField(int)  # nodes on the tree
    explains = ArrayField(bool)  # verdicts report what was verified
    drafted_at = ArrayField(int)  # the newest position that a draft named
    cached_at = ArrayField(int)  # the base length of the verdict that has `cached_tokens`; NONE if none has
    beats_waited = ArrayField(int)  # heartbeats since a synchronous session began to wait for a draft

    def __init__(self, message: Open, end_ids: tuple[int, ...] = (), trees: DraftTrees | None = None) -> None:
        self.session_id, self.epoch, self.broker = message.session_id, message.epoch, ""
        self.prompt_scores = _prompt_scores(message)
        # Its prompt is computed as a whole, row by row: it shares no KV with other sessions.
        is_apart = self.prompt_scores is not None
        self.owner = f"+prompt_logprobs {self.session_id} {self.epoch}" if is_apart else message.owner
        self.cached_tokens: int | None = None
        self._says_cached, self.is_background = message.by_owner, message.is_background
        self.params: SamplingParams = message.params
        rule = strategy(message.params.strategy)
        self.takes_distributions = rule.samples_drafts(message.params)  # draft nodes may be sampled; else point masses
        self.follows_own = not self.takes_distributions and rule.follows_own(message.params)  # as of `Strategy`
        self.prompt_len, self.end_ids = message.prompt_len, end_ids
        self.token_ids: list[int] = message.token_ids.tolist()
        self._context = message.token_ids  # the same as an array, up to the last request for it
        self._past = Past(message.params, message.prompt_len, end_ids)
        self.logprobs = LogprobRecord(message.params.logprobs)  # of the tokens from opened_len on
        self.opened_len = len(self.token_ids)
        self.origins = bytearray()  # of the tokens from opened_len on: codes of `specq.protocol.logprobs`
        self._stop_matcher: StopMatcher | None = None
        self.grammar: SessionGrammar | None = None
        self.finish = ""
        self.state = SessionState.WAITING
        self.speculation: Speculation = message.speculation
        self.explained: dict[
            str, Any
        ] = {}  # for jobs with the option `explain`: the last verified nodes, as fields of `Verdict`
        self.waits = message.speculation.waits  # whether it waits for its drafters: in each round, or without a draft
        self.takes_drafts = message.speculation.mode != "plain" and rule.uses_drafts
        self._scratch: ScratchRows = NO_SCRATCH
        # Whether its prompt yields to decoding sessions: more sessions decoded than waited when its turn came. None
        # before its turn.
        self.yields_to_decode: bool | None = None
        self.waited_for = 0  # length of the prefix for which it last waited
        self.trees = DraftTrees() if trees is None else trees  # shared by all sessions of a verifier
        self.place = self.trees.open(message.token_ids, takes_distributions=self.takes_distributions)
        self._set_states(message)

    @classmethod
    def of(cls, message: Open, model: ModelInfo, trees: DraftTrees, codec: TextCodec | None) -> Self:
        """Return the session that a message opens at a model.

        Without a codec it has no stop strings.
        """
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
        t.awaits_grammar[place] = bool(self.params.grammar)
        t.needs_history[place] = self.params.needs_history or bool(self.params.grammar)
        t.sampling[place] = make_rows([self.params], [0])[0]
        scores = self.prompt_scores is not None
        t.has_extras[place] = self.takes_distributions or self.params.needs_history or scores
        if scores:
            self.cached_at = length  # the first verdict carries the prompt's values

    def note(self, event: SessionEvent) -> None:
        """Change the state after an event.

        Raises AssertionError if the event is impossible in this state.
        """
        self.state = after(self.state, event)
        if self.state is not SessionState.CLOSED:
            self.trees.is_open[self.place] = self.state in IN_ENGINE
            self.trees.has_ended[self.place] = self.state in HAVE_ENDED

    @property
    def is_open(self) -> bool:
        """Whether it is in the engine."""
        return self.state in IN_ENGINE

    def end(self, reason: str) -> None:
        """Note that a step reached the end of the text, with the reason for the end."""
        self.finish = reason
        self.note(SessionEvent.FINISHED)

    @property
    def stop_matcher(self) -> StopMatcher | None:
        """The matcher for the job's stop strings."""
        return self._stop_matcher

    @stop_matcher.setter
    def stop_matcher(self, matcher: StopMatcher) -> None:
        self._stop_matcher = matcher
        if self.place != NONE:
            self.trees.ends_by_text[self.place] = True

    def follow(self, grammar: SessionGrammar, *, needs_last: bool) -> None:
        """Let the text follow a grammar, which is at its start, from now on. Raises EngineError if it does not.

        needs_last  whether a step needs the last token on the host when it is launched.
        """
        grammar.commit(self.token_ids[self.prompt_len :])
        self.grammar = grammar
        if self.place != NONE:
            self.trees.awaits_grammar[self.place] = False
            self.trees.needs_history[self.place] = needs_last or self.params.needs_history

    @property
    def scratch(self) -> ScratchRows:
        """The rows that a source computes beside the next token."""
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
        """Open the session in the engine; raise the engine's errors.

        The session may share KV with sessions of the same owner.
        """
        self.kv_len = engine.open(self.session_id, self.context(), self.owner)
        self.note(SessionEvent.ADMITTED)
        if self.cached_tokens is None:
            self.cached_tokens = min(self.kv_len, self.prompt_len)
            if self._says_cached and self.cached_tokens:
                self.cached_at = self.opened_len

    @property
    def num_pending(self) -> int:
        """Number of committed tokens without KV; 1 for a decoding session."""
        return self.length - int(self.kv_len)

    def context(self) -> Int32Array:
        """Return the transcript as an array, i32[length].

        It is extended if tokens have been committed since the last call.
        """
        if len(self._context) < self.length:
            self._context = np.array(self.token_ids, np.int32)
        return self._context

    def take_scores(self, start: int, found: Logprobs) -> None:
        """Store log-probabilities of the prompt, of its rows from position `start` on."""
        if self.prompt_scores is not None:
            self.prompt_scores.put(start, found)
            if self.prompt_scores.is_complete and self.place != NONE:
                extras = self.takes_distributions or self.params.needs_history or self.scratch.num_rows
                self.trees.has_extras[self.place] = bool(extras)

    def prompt_rows(self, base_len: int) -> UInt8Array:
        """Return `Verdict.prompt_rows` for the tokens from `base_len` on."""
        if self.prompt_scores is None or base_len != self.opened_len:
            return NO_BYTES
        return self.prompt_scores.packed()

    def history(self) -> History | None:
        """Return the past that judging needs, if the parameters need it."""
        return self._past.history(self.token_ids)

    def up_to_end(self, token_ids: list[int]) -> tuple[int, str]:
        """Return the number of tokens up to the end of the text, and the finish reason or "".

        The matcher of stop strings consumes the tokens, so call this once for each round.
        """
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
        """Return whether a text that ends here ends with a stop string of U+FFFD (unfinished characters)."""
        if self._stop_matcher is None:
            return False
        self._stop_matcher.finish()
        return self._stop_matcher.matched

    # --- drafts -----------------------------------------------------------------------------------------------------

    def wait_a_beat(self) -> None:
        """Count a heartbeat in which the session waits for a draft."""
        self.beats_waited += 1

    @property
    def stats(self) -> SessionStats:
        return self.trees.stats(self.place)

    def lane(self, lane_id: int) -> Lane | None:
        """Return the state of one drafter."""
        return self.trees.lane(self.place, lane_id)

    def forget_drafts(self) -> None:
        """Drop all drafts and the state of the drafters. This only costs speed."""
        if self.place != NONE:
            self.trees.operations.forget(self.place)

    def close(self) -> None:
        """Release the session's place in the trees. Later drafts for it have no effect."""
        if self.state is SessionState.CLOSED:
            return
        self.note(SessionEvent.CLOSED)
        place, self.place = self.place, NONE
        self.trees.close(place)


def _prompt_scores(message: Open) -> PromptScores | None:
    """Return the record of the prompt's log-probabilities, if the job asks for them and no verdict had them yet."""
    num_top, prompt_len = message.params.prompt_logprobs, message.prompt_len
    if num_top < 0 or len(message.token_ids) > prompt_len:
        return None
    return PromptScores(message.token_ids, num_top)


def longest_chain(speculation: Speculation, most: int) -> int:
    """Return the longest chain that a job allows, at most `most` nodes."""
    return min([most, *(bound for bound in (speculation.max_depth, speculation.max_nodes) if bound)])
