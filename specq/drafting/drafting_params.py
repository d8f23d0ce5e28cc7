"""With which sampling parameters each session is drafted for, worked out once for each."""

from __future__ import annotations

from specq.drafting.worker import drafting_params
from specq.protocol import SamplingParams, Speculation
from specq.verifier.sources import Session


class DraftingParams:
    """Parameters by session. The same object comes each time, as long as the session's own stay."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[SamplingParams, Speculation, SamplingParams]] = {}

    def of(self, session: Session) -> SamplingParams:
        """Return those of a session."""
        known = self._known.get(session.session_id)
        if known is None or known[0] is not session.params or known[1] is not session.speculation:
            drafting = drafting_params(session.params, session.speculation)
            known = self._known[session.session_id] = session.params, session.speculation, drafting
        return known[2]

    def forget(self, session_id: int) -> None:
        """Forget a session, known or not."""
        self._known.pop(session_id, None)
