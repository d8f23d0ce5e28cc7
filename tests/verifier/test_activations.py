"""Hidden states for drafters in other processes: which rows they are sent, when, how many are kept, and that no text
depends on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from specq.drafting.eagle3.source import EagleSource
from specq.protocol import (
    BF16,
    INT8,
    MOST_ACTIVATION_BYTES,
    NO_TAP,
    Activations,
    ProtocolError,
    SessionStep,
    Speculation,
    StepOutput,
    Tap,
    Verdict,
    encode,
)
from specq.testing.toy import ToyEngine, toy_text
from specq.testing.toy_drafters import ToyTrees
from specq.testing.world import World
from specq.verifier import DraftSource
from specq.verifier.sources import activations as module
from tests.verifier.activations import PROMPT, ToyReader, ask, open_message, opened


class Rows(ToyEngine):
    """A toy engine that counts the rows whose hidden states it gave."""

    num_tapped = 0

    def step(self, steps: Sequence[SessionStep], tap: Tap = NO_TAP) -> StepOutput:
        output = super().step(steps, tap)
        self.num_tapped += len(output.hidden.values) if output.hidden is not None else 0
        return output


class Reading:
    """A world with a drafter that keeps its rows when the session is over."""

    def __init__(self, *readers: ToyReader, sources: Sequence[DraftSource] = (), **world: Any) -> None:
        self.world, self.engine = World(**world), Rows()
        self.world.add_verifier(engine=self.engine, sources=sources, measures_drafts=False)
        for i, reader in enumerate(readers):
            self.world.add_drafter(b"d%d" % i, reader)

    def run(self, prompt: Sequence[int] = PROMPT, count: int = 60, job_id: int = 1, **options: Any) -> list[int]:
        """Run a job; return its whole text, which is the target's."""
        job = self.world.submit(job_id, prompt, max_tokens=count, **options)
        self.world.run_until(lambda: job.finish)
        assert job.token_ids == toy_text(prompt, count)
        return [*prompt, *job.token_ids]


# --- what is sent
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("wrong_every", [0, 3])
@pytest.mark.parametrize("form", [BF16, INT8])
def test_a_drafter_is_sent_each_row_once_and_in_order(mode: str, wrong_every: int, form: str) -> None:
    """Of the prompt, and of accepted paths, wherever they ended; and what it drafts of them is used."""
    reader = ToyReader(form=form, wrong_every=wrong_every)
    reading = Reading(reader)
    text = reading.run(speculation=Speculation(mode=mode))
    places = reader.places(1, text)
    assert places == list(range(1, len(places) + 1))
    assert len(places) >= len(text) - 33  # rows of the last round, in which the text ends, go unused
    assert reading.world.received[1].stats["accepted_tokens"] > 20


def test_rows_come_before_the_verdict_on_the_tokens_behind_them() -> None:
    """So a drafter has them when it learns of the tokens."""
    verifier = opened()
    verifier.handle(ask(), 0.0)
    for _ in range(3):
        length = verifier.sessions[1].length
        before, verdict = verifier.step(lambda: 0.0).packed()
        assert isinstance(before, Activations)
        assert isinstance(verdict, Verdict)
        assert before.first + len(before.rows()) == length + len(verdict.token_ids)


def test_sessions_without_requests_have_no_cost() -> None:
    reading = Reading()
    reading.world.add_drafter()
    reading.run()
    assert reading.engine.num_tapped == 0


def test_prompts_are_sent_in_chunks_and_only_the_last_rows() -> None:
    prompt = list(range(1, 41)) * 4
    reader = ToyReader(window=16)
    reading = Reading(reader)
    reading.world.verifiers[b"v0"].planner.max_step_rows = 10
    text = reading.run(prompt, 20)
    places = reader.places(1, text)
    assert places[0] == len(prompt) - 16
    assert places == list(range(places[0], places[-1] + 1))


