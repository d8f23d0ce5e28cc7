"""A session at the verifier: what is committed, and its place among the draft trees of all sessions.

Rules: only `specq.verifier.rounds` changes the transcript. No I/O, no clock, no model. How drafts come onto the tree is in
`specq.verifier.grafting`.
"""

from __future__ import annotations

from collections.abc import Sequence

from specq.protocol import (
    NO_SCRATCH,
    History,
    LogprobRecord,
    Open,
    SamplingParams,
    ScratchRows,
    SessionStats,
    Speculation,
)
from specq.text import StopMatcher
from specq.verification import strategy
from specq.verifier.history import Past
from specq.verifier.trees import NONE, DraftTrees, Lane

SYNC_PATIENCE = 3  # heartbeats


class Session:
    """One open session. `limit` is the committed length at which it ends, `end_ids` the tokens that end it sooner."""

    def __init__(self, message: Open, end_ids: tuple[int, ...] = (), trees: DraftTrees | None = None) -> None:
        self.session_id, self.epoch = message.session_id, message.epoch
        self.params: SamplingParams = message.params
        rule = strategy(message.params.strategy)
        self.takes_distributions = rule.samples_drafts(message.params)  # draft nodes may be sampled; else point masses
        self.prompt_len, self.end_ids = message.prompt_len, end_ids
        self.token_ids: list[int] = message.token_ids.tolist()
        self._past = Past(message.params, message.prompt_len, end_ids)
        self.limit = len(self.token_ids) + message.tokens_left
        self.journaled = len(self.token_ids)  # what the broker has confirmed
        self.logprobs = LogprobRecord(message.params.logprobs)  # of the tokens from opened_len on
        self.opened_len = len(self.token_ids)
        self.origins = bytearray()  # of the tokens from opened_len on: codes of `specq.protocol.origins`
        self.stop_matcher: StopMatcher | None = None  # of the job's stop strings
        self.finish = ""  # the finish reason, once there is one
        self.kv_len = 0
        self.is_open = False  # in the engine
        self.speculation: Speculation = message.speculation
        self.is_sync = message.speculation.mode == "sync"
        self.scratch: ScratchRows = NO_SCRATCH  # what a source wants computed beside the next token
        self.committed_at = 0.0  # when the last round was; 0 before the first
        self.answered = 0  # the newest committed length that a remote drafter has been seen to know
        self.trees = DraftTrees() if trees is None else trees  # one for all sessions of a verifier
        self.place = self.trees.open(message.token_ids, takes_distributions=self.takes_distributions)

    @property
    def awaits_draft(self) -> bool:
        """Whether a synchronous session is between rounds: it takes part in no step until its drafter has answered, or has
        been silent for too long."""
        between = self.is_sync and self.num_pending <= 1 and self.drafted_at < self.length < self.limit - 1
        return between and self.beats_waited < SYNC_PATIENCE

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def num_pending(self) -> int:
        """Committed tokens whose KV is not there yet; 1 for a decoding session."""
        return self.length - self.kv_len

    def history(self) -> History | None:
        """Return what judging needs of the past, if the parameters ask for it."""
        return self._past.history(self.token_ids)

    def append(self, token_ids: Sequence[int]) -> None:
        """Append committed tokens to the transcript; the trees commit them for all sessions of a step at once."""
        self.token_ids.extend(token_ids)

    def up_to_end(self, token_ids: list[int]) -> tuple[int, str]:
        """Return how many tokens there are up to the first that ends the text, and the finish reason or "". A stop string's
        matcher takes in the tokens: call it once for each round."""
        room = self.limit - self.length
        tokens = token_ids[:room]
        num_kept = next((i + 1 for i, token in enumerate(tokens) if token in self.end_ids), None)
        if self.stop_matcher is not None:
            stopped = self.stop_matcher.push(tokens[:num_kept])
            num_kept = num_kept if stopped is None else stopped + 1
        if num_kept is not None:
            return num_kept, "stop"
        return len(tokens), "length" if len(tokens) >= room else ""

    # --- drafts -----------------------------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        """Nodes on the tree."""
        return int(self.trees.views.num_live[self.place]) if self.place != NONE else 0

    @property
    def drafted_at(self) -> int:
        """The newest position that a draft spoke of."""
        return int(self.trees.views.drafted_at[self.place])

    @property
    def beats_waited(self) -> int:
        """Heartbeats since a synchronous session began to wait for a draft."""
        return int(self.trees.views.beats_waited[self.place])

    def wait_a_beat(self) -> None:
        """Note a heartbeat in which the session waits for a draft."""
        self.trees.views.beats_waited[self.place] += 1

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
        place, self.place = self.place, NONE
        if place != NONE:
            self.trees.close(place)
