"""Well-formed messages with values that no honest peer sends: extreme, wrong, missing, too many, or right in the wrong
place.

A forger walks the fields of a message type as `specq.protocol.messages` has them, so a new message or field is forged
without a line here. Most values are plausible, so that a message comes as far as it can; a few are at a bound's limits,
beyond them, or of another type. Ids, epochs and lanes come from real sessions that the forger knows.
"""

from __future__ import annotations

import dataclasses
import json
import random
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from specq.protocol import Frames, Message, ModelInfo, SamplingParams, Speculation, Values
from specq.protocol.bounds import Elements, Items, Json, OneOf, PairBound, Range, Text
from specq.protocol.layout import is_array
from specq.protocol.stats import StatsBound, WorkerMetricsBound
from specq.protocol.versions import OLDEST_VERSION, PROTOCOL_VERSION
from specq.verification import STRATEGIES

KEYS = ("session_id", "job_id")
JUNK = (None, True, -1, 2**31, 2**63, 2**64, 10**400, -(2**63), 1e-320, 1e308, float("nan"), float("inf"), "",
    "x" * 3000, [],
        [None], [[]], {}, {"a": {"b": [1]}}, "Infinity", -0.0, 0.5)  # fmt: skip
OBJECTS = ({}, {"hits": 3}, {"hits": "x"}, {"rounds": 2**63 - 1, "positions": [[1, -2], "x"]}, {"a": {"b": {}}})
METRICS = (
    {},
    {"stale": -(2**63) + 1, "step_rows": [1e308] * 13},
    {"choices": {"x unread": [1, 1e308]}, "decided": [2**63 - 1] * 6, "judged": {"": []}},
    {"a": {"b": {}}},
)
EXTREME_COUNTS = (0, 1, 2, 64, 65, 600, 5000)
WRONG_NUMBERS = (-1, -(2**31), 2**31 - 1, 2**30, 50_000)


@cache
def hints_of(cls: type[Any]) -> dict[str, Any]:
    """Return the annotations of a class's fields, bounds included."""
    return typing.get_type_hints(cls, include_extras=True)


@dataclass
class Session:
    """A session as a forger knows it."""

    session_id: int
    epoch: int = 1
    lane: int = 0
    length: int = 3