def test_a_message_has_at_most_a_mebibyte() -> None:
    """Rows as of an 8B model: 24 KiB each in bf16."""

    class Wide(ToyEngine):
        def step(self, steps: Sequence[SessionStep], tap: Tap = NO_TAP) -> StepOutput:
            output = super().step(steps, tap)
            if output.hidden is not None:
                hidden = output.hidden
                wide = np.repeat(hidden.values.astype(np.float32), 2048, axis=1)
                object.__setattr__(hidden, "values", wide)
            return output

    verifier = opened(list(range(1, 49)) * 4, Wide())
    verifier.handle(ask(window=150), 0.0)
    sent = [message for message in verifier.step(lambda: 0.0).packed() if isinstance(message, Activations)]
    assert len(sent) > 3
    assert all(sum(map(len, encode(message)[2:])) <= MOST_ACTIVATION_BYTES for message in sent)
    ends = [message.first + len(message.rows()) for message in sent]
    assert [message.first for message in sent] == [193 - 150, *ends[:-1]]
    assert ends[-1] == 193


def test_drafters_read_different_layers() -> None:
    """Each its own, beside a head in the verifier's process that reads others; in one pass of the target."""
    low, high = ToyReader((0,), wrong_every=2), ToyReader((1,), form=INT8, wrong_every=3)
    head = ToyTrees(wrong_every=3)
    reading = Reading(low, high, sources=[EagleSource(head)])
    text = reading.run()
    assert low.places(1, text)
    assert high.places(1, text)
    sources = reading.world.verifiers[b"v0"].sources.sources
    assert [source.name for source in sources] == ["remote", "eagle3"]  # none of them raised anything
    assert head.num_started


# --- late, silent, lost, moved
# --------------------------------------------------------------------------------------------


def test_a_drafter_that_joins_late_is_sent_what_is_kept() -> None:
    """Where another has asked before, as many rows as that one wanted; else those from now on."""
    first, late = ToyReader(window=12), ToyReader(window=12)
    late.info = replace(late.info, fingerprint="another")  # else both would draft the same
    reading = Reading(first)
    world = reading.world
    job = world.submit(1, PROMPT, max_tokens=200)
    world.run_until(lambda: len(job.token_ids) > 50)
    world.add_drafter(b"late", late)
    world.run_until(lambda: job.finish)
    text = [*PROMPT, *job.token_ids]
    places = late.places(1, text)
    assert places[0] > 30
    assert places == list(range(places[0], places[-1] + 1))
    assert job.token_ids == toy_text(PROMPT, 200)

    alone = ToyReader(window=12)
    reading = Reading()
    job = reading.world.submit(1, PROMPT, max_tokens=200)
    reading.world.run_until(lambda: len(job.token_ids) > 50)
    reading.world.add_drafter(b"alone", alone)
    reading.world.run_until(lambda: job.finish)
    places = alone.places(1, [*PROMPT, *job.token_ids])
    assert places[0] > 50
    assert places == list(range(places[0], places[-1] + 1))


def test_while_drafters_shall_be_silent_rows_wait_and_the_last_ones_are_sent_then() -> None:
    verifier = opened()
    verifier.handle(ask(window=5), 0.0)
    feeds = verifier.sources.mailbox.feeds
    verifier.step(lambda: 0.0)
    found = list[Activations]()
    for _ in range(9):
        flight = verifier.sessions[1].length
        verifier.sources.mailbox.feeds.fresh = lambda may_draft: []  # type: ignore[method-assign]
        verifier.step(lambda: 0.0)
        assert verifier.sessions[1].length > flight
    del feeds.fresh  # type: ignore[method-assign]
    assert feeds.fresh(may_draft=False) == []
    found = feeds.fresh(may_draft=True)
    (message,) = found
    assert message.first + len(message.rows()) == verifier.sessions[1].length
    assert 5 <= len(message.rows()) <= 6
    assert feeds.fresh(may_draft=True) == []


@pytest.mark.parametrize("seed", range(3))
def test_loss_and_doubling_change_no_text(seed: int) -> None:
    """What is lost is not sent again; the rows that come are still the text's own."""
    reader = ToyReader(wrong_every=4)
    reading = Reading(reader, seed=seed, loss=0.05, double=0.05)
    reading.world.run(2.0)
    job = reading.world.submit(1, PROMPT, max_tokens=150)
    reading.world.run_until(lambda: job.finish)
    assert job.token_ids == toy_text(PROMPT, 150)
    assert reader.places(1, [*PROMPT, *job.token_ids])


