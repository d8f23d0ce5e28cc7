"""Light stand-ins for the verifiers of a fleet.

A verifier runs a step at a time. It takes the sessions that have waited longest, at most `max_sessions`. A session gets
the nodes of its newest draft that are accepted, by chance, and one token more. Each broker receives the verdicts of its
sessions as one message. A prompt, or the text of a session that was elsewhere, costs rows.

Not imitated: what to verify (all nodes of all drafts are), silence of drafters, KV that runs out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specq.protocol import (
    CAPABILITIES,
    DRAFT_WORKER,
    ORIGIN_CODES,
    PLAIN,
    Close,
    Draft,
    Frames,
    Hello,
    Message,
    Open,
    Verdict,
    Verdicts,
    array_frame,
    decode,
    decode_header,
    encode,
)
from specq.simulate.fleet_workers import FleetWorker, Transmit, model_info, token_at
from specq.simulate.machine import EventQueue
from specq.simulate.scenarios import HardwareCurve
from specq.simulate.settings import Scenario

ENDPOINT = "simulated"
MIN_ACCEPT_PROB = 200
_NODES = array_frame(Draft, "token_ids")


@dataclass(slots=True)
class TargetSession:
    """A session at a verifier. `todo`: tokens without KV. `draft`: lane, first id and nodes of the newest draft."""

    session_id: int
    epoch: int
    broker: str
    length: int
    left: int
    todo: int
    draft: tuple[int, int, int] | None = None


class FleetVerifier(FleetWorker):
    """A verifier. `tokens` counts by broker, `wasted` those of sessions of lost brokers."""

    role = "target"

    def __init__(self, number: int, scenario: Scenario, queue: EventQueue, transmit: Transmit) -> None:
        self._engine, self._acceptance = scenario.engine, scenario.draft.acceptance[0]
        super().__init__(number, scenario, queue, transmit)
        self.sessions: dict[int, TargetSession] = {}
        self.tokens = Counter[str]()
        self.most, self.opened, self.prefix_hits, self.reopened = 0, 0, 0, 0
        self._curve = HardwareCurve(self._engine.step_ms)
        self._prefixes = set[bytes]()
        self._prefix_len = scenario.fleet.prefix_tokens
        self._stepping = False

    def hello(self, scenario: Scenario) -> Hello:
        name, engine = self.identity.decode(), scenario.engine
        return Hello(
            role=self.role, name=name, incarnation=self.number + 1, model=model_info("target", engine.kv_slots),
            endpoint=ENDPOINT, max_sessions=engine.max_sessions, capabilities=CAPABILITIES,
        )  # fmt: skip

    @property
    def free_slots(self) -> int:
        return self._engine.kv_slots - self.num_kv

    def _handle(self, broker: str, kind: type[Message] | None, frames: Frames) -> None:
        if kind is Draft:
            self._graft(broker, frames)
        elif kind is Open:
            self._open(broker, decode(frames))  # type: ignore[arg-type]
        elif kind is Close:
            message: Any = decode(frames)
            session = self.sessions.get(message.session_id)
            if session is not None and (session.broker, session.epoch) == (broker, message.epoch):
                self._close(session)

    def _close(self, session: Any) -> None:
        self.num_kv -= session.length
        super()._close(session)

    def _open(self, broker: str, message: Open) -> None:
        known = self.sessions.get(message.session_id)
        if known is not None:
            if known.epoch >= message.epoch:
                return
            self._close(known)
        length, self.opened = len(message.token_ids), self.opened + 1
        prefix = message.token_ids[: self._prefix_len].tobytes()
        is_known = bool(prefix) and prefix in self._prefixes
        self._prefixes.add(prefix)
        self.reopened += known is not None
        self.prefix_hits += is_known
        todo = length - known.length if known is not None else length - is_known * self._prefix_len
        opened = message.session_id, message.epoch, broker, length, message.tokens_left, max(todo, 0)
        self.sessions[message.session_id] = TargetSession(*opened)
        self.num_kv += length
        self.most = max(self.most, len(self.sessions))
        if not self._stepping:
            self._begin()

    def _graft(self, broker: str, frames: Frames) -> None:
        session = self.sessions.get(int.from_bytes(frames[0], "little"))
        if session is None or session.broker != broker:
            return
        header = decode_header(frames)
        if (header["epoch"], header["base_len"]) == (session.epoch, session.length):
            session.draft = header["lane"], header["first_id"], len(frames[_NODES]) // 4

    # --- steps --------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin a step of the sessions that have waited longest."""
        self._stepping = bool(self.sessions) and self.alive
        if not self._stepping:
            return
        chosen, waiting = list(self.sessions.values()), len(self.sessions) - self._engine.max_sessions
        if waiting > 0:
            chosen = chosen[: self._engine.max_sessions]
            for session in chosen:  # they go behind the others
                self.sessions[session.session_id] = self.sessions.pop(session.session_id)
        room, step, rows = self._engine.max_step_rows, list[tuple[TargetSession, tuple[int, int, int] | None]](), 0
        for session in chosen:
            computed = min(session.todo, room)
            room, rows, session.todo = room - computed, rows + computed, session.todo - computed
            if not session.todo:
                step.append((session, session.draft))
                rows += 1 + (session.draft[2] if session.draft else 0)
                session.draft = None
        seconds = self._curve(max(rows, 1)) + len(chosen) * self._engine.session_us / 1e6
        self.queue.at(self.queue.now + seconds, self._end, step, seconds)

    def _end(self, step: list[tuple[TargetSession, tuple[int, int, int] | None]], seconds: float) -> None:
        if not self.alive:
            return
        self.steps += 1
        by_broker = defaultdict[str, list[tuple[TargetSession, int, tuple[int, int, int] | None, int]]](list)
        for session, draft in step:
            if self.sessions.get(session.session_id) is session:
                accepted = self._accepted(draft[2] if draft else 0)
                new = min(accepted + 1, session.left)
                by_broker[session.broker].append((session, new, draft, min(accepted, new)))
        for broker, verdicts in by_broker.items():
            running = [one for one in verdicts if one[1] < one[0].left]
            messages = [_step_message(running, seconds)] if running else []
            messages += [_last(one, seconds) for one in verdicts if one[1] >= one[0].left]
            for session, new, _, _ in verdicts:
                session.length, session.left = session.length + new, session.left - new
                self.num_kv += new
                self.tokens[broker] += new
                if not session.left:
                    self._close(session)
            for frames in map(encode, messages):
                self.transmit(broker, self.identity, True, frames)
        self._begin()

    def _accepted(self, count: int) -> int:
        for i in range(count):
            if self._random.random() >= self._acceptance:
                return i
        return count


