"""Let a draft model follow a text of another vocabulary: common parts of both ways."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from specq.drafting.interface import Drafter
from specq.protocol import Int32Array, ModelInfo, SamplingParams
from specq.text import Retold, Vocabularies


@dataclass(slots=True)
class RetoldSession:
    """A session; `params` are the parameters for the draft model."""

    params: SamplingParams
    text: Retold
    owner: str = field(default="", kw_only=True)  # as in `Drafter.open`

    @property
    def lead(self) -> int:
        """How much further a token stands in the target's text than in the draft's."""
        return len(self.text.target_ids) - len(self.text.draft_ids)


S = TypeVar("S", bound=RetoldSession)


class RetellingDrafter(Drafter, Generic[S]):
    """Drafts with ids of the target, around a drafter with ids of a draft model. Sessions have the same ids in both.

    While the target follows the drafts, so does the draft model. After a correction the end of the text is tokenized
    again. The draft model goes back to where the two tokenizations differ.
    """

    def __init__(self, draft: Drafter, vocabularies: Vocabularies, info: ModelInfo) -> None:
        self.draft, self.vocabularies, self.info = draft, vocabularies, info
        self._sessions: dict[int, S] = {}

    def open(self, session_id: int, token_ids: Int32Array, params: SamplingParams, owner: str = "") -> None:
        """Start a session; see `Drafter.open`."""
        self._sessions[session_id] = session = self._session(token_ids.tolist(), params)
        session.owner = owner
        self.draft.open(session_id, np.array(session.text.draft_ids, np.int32), session.params, session.owner)

    def close(self, session_id: int) -> None:
        """Forget a session; see `Drafter.close`."""
        self._sessions.pop(session_id, None)
        self.draft.close(session_id)

    @abstractmethod
    def _session(self, token_ids: list[int], params: SamplingParams) -> S:
        """Return a new session with this context."""

    def _correct(self, session_id: int, token_ids: list[int]) -> None:
        """Append tokens that were not drafted; all nodes of the draft model are removed."""
        session = self._sessions[session_id]
        text, num_before = session.text, len(session.text.draft_ids)
        num_kept = text.append(token_ids)
        fresh = np.array(text.draft_ids[num_kept:], np.int32)
        if num_kept == num_before and len(fresh):
            self.draft.commit(session_id, fresh, ())
        elif self.draft.rewind(session_id, num_kept):
            if len(fresh):
                self.draft.commit(session_id, fresh, ())
        else:
            self.draft.close(session_id)
            self.draft.open(session_id, np.array(text.draft_ids, np.int32), session.params, session.owner)
