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
from specq.drafting.worker import DraftWorker
from specq.protocol import (
    BF16,
    INT8,
    MOST_ACTIVATION_BYTES,
    NO_TAP,
    ActivationRequest,
    Activations,
    Assign,
    Draft,
    Float32Array,
    GetActivations,
    Int32Array,
    Open,
    ProtocolError,
    SamplingParams,
    SessionStep,
    Speculation,
    StepOutput,
    Tap,
    Verdict,
    encode,
)
from specq.testing.toy import ToyEngine, toy_info, toy_text
from specq.testing.toy_drafters import ToyProposer, ToyTrees
from specq.testing.world import World
from specq.verifier import DraftSource, StepCurve, Verifier
from specq.verifier.sources import activations as module

PROMPT = [5, 6, 7]
CURVE = StepCurve([1, 64], [0.005, 0.006])


class ToyReader(ToyProposer):
    """A toy proposer that says nothing of a text of which it has no states, and checks that those it is sent are the
    text's own."""

    def __init__(self, layers: tuple[int, ...] = (0, 1), window: int = 64, form: str = BF16, **options: Any) -> None:
        super().__init__(replace(toy_info(), fingerprint=f"reader {layers} {form}"), **options)
        self.activations, self.width = ActivationRequest(layers, form, window), 3 * len(layers)
        self.rows: dict[
            int, list[tuple[int, Float32Array]]
        ] = {}  # by session: the tokens' places, and the rows before them

    def open(self, session_id: int, token_ids: Int32Array, params: SamplingParams, owner: str = "") -> None:
        super().open(session_id, token_ids, params)
        self.rows[session_id] = []

    def observe(self, session_id: int, first: int, states: Float32Array) -> None:
        self.rows[session_id] += [(first + i, row) for i, row in enumerate(states)]

    def knows(self, session_id: int) -> bool:
        return bool(self.rows[session_id])

    def places(self, session_id: int, text: Sequence[int]) -> list[int]:
        """Return the tokens before which rows came, in the order in which they came; fails for rows of another text."""
        for place, row in self.rows[session_id]:
            own = [number for layer in self.activations.layers for number in (layer, place - 1, text[place - 1])]
            tolerance = 0.0 if self.activations.form == BF16 else max(place, 50) / 250
            np.testing.assert_allclose(row, own, atol=tolerance)
        return [place for place, _ in self.rows[session_id]]


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


# --- what is wrong
# --------------------------------------------------------------------------------------------------------


def open_message(session_id: int, prompt: Sequence[int], max_tokens: int) -> Open:
    return Open(
        session_id=session_id,
        epoch=1,
        prompt_len=len(prompt),
        tokens_left=max_tokens,
        params=SamplingParams(max_tokens=max_tokens),
        token_ids=np.array(prompt, np.int32),
    )


def opened(prompt: Sequence[int] = PROMPT, engine: ToyEngine | None = None, max_tokens: int = 100) -> Verifier:
    """A verifier with one session."""
    verifier = Verifier(engine or ToyEngine(), CURVE, incarnation=1, measures_drafts=False)
    verifier.handle(open_message(1, prompt, max_tokens), 0.0)
    return verifier


def ask(session_id: int = 1, layers: tuple[int, ...] = (0, 1), window: int = 64, epoch: int = 1) -> GetActivations:
    return GetActivations(
        session_id=session_id, epoch=epoch, lane=0, tap_layers=layers, tap_form=BF16, tap_window=window
    )


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


def assigned(proposer: ToyProposer) -> DraftWorker:
    """A drafter with one session."""
    drafter = DraftWorker(proposer, incarnation=1)
    params, token_ids = SamplingParams(), np.array(PROMPT, np.int32)
    drafter.handle(Assign(session_id=1, epoch=1, lane=0, prompt_len=3, params=params, token_ids=token_ids))
    return drafter


def rows_message(**changes: Any) -> Activations:
    """Rows before the first two tokens, of the toy's two layers."""
    data = np.array([[0, 0, 5, 1, 0, 5], [0, 1, 6, 1, 1, 6]], np.float32)
    halves = (data.view(np.uint32) >> 16).astype("<u2")
    fields: dict[str, Any] = {
        "session_id": 1,
        "epoch": 1,
        "lane": 0,
        "first": 1,
        "tap_layers": (0, 1),
        "tap_form": BF16,
        "width": 6,
        "data": halves.reshape(-1).view(np.uint8),
    }
    return Activations(**{**fields, **changes})


