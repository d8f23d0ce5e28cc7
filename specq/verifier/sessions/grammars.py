"""The grammars of a verifier's sessions, from `Open` until they can be followed.

A session whose grammar is not built yet takes part in no step. Nothing else waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import structlog

from specq.grammar import GrammarTokenizer, SessionGrammar, begin_masks
from specq.protocol import GRAMMAR_CAPABILITIES, Fault, SpecqError
from specq.runtime import available_cores, traced
from specq.verification import WITH_GRAMMAR
from specq.verifier.sessions.open_sessions import OpenSessions
from specq.verifier.sessions.session import Session

if TYPE_CHECKING:
    from llguidance import LLMatcher

log = structlog.get_logger(__name__)


class Builder(Protocol):
    """Builds matchers beside the steps; see `specq.grammar.GrammarBuilder`."""

    on_ready: Callable[[], None] | None

    def tokenizer(self) -> GrammarTokenizer: ...

    def begin(self, key: int, grammar: str, owner: str = "") -> None: ...

    def ready(self) -> list[tuple[int, LLMatcher | None, str]]: ...

    def cancel(self, key: int) -> None: ...

    def close(self) -> None: ...


class SessionGrammars:
    """Sessions that wait for their grammar."""

    def __init__(self, builder: Builder | None, sessions: OpenSessions, *, judges_late: bool) -> None:
        """Take a builder; None: this verifier serves no grammars. `judges_late`: as of the engine."""
        self._builder, self._sessions, self._judges_late = builder, sessions, judges_late
        self._waiting = set[int]()

    @property
    def are_served(self) -> bool:
        """Whether jobs may have grammars here."""
        return self._builder is not None

    @property
    def capabilities(self) -> tuple[str, ...]:
        """The kinds of grammars that are served, for `Hello`."""
        return GRAMMAR_CAPABILITIES if self.are_served else ()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def when_built(self, call: Callable[[], None]) -> None:
        """Let `call` be called, from a thread, when `take` has something to yield or a session can begin."""
        if self._builder is not None:
            self._builder.on_ready = call

    def begin(self, session: Session) -> None:
        """Begin to build the grammar of a new session, if it has one."""
        if self._builder is not None and session.params.grammar:
            self._waiting.add(session.session_id)
            self._builder.begin(session.session_id, session.params.grammar, session.owner)

    def forget(self, session_id: int) -> None:
        """Stop building for a session."""
        if self._builder is not None and session_id in self._waiting:
            self._waiting.discard(session_id)
            self._builder.cancel(session_id)

    def take(self) -> Iterator[tuple[Session, Fault]]:
        """Let sessions follow the grammars that have been built. Yield those whose grammar was refused."""
        if self._builder is None or not self._waiting:
            return
        for session_id, matcher, reason in self._builder.ready():
            self._waiting.discard(session_id)
            session = self._sessions.get(session_id)
            if session is None:
                continue
            if matcher is None:
                yield session, Fault(reason)
                continue
            try:
                grammar = SessionGrammar(matcher, self._builder.tokenizer().inner, session.end_ids)
                session.follow(grammar, needs_last=not self._judges_late)
            except SpecqError as error:
                yield session, Fault(str(error))
        self._sessions.changed()

    def begin_masks(self, committed: Sequence[Session], *, is_behind: bool) -> None:
        """Let other threads compute the masks behind committed texts, while this one reports and handles messages.

        is_behind  whether a later step is in flight. It may have rows of texts that have ended.

        With one core, masks are computed when they are needed, unless a device computes meanwhile. The same where this
        raises. On a CPU they begin in the next forward pass, which gives up Python's lock.
        """
        if not committed:
            return
        traits = committed[0].trees.traits[[session.place for session in committed]]
        some = [committed[i] for i in (traits & WITH_GRAMMAR).nonzero()[0].tolist()]
        grammars = [own.grammar for own in some if own.grammar is not None and (is_behind or not own.finish)]
        if not is_behind and len(available_cores()) == 1:
            return
        try:
            begin_masks(grammars, waits=is_behind)
        except Exception as error:  # noqa: BLE001 - see above
            log.warning("masks_not_begun", num_sessions=len(grammars), **traced(error))

    def close(self) -> None:
        """Stop what builds grammars."""
        if self._builder is not None:
            self._builder.close()
