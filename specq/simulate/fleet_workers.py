"""Light stand-ins for the workers of a fleet, without a model: what all have in common, and drafters.

They register with all brokers, and speak the real messages. A drafter drafts a chain for each session after each
verdict, in order of arrival, `width` sessions a pass.

Not imitated: what to draft, silence, lost messages.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from specq.protocol import (
    CAPABILITIES,
    Assign,
    Brokers,
    Draft,
    Frames,
    Heartbeat,
    Hello,
    Message,
    ModelInfo,
    Refused,
    Release,
    Verdict,
    Verdicts,
    Welcome,
    array_frame,
    decode,
    decode_header,
    encode,
    type_of,
)
from specq.simulate.machine import EventQueue
from specq.simulate.scenarios import HardwareCurve
from specq.simulate.settings import Scenario

GONE_S = 10.0  # as in specq.transport.broker_links
_VOCAB = 32_000
_SESSIONS, _BASES = array_frame(Verdicts, "session_ids"), array_frame(Verdicts, "base_lens")
_COUNTS = array_frame(Verdicts, "num_tokens")
_TOKENS = array_frame(Verdict, "token_ids")

Transmit = Callable[[str, bytes, bool, Frames], None]  # to a broker, from a worker, over the DEALER, frames


def token_at(session_id: int, position: Any) -> Any:
    """Return the target's token at a position; an array of positions gives an array."""
    return 1 + (session_id * 7919 + position * 104_729) % (_VOCAB - 1)


def model_info(name: str, kv_slots: int = 0) -> ModelInfo:
    """Return the description of a stand-in's model."""
    return ModelInfo(name, name, "none", "stub", _VOCAB, _VOCAB, (), 2**31 - 1, tokenizer_hash="", kv_slots=kv_slots)


class FleetWorker:
    """Base: registers with all brokers that are listed, and sends each the heartbeat of its own sessions."""

    role = ""

    def __init__(self, number: int, scenario: Scenario, queue: EventQueue, transmit: Transmit) -> None:
        self.identity, self.number = f"{self.role}-{number}".encode(), number
        self.queue, self.transmit = queue, transmit
        self.alive, self.brokers, self.steps = True, dict[str, bool](), 0  # broker -> whether it has registered this
        self.sessions: dict[int, Any] = {}
        self.num_kv = 0
        self._beat_s = scenario.network.heartbeat_ms / 1000
        self._random = random.Random(f"{scenario.traffic.seed} {self.role} {number}")
        self._hello = encode(self.hello(scenario))

    def hello(self, scenario: Scenario) -> Hello:
        raise NotImplementedError

    def start(self, brokers: Sequence[str]) -> None:
        """Register with these brokers; send heartbeats from now on, each worker at a phase of its own."""
        self.brokers = dict.fromkeys(brokers, False)
        self.queue.at(self.queue.now + self._random.random() * self._beat_s, self._beat)

    def _beat(self) -> None:
        if not self.alive:
            return
        for broker, is_registered in self.brokers.items():
            frames = encode(self._heartbeat(broker)) if is_registered else self._hello
            self.transmit(broker, self.identity, False, frames)
        self.queue.at(self.queue.now + self._beat_s, self._beat)

    def _heartbeat(self, broker: str) -> Heartbeat:
        own = [one for one in self.sessions.values() if one.broker == broker]
        return Heartbeat(
            incarnation=self.number + 1,
            state="ready",
            load=len(self.sessions),
            steps=self.steps,
            pending=len(self.sessions),
            free_slots=max(self.free_slots, 0),
            session_ids=np.array([one.session_id for one in own], np.int64),
            epochs=np.array([one.epoch for one in own], np.int64),
            lengths=np.array([one.length for one in own], np.int32),
        )

    @property
    def free_slots(self) -> int:
        return 0

    def hear(self, broker: str, frames: Frames) -> None:
        """Handle a message of a broker."""
        if not self.alive:
            return
        kind = type_of(frames)
        if kind is Welcome:
            self.brokers[broker] = True
        elif kind is Refused:
            self.brokers[broker] = False
        elif kind is Brokers:
            self._follow(set(decode(frames).addresses))  # type: ignore[attr-defined]
        else:
            self._handle(broker, kind, frames)

    def _follow(self, listed: set[str]) -> None:
        """Register with listed brokers; close the sessions of others after GONE_S."""
        for gone in self.brokers.keys() - listed:
            del self.brokers[gone]
            self.queue.at(self.queue.now + GONE_S, self._forget, gone)
        self.brokers |= dict.fromkeys(sorted(listed - self.brokers.keys()), False)

    def _forget(self, broker: str) -> None:
        if broker not in self.brokers:
            for session in [one for one in self.sessions.values() if one.broker == broker]:
                self._close(session)

    def _close(self, session: Any) -> None:
        del self.sessions[session.session_id]

    def _handle(self, broker: str, kind: type[Message] | None, frames: Frames) -> None:
        raise NotImplementedError