NAN = np.full(12, 0x7FC0, "<u2").view(np.uint8)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"tap_layers": (0, 2)},
            r"of layers \(0, 2\) in bf16, 6 numbers a row; this drafter reads layers \(0, 1\) in bf16, 6 a row",
        ),
        (
            {"tap_form": INT8},
            r"of layers \(0, 1\) in int8, 6 numbers a row; this drafter reads layers \(0, 1\) in bf16",
        ),
        ({"width": 3}, r"3 numbers a row; this drafter reads .* 6 a row"),
        ({"data": np.zeros(13, np.uint8)}, r"13 bytes are not rows of 6 numbers of 2 layers, 12 bytes each"),
        ({"data": NAN}, "not finite"),
        ({"scales": np.ones(2, np.float32)}, r"2 scales, and 2 rows in bf16 have 0"),
    ],
)
def test_rows_that_do_not_fit_are_dropped_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    """They harm neither the drafter nor what it knows already."""
    reader = ToyReader()
    drafter = assigned(reader)
    with pytest.raises(ProtocolError, match=reason):
        drafter.handle(rows_message(**changes))
    assert not drafter.has_work
    drafter.handle(rows_message())
    assert reader.places(1, PROMPT) == [1, 2]
    (draft,) = drafter.step()
    assert isinstance(draft, Draft)


def test_rows_of_other_sessions_epochs_and_lanes_are_ignored() -> None:
    reader = ToyReader()
    drafter = assigned(reader)
    for changes in ({"session_id": 2}, {"epoch": 2}, {"lane": 1}):
        drafter.handle(rows_message(**changes))
    assert reader.rows == {1: []}
    with pytest.raises(ProtocolError, match="this drafter reads no hidden states"):
        assigned(ToyProposer()).handle(rows_message())


def test_int8_rows_need_a_scale_for_each_layer() -> None:
    drafter = assigned(ToyReader(form=INT8))
    data = np.zeros(12, np.uint8)
    with pytest.raises(ProtocolError, match=r"3 scales, and 2 rows in int8 have 4"):
        drafter.handle(rows_message(tap_form=INT8, data=data, scales=np.ones(3, np.float32)))
    huge = np.full(4, np.finfo(np.float32).max, np.float32)
    with pytest.raises(ProtocolError, match="not finite"):
        drafter.handle(rows_message(tap_form=INT8, data=np.full(12, 127, np.uint8), scales=huge))
    drafter.handle(rows_message(tap_form=INT8, data=data, scales=np.ones(4, np.float32)))


def test_a_synchronous_session_without_states_is_answered() -> None:
    """With nothing, so that its rounds do not wait for a drafter that has nothing to say."""

    class Silent(ToyReader):
        def expand(self, requests: Any) -> Any:
            return [children.first(0) for children in super().expand(requests)]

    reader = Silent()
    drafter = DraftWorker(reader, incarnation=1)
    params, token_ids = SamplingParams(), np.array(PROMPT, np.int32)
    sync = Speculation(mode="sync")
    drafter.handle(
        Assign(session_id=1, epoch=1, lane=0, prompt_len=3, params=params, speculation=sync, token_ids=token_ids)
    )
    (draft,) = drafter.step()
    assert not len(draft.token_ids)
    assert not drafter.has_work


def test_a_repeated_request_sends_no_rows_twice() -> None:
    """The broker repeats a request that may be lost. A restarted drafter has another lane."""
    verifier = opened()
    assert verifier.handle(ask(), 0.0) == []
    verifier.step(lambda: 0.0)
    assert verifier.handle(ask(), 0.0) == []
    (message,) = verifier.handle(replace(ask(), lane=1), 0.0)
    assert isinstance(message, Activations)
    assert message.lane == 1
    assert message.first + len(message.rows()) == verifier.sessions[1].length
    assert {one.lane for one in verifier.step(lambda: 0.0).packed() if isinstance(one, Activations)} == {0, 1}


@pytest.mark.parametrize("leaves", [False, True])
def test_a_drafter_that_leaves_or_changes_layers_keeps_states_of_others(leaves: bool) -> None:
    """What was kept for it is forgotten with it; other sessions' rows come without a gap."""
    verifier = opened(max_tokens=400)
    verifier.handle(open_message(2, PROMPT, 400), 0.0)
    verifier.handle(ask(2, layers=(1,)), 0.0)
    places = list[int]()
    with capture_logs() as logs:
        for turn in range(60):
            other = replace(ask(layers=[(0,), (0, 1), (1,)][turn // 2 % 3]), lane=turn // 6)
            verifier.handle(other, 0.0)
            for message in verifier.step(lambda: 0.0).packed():
                if isinstance(message, Activations) and message.session_id == 2:
                    places += range(message.first, message.first + len(message.rows()))
            if leaves:
                verifier.handle(replace(other, tap_layers=()), 0.0)
    assert places == list(range(1, len(places) + 1))
    assert len(places) >= 55
    assert [one for one in logs if one["event"] == "activation_store_failed"] == []
    kept = verifier.sources.mailbox.feeds._feeds
    assert 1 not in kept if leaves else len(kept[1].kept) <= 3


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