def _step_message(verdicts: Sequence[tuple[TargetSession, int, Any, int]], seconds: float) -> Message:
    """Return the verdicts of a step on sessions that go on."""
    drafted = [(draft, accepted) for _, _, draft, accepted in verdicts if draft]
    new, num_nodes = [count for _, count, _, _ in verdicts], [draft[2] if draft else 0 for _, _, draft, _ in verdicts]
    own = zip(verdicts, new, strict=True)
    tokens = [token_at(one[0].session_id, np.arange(one[0].length, one[0].length + count)) for one, count in own]
    codes = ORIGIN_CODES[DRAFT_WORKER], ORIGIN_CODES[PLAIN]
    origins = b"".join(bytes([codes[0]] * min(one[3], one[1] - 1) + [codes[1]]) for one in verdicts)
    return Verdicts(
        min_accept_prob=MIN_ACCEPT_PROB,
        step_us=int(seconds * 1e6),
        session_ids=np.array([one[0].session_id for one in verdicts], np.int64),
        epochs=np.array([one[0].epoch for one in verdicts], np.int64),
        base_lens=np.array([one[0].length for one in verdicts], np.int32),
        num_tokens=np.array(new, np.int32),
        num_nodes=np.array(num_nodes, np.int32),
        num_seen=np.array([2 if draft else 0 for _, _, draft, _ in verdicts], np.int32),
        waited_us=np.zeros(len(verdicts), np.int32),
        token_ids=np.concatenate(tokens).astype(np.int32),
        origins=np.frombuffer(origins, np.uint8),
        node_ids=np.array([one for d, _ in drafted for one in range(d[1], d[1] + d[2])], np.int32),
        mask=np.array([one < accepted for d, accepted in drafted for one in range(d[2])], np.uint8),
        node_lanes=np.repeat([d[0] for d, _ in drafted], [d[2] for d, _ in drafted]).astype(np.uint8),
        seen=np.array([value for d, _ in drafted for value in (d[0], d[1] + d[2] - 1)], np.int32),
    )


def _last(verdict: tuple[TargetSession, int, Any, int], seconds: float) -> Message:
    session, new, _, _ = verdict
    tokens = token_at(session.session_id, np.arange(session.length, session.length + new)).astype(np.int32)
    return Verdict(
        session_id=session.session_id,
        epoch=session.epoch,
        base_len=session.length,
        finish="length",
        min_accept_prob=MIN_ACCEPT_PROB,
        us=(int(seconds * 1e6), 0),
        token_ids=tokens,
    )
