"""Hidden states for remote drafters that read them: rows of texts from steps, kept for a while and sent.

Rules:

- A session without requests for hidden states costs no time.
- For each session the newest rows are kept in bfloat16, at most as many as a drafter requested. So a drafter that joins
  late has rows to begin with. All sessions together keep at most MOST_KEPT_BYTES.
- While draft workers are paused, no states are sent. The host does not wait for the device.
- Lost messages are not sent again. The drafter begins behind the gap.

No I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import structlog

from specq.protocol import (
    MOST_ACTIVATION_BYTES,
    ActivationRequest,
    Activations,
    GetActivations,
    UInt16Array,
    pack_activations,
    row_bytes,
    to_bf16,
)
from specq.runtime import traced
from specq.verifier.sessions.session import Session
from specq.verifier.sources.interface import ComputedDrafts, Followed, accepted_paths, followed_rows
from specq.verifier.step.rounds import Rounds

log = structlog.get_logger(__name__)

MOST_KEPT_BYTES = 1 << 30

Layers = tuple[int, ...]


@dataclass(slots=True)
class _Kept:
    """The newest rows of a text, for some layers.

    window   the most rows that a drafter requested.
    end      the position behind the token that follows the last row.
    parts    [n, width] each, in bfloat16 as u16, or still as the engine returned them.
    """

    window: int = 0
    end: int = 0
    parts: deque[Any] = field(default_factory=deque)
    num_rows: int = 0
    num_bytes: int = 0

    def missing(self, one: Followed, length: int) -> Followed:
        """Return the part that is not known yet and inside the window of a text of `length` tokens."""
        skipped = max(self.end, length - self.window, one.first) - one.first
        return one._replace(first=one.first + skipped, token_ids=one.token_ids[skipped:], rows=one.rows[skipped:])

    def add(self, first: int, rows: Any) -> None:
        """Add rows. If there is a gap before them, forget the rows before the gap."""
        if first != self.end:
            self.clear()
        self.parts.append(rows)
        self.end, self.num_rows = first + len(rows), self.num_rows + len(rows)
        self.num_bytes += rows.nbytes
        while self.num_rows - len(self.parts[0]) >= self.window:
            gone = self.parts.popleft()
            self.num_rows, self.num_bytes = self.num_rows - len(gone), self.num_bytes - gone.nbytes

    def clear(self) -> None:
        self.parts.clear()
        self.num_rows = self.num_bytes = 0

    def since(self, first: int) -> tuple[int, list[UInt16Array]]:
        """Return where the kept rows begin, and the rows, from the one before the token at `first` on."""
        start, found = self.end, list[UInt16Array]()
        for i in range(len(self.parts) - 1, -1, -1):
            if start <= first:
                break
            self.parts[i] = part = _halves(self.parts[i])
            found.append(part[max(first - start + len(part), 0) :])
            start -= len(found[-1])
        return start, found[::-1]


@dataclass(slots=True)
class _Lane:
    """The request of a drafter. `sent`: the position up to which its rows were sent."""

    number: int
    request: ActivationRequest
    sent: int


@dataclass(slots=True)
class _Feed:
    """The drafters of a session that receive hidden states, by lane, and the rows kept, by their layers."""

    session: Session
    lanes: dict[int, _Lane] = field(default_factory=dict)
    kept: dict[Layers, _Kept] = field(default_factory=dict)

    def forget_unread(self) -> None:
        """Forget rows of layers that no drafter reads any more: steps skip them."""
        read = {lane.request.layers for lane in self.lanes.values()}
        self.kept = {layers: kept for layers, kept in self.kept.items() if layers in read}


class ActivationFeeds:
    """The sessions whose drafters read hidden states. `layers`: all layers that they read, ascending."""

    def __init__(self) -> None:
        self._feeds: dict[int, _Feed] = {}
        self._are_sent = True  # at once; else they stay on the engine's device, to avoid a wait
        self.layers: Layers = ()

    def __len__(self) -> int:
        return len(self._feeds)

    def ask(self, session: Session, message: GetActivations) -> list[Activations]:
        """Send hidden states to a drafter from now on; return the kept ones as messages. Without layers, stop."""
        if not message.tap_layers:
            self._stop(session.session_id, message.lane)
            return []
        feed = self._feeds.get(session.session_id)
        if feed is None or feed.session is not session:
            feed = self._feeds[session.session_id] = _Feed(session)
        request = ActivationRequest(message.tap_layers, message.tap_form, message.tap_window)
        known = feed.lanes.get(message.lane)
        if known is not None and known.request == request:  # the broker asks again if no states passed for a while
            return []
        lane = feed.lanes[message.lane] = _Lane(message.lane, request, 0)
        kept = feed.kept.setdefault(request.layers, _Kept())
        kept.window = max(kept.window, request.window, 1)
        lane.sent = max(kept.end - request.window, 0)
        feed.forget_unread()
        self._follow()
        return list(_fresh(feed, lane))

    def _stop(self, session_id: int, number: int) -> None:
        feed = self._feeds.get(session_id)
        if feed is not None:
            feed.lanes.pop(number, None)
            feed.forget_unread()
            if not feed.lanes:
                del self._feeds[session_id]
        self._follow()

    def _follow(self) -> None:
        lanes = (lane for feed in self._feeds.values() for lane in feed.lanes.values())
        self.layers = tuple(sorted({layer for lane in lanes for layer in lane.request.layers}))

    def takes(self, session: Session) -> bool:
        """Return whether the hidden states of a session's text are kept."""
        feed = self._feeds.get(session.session_id)
        return feed is not None and feed.session is session and session.is_open and not session.finish

    def observe(self, rounds: Rounds, computed: Sequence[ComputedDrafts]) -> None:
        """Keep the rows of a step after it was committed. If that raises an error, only hidden states are lost."""
        if not self._feeds:
            return
        paths = accepted_paths(rounds)
        for part in computed:
            try:
                followed = list(followed_rows(part, paths, self.takes))
                for layers in {layers for session, _ in followed for layers in self._feeds[session.session_id].kept}:
                    self._keep(part, layers, followed)
            except Exception as error:  # noqa: BLE001 - drafts are hints
                self._not_kept(error)

    def _not_kept(self, error: Exception) -> None:
        log.error("activation_store_failed", num_sessions=len(self._feeds), **traced(error))
        self._feeds.clear()
        self._follow()

    def _keep(self, part: ComputedDrafts, layers: Layers, followed: Sequence[tuple[Session, Followed]]) -> None:
        """Keep rows of these layers. If they are sent at once, one copy brings all sessions' rows from the device."""
        hidden, wanted = part.output.hidden, list[tuple[_Kept, Followed]]()
        for session, one in followed:
            kept = self._feeds[session.session_id].kept.get(layers)
            if kept is not None and (missing := kept.missing(one, session.length)).rows:
                wanted.append((kept, missing))
        if hidden is None or not wanted:
            return
        rows = [row for _, one in wanted for row in one.rows]
        found = hidden.columns(hidden.values[rows], layers)
        found, start = _halves(found) if self._are_sent else found, 0
        for kept, one in wanted:
            kept.add(one.first, found[start : start + len(one.rows)])
            start += len(one.rows)

    def _bound(self) -> None:
        """Forget the rows of the sessions that asked first, if all rows take more than MOST_KEPT_BYTES."""
        num_bytes = {i: sum(kept.num_bytes for kept in feed.kept.values()) for i, feed in self._feeds.items()}
        beyond = sum(num_bytes.values()) - MOST_KEPT_BYTES
        for session_id, size in num_bytes.items():
            if beyond <= 0:
                return
            beyond -= size
            for kept in self._feeds[session_id].kept.values():
                kept.clear()

    def fresh(self, may_draft: bool) -> list[Activations]:
        """Return the states that were not sent yet, as messages. Without `may_draft`, only of synchronous sessions."""
        feeds = [feed for feed in self._feeds.values() if may_draft or feed.session.waits]
        found = [message for feed in feeds for lane in feed.lanes.values() for message in _fresh(feed, lane)]
        self._bound()
        self._are_sent = may_draft
        return found

    def close(self, session: Session) -> None:
        """Forget a session, whether it is known or not."""
        feed = self._feeds.get(session.session_id)
        if feed is not None and feed.session is session:
            del self._feeds[session.session_id]
            self._follow()


