"""A draft worker lowers its priority only after registration. Earlier, it would starve while it loads."""

from __future__ import annotations

from itertools import count

import pytest

from specq.config.sections import DraftConfig
from specq.drafting.worker.worker import DraftWorker
from specq.processes import draft
from specq.protocol import Heartbeat, Hello, Message, Welcome
from specq.testing.fake_broker import FakeBroker
from specq.testing.toy import toy_info
from specq.testing.toy_drafters import ToyProposer
from specq.testing.waiting import wait_until


def test_it_lowers_its_priority_once_after_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only once, for any number of Welcome messages."""
    given: list[tuple[int, int]] = []  # the niceness, and how many welcomes there were
    hellos = count(1)

    def answer(message: Message) -> list[Message]:
        if isinstance(message, Hello) and next(hellos) > 1:
            return [Welcome(heartbeat_ms=10), Welcome(heartbeat_ms=10)]
        return []

    with FakeBroker(answer) as broker:
        drafter = DraftWorker(ToyProposer(toy_info()), incarnation=1)
        loop = draft.DrafterLoop(DraftConfig(broker=broker.address, nice=5), drafter, "d")
        (link,) = loop.links
        monkeypatch.setattr(draft, "give_way", lambda nice: given.append((nice, link.num_welcomes)))

        def is_served() -> bool:
            loop.turn()
            return broker.num_heard(Heartbeat) >= 3

        wait_until(is_served, 20)
        loop.close()
    assert given == [(5, 1)]
