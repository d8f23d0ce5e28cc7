"""What the target says, and which of its tokens each source foresees: in arrays, a row for each session.

A text follows from the service's seed and the session's label alone, so that all controllers meet the same texts.
"""

from __future__ import annotations

import numpy as np

from specq.protocol import BoolArray, Float32Array, Int32Array, IntpArray, Verdict
from tests.verifier.services.service import Service
from tests.verifier.timed_target import INFO

NUM_ROWS = 1024  # more than sessions that are open at a time
ROOM = 32  # tokens behind the end of a text, which a step in flight may ask for
MOST_CHANCE = 0.98


class Texts:
    """The texts of a service. Session ids ascend; a session's row is its id modulo NUM_ROWS."""

    def __init__(self, service: Service) -> None:
        width = 2 * service.text_len + ROOM
        self._service, self._prompt_len = service, service.prompt_len
        self._tokens: Int32Array = np.zeros((NUM_ROWS, width), np.int32)
        self._draws: Float32Array = np.zeros((len(service.sources), NUM_ROWS, width), np.float32)
        self._offsets: Float32Array = np.zeros(NUM_ROWS, np.float32)  # of the chances of a text's drafts
        self._lists: dict[int, list[int]] = {}  # the tokens of open sessions, and of those closed last
        self.lengths: dict[int, int] = {}  # of the texts of open sessions
        self._next_id = 1

    def open(self, label: int, *, is_first: bool) -> int:
        """Begin the text with this label; return its session id. The first texts of clients may be shorter, so that
        they do not end together."""
        service = self._service
        while self._next_id % NUM_ROWS in {one % NUM_ROWS for one in self.lengths}:
            self._next_id += 1
        session_id, row = self._next_id, self._next_id % NUM_ROWS
        self._next_id += 1
        random = np.random.default_rng((service.seed, label))
        num_tokens = max(int(service.text_len * random.uniform(0.5, 1.5)), 2)
        part = random.uniform(0.1, 1.0)
        self.lengths[session_id] = max(int(num_tokens * part), 2) if is_first else num_tokens
        self._offsets[row] = service.spread * random.uniform(-1.0, 1.0)
        self._tokens[row] = random.integers(1, INFO.vocab_size, self._tokens.shape[1])
        self._lists[row] = self._tokens[row].tolist()
        common = random.random(self._tokens.shape[1])
        is_shared = random.random(self._tokens.shape[1]) < service.shared
        own = random.random((len(service.sources), self._tokens.shape[1]))
        self._draws[:, row] = np.where(is_shared, common, own)
        return session_id

    def close(self, session_id: int) -> None:
        """Note that a session has ended."""
        del self.lengths[session_id]

    def after(self, session_id: int, length: int) -> list[int]:
        """Return the target's tokens of a session's text from this length on."""
        return self._lists[session_id % NUM_ROWS][length - self._prompt_len :]

    def check(self, verdict: Verdict) -> None:
        """Raise AssertionError if a verdict has another token than the target."""
        own = verdict.token_ids.tolist()
        at = verdict.base_len - self._prompt_len
        truth = self._lists[verdict.session_id % NUM_ROWS][at : at + len(own)]
        assert own == truth, "not what the target alone would say"

    def draft(
        self, source: int, session_ids: list[int], lengths: list[int], chances: Float32Array
    ) -> tuple[Int32Array, IntpArray]:
        """Return chains of the source with this number, i32[sessions, depth], and how many tokens of each are right
        before the first wrong one, i64[sessions]; chances f32[depth]."""
        rows = np.array(session_ids, np.intp) % NUM_ROWS
        columns = np.array(lengths, np.intp)[:, None] - self._prompt_len + np.arange(len(chances))
        columns = np.minimum(columns, self._tokens.shape[1] - 1)
        own = np.clip(chances + self._offsets[rows, None], 0.0, MOST_CHANCE)
        is_right: BoolArray = np.logical_and.accumulate(self._draws[source][rows[:, None], columns] < own, axis=1)
        tokens = self._tokens[rows[:, None], columns]
        wrong = 1 + (tokens + source) % (INFO.vocab_size - 1)
        return np.where(is_right, tokens, wrong), is_right.sum(1)
