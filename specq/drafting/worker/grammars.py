"""The grammars of a draft worker's sessions, built beside its passes. Until one is built, its session drafts without.

Rule: what is drawn is sent with the law it was drawn from. So a mask belongs to the logits before children are made
(`Drafter.masks`).
"""

from __future__ import annotations

from collections.abc import Mapping

import structlog

from specq.drafting.worker.session import DraftSession
from specq.grammar import DraftMasks, GrammarBuilder, SessionGrammar

log = structlog.get_logger(__name__)

MOST_MASKED = 64  # sessions with a grammar, which bounds the memory of matchers; further ones draft without


class DraftGrammars:
    """The masks of sessions, by id, and the sessions whose grammar is being built."""

    def __init__(self, builder: GrammarBuilder | None) -> None:
        """Take a builder; None: no session has masks."""
        self._builder = builder
        self._waiting: dict[int, tuple[DraftSession, int]] = {}  # and the length of its prompt
        self.masks: dict[int, DraftMasks] = {}

    @property
    def are_followed(self) -> bool:
        return self._builder is not None

    def begin(self, session: DraftSession, prompt_len: int, owner: str) -> None:
        """Begin to build the grammar of a new session, if it has one."""
        if self._builder is None or not session.params.grammar or len(self.masks) + len(self._waiting) >= MOST_MASKED:
            return
        self._waiting[session.session_id] = session, prompt_len
        self._builder.begin(session.session_id, session.params.grammar, owner)

    def take(self, sessions: Mapping[int, DraftSession]) -> None:
        """Let sessions follow the grammars that have been built."""
        if self._builder is None or not self._waiting:
            return
        for session_id, matcher, reason in self._builder.ready():
            session, prompt_len = self._waiting.pop(session_id, (None, 0))
            if session is None or sessions.get(session_id) is not session:
                continue
            if matcher is None:
                log.info("grammar_not_followed", reason=reason)
                continue
            ends = session.params.stop_token_ids + (() if session.params.ignore_eos else self._builder.end_ids)
            masks = DraftMasks(SessionGrammar(matcher, self._builder.tokenizer().inner, ends))
            masks.commit(session.token_ids[prompt_len:])
            self.masks[session_id] = masks

    def commit(self, session_id: int, token_ids: list[int]) -> None:
        """Follow what was committed to a session."""
        if masks := self.masks.get(session_id):
            masks.commit(token_ids)

    def forget(self, session_id: int) -> None:
        """Forget a session."""
        self.masks.pop(session_id, None)
        if self._waiting.pop(session_id, None) is not None and self._builder is not None:
            self._builder.cancel(session_id)

    def close(self) -> None:
        """Stop what builds grammars."""
        if self._builder is not None:
            self._builder.close()
