"""A drafter that attacks the text: a thread with a raw DEALER that registers, and answers each verdict with drafts.

It knows all that a drafter receives (context, verdicts, parameters) and sends, in turn: a rare token that it would like
to see, as if it were certain; guesses in any tree shape; lies about what a token was drawn from, by which an honest
judge would accept it for certain; and, after each of these, something malformed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import numpy as np
import zmq

from specq.protocol.messages import Assign, Draft, Heartbeat, Hello, Release, Verdict, Welcome
from specq.protocol.types import ModelInfo
from specq.protocol.versions import CAPABILITIES
from specq.protocol.wire import decode, encode
from specq.transport.sockets import connect_dealer

BEAT_S = 0.1
FULL = 65_535


@dataclass
class _Victim:
    """A session as the drafter knows it."""

    assigned: Assign
    length: int
    next_id: int = 0

    @property
    def block(self) -> range:
        """The tokens that the session's target may say: a hostile drafter knows the model."""
        return range(8) if self.assigned.token_ids[-1] < 8 else range(8, 20)


class Hostile:
    """Registers as a drafter of `model` under a name; runs until the block is left."""

    def __init__(self, broker: str, model: ModelInfo, name: str, *, lies_only: bool = False) -> None:
        self.seeds: list[int] = []  # that were handed to it
        self.num_sent = 0
        self._broker, self._lies_only = broker, lies_only
        self._hello = Hello(role="draft", name=name, incarnation=1, model=model, capabilities=CAPABILITIES)
        self._victims: dict[int, _Victim] = {}
        self._random = np.random.default_rng(0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(60)

    # --- the worker's part ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with zmq.Context() as context, connect_dealer(context, self._broker, queue=True) as socket:
            socket.send_multipart(encode(self._hello))
            while not self._stop.is_set():
                if socket.poll(int(BEAT_S * 1e3)):
                    for frames in self._answers(socket.recv_multipart()):
                        socket.send_multipart(frames)
                else:
                    socket.send_multipart(encode(self._beat("ready")))
            socket.send_multipart(encode(self._beat("leaving")))

    def _beat(self, state: str) -> Heartbeat:
        known = list(self._victims.values())
        return Heartbeat(
            incarnation=1,
            state=state,
            session_ids=np.array([one.assigned.session_id for one in known], np.int64),
            epochs=np.array([one.assigned.epoch for one in known], np.int64),
            lengths=np.array([one.length for one in known], np.int32),
        )

    def _answers(self, frames: list[bytes]) -> Iterator[list[bytes]]:
        message = decode(frames)
        match message:
            case Welcome():
                yield encode(self._beat("ready"))
            case Assign():
                self.seeds.append(message.params.seed)
                self._victims[message.session_id] = _Victim(message, len(message.token_ids))
                yield from self._drafts(message.session_id)
            case Release():
                self._victims.pop(message.session_id, None)
            case Verdict() if message.session_id in self._victims:
                self._victims[message.session_id].length = message.base_len + len(message.token_ids)
                if message.finish:
                    del self._victims[message.session_id]
                else:
                    yield from self._drafts(message.session_id)

    # --- the hostile part -------------------------------------------------------------------------------------------

    def _drafts(self, session_id: int) -> Iterator[list[bytes]]:
        victim = self._victims[session_id]
        attacks: list[Callable[[_Victim], Draft]] = [_favourite, self._guesses, _lie, self._sampled_guesses]
        attack = _lie if self._lies_only else attacks[self._random.integers(len(attacks))]
        draft = attack(victim)
        victim.next_id = draft.first_id + len(draft.token_ids)
        self.num_sent += 1
        if not self._lies_only:
            yield self._malformed(draft)
        yield encode(draft)

    def _guesses(self, victim: _Victim) -> Draft:
        """Return a random tree of random tokens with random claims."""
        edges: list[tuple[int, int]] = []
        for _ in range(self._random.integers(1, 9)):
            edge = (int(self._random.integers(-1, len(edges))), int(self._random.choice(victim.block)))
            if edge not in edges:
                edges.append(edge)
        parents, tokens = zip(*edges, strict=True)
        return _draft(victim, np.array(tokens), parents, -self._random.exponential(0.5, len(edges)))

    def _sampled_guesses(self, victim: _Victim) -> Draft:
        """Return three siblings, chosen by content, that claim to be drawn from one law."""
        tokens = self._random.choice(victim.block, 3, replace=False)
        draft = _draft(victim, tokens, [-1] * 3, np.zeros(3))
        weights = np.array([1, 1, FULL], np.uint16)
        return replace(draft, q_size=3, q_ids=draft.token_ids, q_weights=weights, q_rows=np.zeros(3, np.int32))

    def _malformed(self, draft: Draft) -> list[bytes]:
        """Return frames that are no draft, or a draft that cannot be: each kind in turn."""
        ids, key = draft.token_ids, encode(draft)[0]
        wrong: list[list[bytes]] = [
            [key, b"{", b""],
            [key, encode(draft)[1], b"\x01"],
            encode(replace(draft, token_ids=ids + 1000)),
            encode(replace(draft, token_ids=-1 - ids)),
            encode(replace(draft, parent_ids=draft.first_id + np.arange(len(ids), dtype=np.int32))),
            encode(replace(draft, scores=np.full(len(ids), np.nan, np.float16))),
            encode(replace(draft, token_ids=ids[:1].repeat(2), parent_ids=draft.parent_ids[:1].repeat(2),
            scores=draft.scores[:1].repeat(2))),
            encode(replace(draft, q_size=1, q_ids=ids[:1], q_weights=np.zeros(1, np.uint16), q_rows=np.zeros(len(ids),
            np.int32))),
            encode(replace(draft, lane=draft.lane + 1)),
            encode(replace(draft, base_len=draft.base_len + 1)),
        ]  # fmt: skip
        return wrong[self.num_sent % len(wrong)]


def _draft(victim: _Victim, tokens: np.ndarray, parents: Sequence[int], scores: np.ndarray) -> Draft:
    """Return a draft of nodes whose parents are indices into it, -1 for the context."""
    first = victim.next_id
    return Draft(
        session_id=victim.assigned.session_id,
        epoch=victim.assigned.epoch,
        lane=victim.assigned.lane,
        base_len=victim.length,
        first_id=first,
        token_ids=np.asarray(tokens, np.int32),
        parent_ids=np.array([parent if parent < 0 else first + parent for parent in parents], np.int32),
        scores=np.asarray(scores, np.float16),
    )


def _favourite(victim: _Victim) -> Draft:
    """Return a chain of a rare token, as if it were certain."""
    return _draft(victim, np.full(3, victim.block[-1]), [-1, 0, 1], np.zeros(3))


def _lie(victim: _Victim) -> Draft:
    """Return a rare token that claims to have been drawn from a law that hardly ever gives it: the judge would accept
    it with certainty, min(1, target / draft)."""
    rare, other = victim.block[-1], victim.block[0]
    draft = _draft(victim, np.array([rare]), [-1], np.zeros(1))
    distributions = {"q_ids": np.array([rare, other], np.int32), "q_weights": np.array([1, FULL], np.uint16)}
    return replace(draft, q_size=2, q_rows=np.zeros(1, np.int32), **distributions)
