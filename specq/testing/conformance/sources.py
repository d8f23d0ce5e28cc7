"""The conformance suite of draft sources, in a verifier whose target writes toy text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specq.protocol import Ack, Close, Open, SamplingParams, Speculation, Verdict
from specq.testing.toy import ToyEngine, toy_text
from specq.verifier import DraftSource, StepCurve, Verifier
from specq.verifier.sources import Session

PROMPT = [5, 6, 7]
LENGTH = 40
SHAPES: tuple[dict[str, Any], ...] = (
    {"tree": ((0,), (0, 0), (1,), (1, 0))},
    {"num_candidates": 3},
    {"fan_out_hit": (3, 2), "fan_out_miss": (2,)},
)
Feed = Callable[[Verifier], None]


class SourceConformance:
    """Needs the fixtures `make_source` and `feed`.

    - `make_source`: a new source at each call, or None for the verifier's own mailbox.
    - `feed`: runs before each step, so that the mailbox of remote drafters has drafts.
    """

    @pytest.fixture
    def serve(self, make_source: Callable[[], DraftSource | None], feed: Feed) -> Callable[..., Serving]:
        def start(*others: DraftSource, **options: Any) -> Serving:
            source = make_source()
            return Serving([source, *others] if source is not None else [*others], feed, **options)

        return start

    @pytest.mark.parametrize("mode", ["async", "plain", "sync", "jit"])
    @pytest.mark.parametrize("strategy", ["deterministic", "greedy", "probabilistic"])
    def test_texts_are_the_targets(self, serve: Callable[..., Serving], mode: str, strategy: str) -> None:
        serving = serve()
        for i in range(3):
            serving.open(i, seed=i, mode=mode, strategy=strategy)
        assert serving.finish() == {i: toy_text(PROMPT, LENGTH, i) for i in range(3)}
        assert not serving.failed

    @pytest.mark.parametrize("mode", ["async", "sync", "jit"])
    @pytest.mark.parametrize("strategy", ["deterministic", "probabilistic"])
    @pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: next(iter(shape)))
    def test_texts_of_jobs_with_a_shape_are_the_targets(
        self, serve: Callable[..., Serving], mode: str, strategy: str, shape: dict[str, Any]
    ) -> None:
        serving = serve()
        for i in range(3):
            serving.open(i, seed=i, mode=mode, strategy=strategy, **shape)
        assert serving.finish() == {i: toy_text(PROMPT, LENGTH, i) for i in range(3)}
        assert not serving.failed

    def test_two_of_a_kind_do_no_harm(
        self, serve: Callable[..., Serving], make_source: Callable[[], DraftSource | None]
    ) -> None:
        """Both draft for the same sessions."""
        other = make_source()
        serving = serve(*([other] if other is not None else []))
        serving.open(0)
        assert serving.finish()[0] == toy_text(PROMPT, LENGTH)

    @pytest.mark.parametrize("when", ["before begin", "after begin", "after a step"])
    def test_a_session_may_be_closed_at_any_time(self, serve: Callable[..., Serving], when: str) -> None:
        """It may be opened again under the same id, and continues from the given context."""
        serving = serve()
        for i in (0, 1):
            serving.open(i, seed=i)
        for _ in range(3):
            serving.turn()
        if when != "before begin":
            serving.verifier.begin(0.0)
        if when == "after a step":
            serving.step()
        so_far = serving.texts[0][:4]
        serving.verifier.handle(Close(session_id=0, epoch=1), 0.0)
        serving.texts[0] = []
        serving.open(0, epoch=2, context=[*PROMPT, *so_far])
        serving.step()
        texts = serving.finish()
        assert so_far + texts[0] == toy_text(PROMPT, LENGTH + len(so_far))
        assert texts[1] == toy_text(PROMPT, LENGTH, 1)

    def test_a_refused_session_goes_on(self, serve: Callable[..., Serving]) -> None:
        """It continues without drafts of this source, and so do the other sessions."""
        serving = serve()
        for i in (0, 1):
            serving.open(i, seed=i)
        serving.turn()
        for source in serving.verifier.sources.sources:
            source.refuse(serving.verifier.sessions[0])
        assert serving.finish() == {i: toy_text(PROMPT, LENGTH, i) for i in (0, 1)}

    def test_what_it_does_not_know_is_forgotten_quietly(self, serve: Callable[..., Serving]) -> None:
        """A session without drafts is closed twice."""
        serving = serve()
        serving.open(0)
        for _ in range(2):
            serving.verifier.sources.close(serving.verifier.sessions[0])
        assert serving.finish()[0] == toy_text(PROMPT, LENGTH)

    def test_closed_sessions_leave_no_state(self, serve: Callable[..., Serving]) -> None:
        """No work remains, and no session in any attribute of the source."""
        serving = serve()
        for i in range(5):
            serving.open(i, seed=i)
        serving.finish()
        for i in range(5):
            serving.verifier.handle(Close(session_id=i, epoch=1), 0.0)
        serving.verifier.begin(0.0)
        assert not serving.verifier.has_work
        for source in serving.verifier.sources.sources:
            kept = [value for value in vars(source).values() if isinstance(value, dict | list | set)]
            assert not any(kept), f"{source.name} keeps {kept}"
            parts = [part for part in vars(source).values() if type(part).__module__.startswith("specq.drafting")]
            kept = [
                value for part in parts for value in _values(part) if isinstance(value, dict) and _has_session(value)
            ]
            assert not kept, f"{source.name} keeps {kept}"


def _values(part: object) -> list[object]:
    return list(vars(part).values()) if hasattr(part, "__dict__") else []


def _has_session(values: dict[object, object]) -> bool:
    return any(isinstance(value, Session) for value in values.values())


class Serving:
    """A verifier whose sources of drafts are all in use, and the texts of its sessions."""

    def __init__(
        self, sources: list[DraftSource], feed: Feed, *, engine: ToyEngine | None = None, **options: Any
    ) -> None:
        self.engine, self._curve = engine or ToyEngine(), StepCurve([1, 64], [0.005, 0.01])
        self.verifier = Verifier(
            self.engine, self._curve, sources, incarnation=1, **{"measures_drafts": False, **options}
        )
        self.texts: dict[int, list[int]] = {}
        self._feed, self._given = feed, list(sources)

    @property
    def failed(self) -> list[str]:
        """Return the sources that raised an error: a verifier continues without them."""
        return [source.name for source in self._given if source not in self.verifier.sources.sources]

    def open(
        self,
        session_id: int,
        *,
        epoch: int = 1,
        seed: int = 0,
        mode: str = "async",
        strategy: str = "deterministic",
        context: list[int] | None = None,
        **shape: Any,
    ) -> None:
        """Open a session. `shape`: of its drafts."""
        token_ids = np.array(context or PROMPT, np.int32)
        params = replace(SamplingParams(), seed=seed, strategy=strategy, max_tokens=LENGTH)
        message = Open(
            session_id=session_id, epoch=epoch, prompt_len=len(PROMPT), tokens_left=LENGTH, params=params,
            speculation=Speculation(mode=mode, **shape), token_ids=token_ids,
        )  # fmt: skip
        assert not self.verifier.handle(message, 0.0)
        self.texts[session_id] = []

    def turn(self) -> None:
        """Begin, feed, step."""
        self.verifier.begin(0.0)
        self.step()

    def step(self) -> None:
        """Feed and step. The journal confirms all tokens, and sessions stop waiting for an absent drafter."""
        self._feed(self.verifier)
        for message in self.verifier.step(self._clock):
            assert isinstance(message, Verdict)
            self.texts[message.session_id] += message.token_ids.tolist()
            end = message.base_len + len(message.token_ids)
            self.verifier.handle(Ack(session_id=message.session_id, epoch=message.epoch, length=end), 0.0)
        self.verifier.heartbeat()

    def _clock(self) -> float:
        """Return a time at which each step has taken the time of the curve.

        Otherwise the verifier would learn the cost of nodes from steps without duration.
        """
        return sum(map(self._curve.profiled, self.engine.num_rows))

    def finish(self) -> dict[int, list[int]]:
        """Take turns until all sessions have ended, and return their texts."""
        for _ in range(8 * LENGTH):
            if all(session.finish for session in self.verifier.sessions.values()):
                return self.texts
            self.turn()
        raise AssertionError("the sessions never end")