def test_a_verifier_that_dies_costs_no_token_and_the_next_one_sends_states() -> None:
    """Of the whole text, which it computes anew, as far as the window reaches."""
    reader = ToyReader(window=1000)
    reading = Reading(reader)
    world = reading.world
    job = world.submit(1, PROMPT, max_tokens=200)
    world.run_until(lambda: len(job.token_ids) > 60)
    world.add_verifier(b"v1", Rows(), measures_drafts=False)
    world.kill(b"v0")
    world.run_until(lambda: job.finish)
    assert job.token_ids == toy_text(PROMPT, 200)
    places = reader.places(1, [*PROMPT, *job.token_ids])
    assert places == list(range(1, places[-1] + 1))  # under the new epoch the session was opened anew
    assert places[-1] > 100


def test_a_verifier_stops_sending_when_its_drafter_is_lost() -> None:
    reading = Reading(ToyReader())
    world = reading.world
    job = world.submit(1, PROMPT, max_tokens=900)
    feeds = world.verifiers[b"v0"].sources.mailbox.feeds
    world.run_until(lambda: len(job.token_ids) > 30)
    assert feeds.layers == (0, 1)
    world.kill(b"d0")
    world.run_until(lambda: job.finish or not len(feeds))
    assert not job.finish
    assert feeds.layers == ()
    world.run_until(lambda: job.finish)
    assert job.token_ids == toy_text(PROMPT, 900)


def test_a_closed_session_leaves_no_state() -> None:
    reading = Reading(ToyReader())
    for job_id in (1, 2, 3):
        reading.run(job_id=job_id)
    reading.world.run(1.0)
    feeds = reading.world.verifiers[b"v0"].sources.mailbox.feeds
    assert not len(feeds)
    assert feeds.layers == ()


def test_what_is_kept_of_all_sessions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sessions that asked first lose theirs; what is computed later is sent all the same."""
    monkeypatch.setattr(module, "MOST_KEPT_BYTES", 60 * 12)
    verifier = opened(max_tokens=30)
    verifier.handle(ask(), 0.0)
    verifier.handle(open_message(2, PROMPT, 30), 0.0)
    verifier.handle(ask(2), 0.0)
    sent: dict[int, list[int]] = {1: [], 2: []}
    for _ in range(40):
        for message in verifier.step(lambda: 0.0).packed():
            if isinstance(message, Activations):
                sent[message.session_id] += range(message.first, message.first + len(message.rows()))
        kept = [
            kept.num_bytes for feed in verifier.sources.mailbox.feeds._feeds.values() for kept in feed.kept.values()
        ]
        assert sum(kept) <= 60 * 12
    assert sent[1] == sent[2] == list(range(1, 32))


def test_layers_that_the_engine_does_not_give_are_refused() -> None:
    """With what there is; nothing is tapped then. What is asked of another session, or of an earlier one, is not
    answered."""

    class Closed(ToyEngine):
        num_tap_layers = 0

    with pytest.raises(
        ProtocolError, match=r"reads hidden states of layers \(0, 5\); the toy engine has layers 0 to 1"
    ):
        opened().handle(ask(layers=(0, 5)), 0.0)
    verifier = opened(engine=Closed())
    with pytest.raises(ProtocolError, match=r"the toy engine gives none"):
        verifier.handle(ask(), 0.0)
    assert verifier.handle(ask(session_id=9), 0.0) == verifier.handle(ask(epoch=7), 0.0) == []
    assert verifier.sources.mailbox.layers == ()
    assert [type(message) for message in verifier.step(lambda: 0.0)] == [Verdict]


def test_what_cannot_be_kept_costs_the_states_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = opened()
    verifier.handle(ask(), 0.0)
    verifier.step(lambda: 0.0)

    def fail(values: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(module, "_halves", fail)
    for _ in range(3):
        assert [type(message) for message in verifier.step(lambda: 0.0)] == [Verdict]
    assert verifier.sessions[1].token_ids == [*PROMPT, *toy_text(PROMPT, 4)]
    assert [source.name for source in verifier.sources.sources] == ["remote"]


def test_layers_that_are_refused_are_logged_once() -> None:
    """A drafter is asked again each second; and one that asks for ever other layers does not fill the log."""
    verifier = opened()
    with capture_logs() as logs:
        for last in (5, 5, 5, *range(2, 400)):
            with pytest.raises(ProtocolError, match="hidden states of layers"):
                verifier.handle(ask(layers=(0, last)), 0.0)
    refused = [one for one in logs if one["event"] == "activations_refused"]
    assert 1 < len(refused) < 20
    assert len({one["reason"] for one in refused}) == len(refused)