def _fresh(feed: _Feed, lane: _Lane) -> Iterator[Activations]:
    """Yield the states that a lane has not received yet, as messages of at most MOST_ACTIVATION_BYTES."""
    layers, form = lane.request.layers, lane.request.form
    kept = feed.kept[layers]
    if lane.sent >= kept.end:
        return
    first, parts = kept.since(lane.sent)
    lane.sent = kept.end
    if not parts:
        return
    rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
    width = rows.shape[1]
    most = MOST_ACTIVATION_BYTES // row_bytes(width, form, len(layers))
    if not most:
        log.error("activation_size_exceeded", width=width, most_bytes=MOST_ACTIVATION_BYTES)
        return
    for start in range(0, len(rows), most):
        data, scales = pack_activations(rows[start : start + most], form, len(layers))
        yield Activations(
            session_id=feed.session.session_id,
            epoch=feed.session.epoch,
            lane=lane.number,
            first=first + start,
            tap_layers=layers,
            tap_form=form,
            width=width,
            data=data,
            scales=scales,
        )


def _halves(values: Any) -> UInt16Array:
    """Return rows as they are sent, bfloat16 as u16. `values`: a tensor, a NumPy array, or such rows already."""
    if not isinstance(values, np.ndarray):
        values = values.float().cpu().numpy()
    return values if values.dtype == np.uint16 else to_bf16(values)
