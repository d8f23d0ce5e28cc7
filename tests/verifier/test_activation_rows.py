"""Hidden states as a drafter takes them: rows that do not fit, rows of others, requests again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from specq.drafting.worker import DraftWorker
from specq.protocol import (
    BF16,
    INT8,
    Activations,
    Assign,
    Draft,
    ProtocolError,
    SamplingParams,
    Speculation,
)
from specq.testing.toy_drafters import ToyProposer
from tests.verifier.activations import PROMPT, ToyReader, ask, open_message, opened


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