@dataclass(slots=True)
class DraftLane:
    """A session at a drafter."""

    session_id: int
    epoch: int
    broker: str
    lane: int
    length: int
    next_id: int = 0
    waits: bool = False


class FleetDrafter(FleetWorker):
    """A drafter. `drafts` counts by broker."""

    role = "draft"

    def __init__(self, number: int, scenario: Scenario, queue: EventQueue, transmit: Transmit) -> None:
        self._settings = scenario.draft
        super().__init__(number, scenario, queue, transmit)
        self.sessions: dict[int, DraftLane] = {}
        self.drafts = Counter[str]()
        self._waiting: deque[DraftLane] = deque()
        self._pass_s = HardwareCurve(self._settings.pass_ms)(self._settings.width)
        count = self._settings.max_ahead
        self._ids = np.arange(count, dtype=np.int32)
        scores = np.full(count, -0.25, np.float16)
        draft = Draft(
            session_id=0, epoch=1, lane=0, base_len=1, first_id=1, token_ids=self._ids + 1, parent_ids=self._ids - 1,
            scores=scores,
        )  # fmt: skip
        _, header, self._tokens, _, self._scores = encode(draft)
        self._header = orjson.loads(header)
        self._passing = False

    def hello(self, scenario: Scenario) -> Hello:
        model, name = model_info(f"draft-{self.number % scenario.draft.models}"), self.identity.decode()
        return Hello(role=self.role, name=name, incarnation=self.number + 1, model=model, capabilities=CAPABILITIES)

    def _handle(self, broker: str, kind: type[Message] | None, frames: Frames) -> None:
        if kind is Verdicts:
            ids, bases, counts = (
                np.frombuffer(frames[i], f"<i{w}") for i, w in ((_SESSIONS, 8), (_BASES, 4), (_COUNTS, 4))
            )
            for session_id, length in zip(ids.tolist(), (bases + counts).tolist(), strict=True):
                self._advance(broker, session_id, length)
        elif kind is Verdict:
            header = decode_header(frames)
            length = header["base_len"] + len(frames[_TOKENS]) // 4
            self._advance(broker, int.from_bytes(frames[0], "little"), length)
        elif kind is Assign:
            message: Any = decode(frames)
            lane = DraftLane(message.session_id, message.epoch, broker, message.lane, len(message.token_ids))
            known = self.sessions.get(message.session_id)
            if known is None or known.epoch <= lane.epoch:
                self.sessions[message.session_id] = lane
                self._wait(lane)
        elif kind is Release:
            released = self.sessions.get(int.from_bytes(frames[0], "little"))
            if released is not None and released.broker == broker and released.epoch <= decode_header(frames)["epoch"]:
                self._close(released)

    def _advance(self, broker: str, session_id: int, length: int) -> None:
        lane = self.sessions.get(session_id)
        if lane is not None and lane.broker == broker and length > lane.length:
            lane.length = length
            self._wait(lane)

    def _wait(self, lane: DraftLane) -> None:
        if not lane.waits:
            lane.waits = True
            self._waiting.append(lane)
        if not self._passing:
            self._passing = True
            self.queue.at(self.queue.now + self._pass_s, self._pass)

    def _pass(self) -> None:
        """End a pass: send the drafts of the sessions that have waited longest."""
        if not self.alive:
            return
        self.steps += 1
        count = self._settings.max_ahead
        for _ in range(min(self._settings.width, len(self._waiting))):
            lane = self._waiting.popleft()
            lane.waits = False
            if self.sessions.get(lane.session_id) is lane:
                self.drafts[lane.broker] += 1
                self.transmit(lane.broker, self.identity, False, self._draft(lane, count))
                lane.next_id += count
        self._passing = bool(self._waiting)
        if self._passing:
            self.queue.at(self.queue.now + self._pass_s, self._pass)

    def _draft(self, lane: DraftLane, count: int) -> Frames:
        """Return a draft's frames. Only these fields and the parents differ from draft to draft."""
        header = self._header | {
            "epoch": lane.epoch,
            "lane": lane.lane,
            "base_len": lane.length,
            "first_id": lane.next_id,
        }
        parents = self._ids + (lane.next_id - 1)
        parents[0] = -1
        return [
            lane.session_id.to_bytes(8, "little"),
            orjson.dumps(header),
            self._tokens,
            parents.tobytes(),
            self._scores,
        ]