@dataclass
class Forger:
    """Makes frames of messages. `sessions` are those that may be spoken of as one likes; of `others`, ids only: whoever
    has them is not hurt by a stranger's epoch. `model` is what the forger says that it is; token ids are below
    `vocab`."""

    rng: random.Random
    model: dict[str, Any]
    vocab: int = 50
    sessions: dict[int, Session] = field(default_factory=dict)
    others: Sequence[int] = ()
    wrongness: float = 0.06  # chance of each value
    _last: list[Session] = field(default_factory=list)

    def frames(self, cls: type[Message]) -> Frames:
        """Return a message of this type with some values forged."""
        rng = self.rng
        session = self._session()
        hints = hints_of(cls)
        names = [spec.name for spec in dataclasses.fields(cls)]
        version = PROTOCOL_VERSION if rng.random() < 0.9 else rng.choice([OLDEST_VERSION, PROTOCOL_VERSION + 1])
        header: dict[str, Any] = {"v": version, "type": cls.TYPE}
        wrongness = self.wrongness if rng.random() < 0.8 else 0.0
        for name in names:
            if name not in KEYS and not is_array(hints[name]):
                header[name] = self._scalar(name, hints[name], session, wrongness)
        if rng.random() < 0.05:
            header.pop(rng.choice(list(header)))
        if rng.random() < 0.05:
            header[rng.choice(["extra", "epoch", "seed", "x" * 200])] = rng.choice(JUNK)
        key = session.session_id if any(name in KEYS for name in names) else 0
        text = json.dumps(header, separators=(",", ":")).encode()
        return [key.to_bytes(8, "little"), text, *self._arrays(cls, hints, session, wrongness)]

    def _session(self) -> Session:
        """Choose a session: one's own, another's under an epoch that it never had, or one that there is not."""
        kind = self.rng.random()
        if kind < 0.7 and self.sessions:
            return self.rng.choice(list(self.sessions.values()))
        if kind < 0.85 and self.others:
            return Session(self.rng.choice(list(self.others)), self.rng.randrange(100))
        return Session(self.rng.choice([0, 1, 2**63 - 1, self.rng.getrandbits(62)]), self.rng.randrange(100))

    # --- scalars ------------------------------------------------------------------------------------------------------

    def _scalar(self, name: str, hint: Any, session: Session, wrongness: float) -> Any:
        if hint in (SamplingParams, Speculation):
            return self._values(hint, wrongness)
        if hint is ModelInfo:
            return self._model(wrongness)
        if hint is bool:
            return self.rng.choice(JUNK) if self.rng.random() < wrongness else self.rng.random() < 0.5
        is_anothers = session.session_id not in self.sessions
        if name == "epoch" and is_anothers:  # a higher one would be a broker's word
            return session.epoch
        if self.rng.random() < wrongness:
            return self.rng.choice(JUNK)
        known = self._known(name, session)
        return self._within(hint.__metadata__[0]) if known is None or self.rng.random() < 0.1 else known

    def _known(self, name: str, session: Session) -> Any:
        """Return what would be right, or nearly, for a field that says where something belongs."""
        rng, length = self.rng, session.length
        known: dict[str, Any] = {
            "epoch": session.epoch + rng.choice([0, 0, 0, 0, 0, 0, -1, 1]),
            "lane": session.lane + rng.choice([0, 0, 0, 1]),
            "base_len": max(0, length + rng.choice([0, 0, 0, -1, 1, 7])),
            "length": max(0, length + rng.choice([0, 0, -2, 3])),
            "prompt_len": rng.choice([1, 2, 3, 3, 4, 2**31 - 1]),
            "tokens_left": rng.choice([1, 5, 20, 2**31 - 1]),
            "first_id": rng.choice([0, 1, 8, rng.randrange(500), 2**31 - 5]),
            "q_size": rng.choice([0, 0, 0, 1, 2, 7]),
            "role": rng.choice(["target", "draft", "broker"]),
            "state": rng.choice(["ready", "ready", "ready", "ready", "loading", "draining", "leaving"]),
            "finish": rng.choice(["", "", "", "stop"]),
            "model": rng.choice(["", self.model["name"], "nobody's"]),
            "endpoint": rng.choice(
                ["", "tcp://127.0.0.1:1", "tcp://127.0.0.1:99999", "ipc://", "inproc://x", "no://x"]
            ),
        }
        return known.get(name)

    def _within(self, bound: Any) -> Any:
        """Return a value that a bound admits, often at its limits."""
        rng = self.rng
        if isinstance(bound, Range):
            if isinstance(bound.low, float) or isinstance(bound.high, float) or bound.high == 1:
                return rng.choice([bound.low, bound.high, rng.uniform(bound.low, bound.high)])
            return rng.choice([int(bound.low), int(bound.high), int(bound.low) + rng.randrange(50)])
        choices: dict[type, Any] = {
            OneOf: lambda: bound.values,
            Text: lambda: ["x" * bound.least, "deterministic", "é\u2028😀", "x" * min(bound.most, 2000)],
            PairBound: lambda: [[self._within(bound.first), self._within(bound.second)]],
            Items: lambda: [
                [self._within(bound.of) for _ in range(max(bound.least, rng.choice([0, 1, 2, min(bound.most, 70)])))]
            ],
            Json: lambda: OBJECTS,
            StatsBound: lambda: OBJECTS,
            WorkerMetricsBound: lambda: METRICS,
        }
        return rng.choice(choices[type(bound)]())

    def _values(self, cls: type[Values], wrongness: float) -> dict[str, Any]:
        """Return parameters, of which few are given; so short a text that many jobs fit."""
        rng, found = self.rng, dict[str, Any]()
        for name in rng.sample(list(cls.BOUNDS), rng.choice([0, 1, 2, 5])):
            found[name] = rng.choice(JUNK) if rng.random() < 3 * wrongness else self._within(cls.BOUNDS[name])
        if cls is SamplingParams:
            found["strategy"] = rng.choice([*STRATEGIES] * 5 + ["nobody's"])
            found.setdefault("temperature", rng.choice([0, 0, 1e-50, 1e-5, 0.8, 100]))
            found["max_tokens"] = rng.choice([1, 2, 4, 4, 4, 2**31 - 1])
        return found

    def _model(self, wrongness: float) -> dict[str, Any]:
        found = dict(self.model)
        hints = hints_of(ModelInfo)
        for name in list(found):
            if name not in ("name", "tokenizer_hash") and self.rng.random() < 2 * wrongness:
                found[name] = self.rng.choice([self.rng.choice(JUNK), self._within(hints[name].__metadata__[0])])
        return found

    # --- arrays -------------------------------------------------------------------------------------------------------

    def _arrays(self, cls: type[Message], hints: dict[str, Any], session: Session, wrongness: float) -> Frames:
        """Return the arrays: as a rule all of one length; some of another, or with numbers that cannot be."""
        rng, frames = self.rng, Frames()
        self._last = []
        count = rng.choice(EXTREME_COUNTS) if rng.random() < 0.05 else rng.randrange(1, 9)
        for spec in dataclasses.fields(cls):
            if is_array(hints[spec.name]):
                dtype, _, bound = hints[spec.name].__metadata__
                own = rng.choice(EXTREME_COUNTS) if rng.random() < wrongness else count
                if spec.default is dataclasses.MISSING and spec.default_factory is not dataclasses.MISSING:
                    own = own if rng.random() < 0.3 else 0  # what may be left out
                frames.append(self._array(spec.name, dtype, bound, own, session, wrongness))
        if rng.random() < 0.02:
            frames = frames[:-1] if rng.random() < 0.5 else [*frames, b"\xff" * rng.choice([1, 4, 8])]
        return frames

    def _listed(self, count: int) -> list[Session]:
        """Return sessions for arrays that name some; mostly the same for all arrays of a message."""
        if len(self._last) != count or self.rng.random() < 0.1:
            self._last = [self._session() for _ in range(count)]
        return self._last

    def _array(self, name: str, dtype: str, bound: Elements, count: int, session: Session, wrongness: float) -> bytes:
        rng = self.rng
        if name in ("session_ids", "job_ids", "epochs", "lengths", "base_lens"):
            known = self._listed(count)
            numbers = {"session_ids": [s.session_id for s in known], "epochs": [s.epoch for s in known]}
            numbers["job_ids"] = numbers["session_ids"]
            found = np.array(numbers.get(name, [s.length for s in known]), np.int64).astype(dtype)
        elif name in ("num_tokens", "num_nodes", "num_seen"):  # so that most arrays are as long as these say
            found = np.full(count, name == "num_tokens" or rng.random() < 0.2, dtype)
        elif dtype in ("<f2", "<f4"):
            found = -np.abs(np.random.default_rng(rng.getrandbits(32)).normal(0, 2, count)).astype(dtype)
        elif name == "parent_ids":
            found = np.arange(-1, count - 1, dtype=dtype)
        elif dtype == "<u1":
            found = np.frombuffer(rng.randbytes(count), np.uint8) & 1
        else:
            found = np.array([rng.randrange(self.vocab) for _ in range(count)], np.int64).astype(dtype)
        if count and rng.random() < wrongness:
            found = found.copy()
            wrong = (np.nan, np.inf, -np.inf, 6e4) if dtype[1] == "f" else WRONG_NUMBERS
            found[rng.randrange(count)] = np.array(rng.choice(wrong)).astype(dtype, casting="unsafe")
        return found.tobytes()
