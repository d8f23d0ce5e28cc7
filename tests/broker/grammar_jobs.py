"""Jobs with grammars, and verifiers that mask."""

from __future__ import annotations

import numpy as np

from specq.protocol import (
    CAPABILITIES,
    GRAMMAR_CAPABILITIES,
    Open,
)
from specq.protocol.grammars import grammar_text
from tests.broker.desk import Desk

SCHEMA = grammar_text({"json_schema": {"type": "object", "properties": {"b": {}, "a": {}}}})


IDS = np.array([5, 6], np.int32)


MASKING = (*CAPABILITIES, *GRAMMAR_CAPABILITIES)


def opened(desk: Desk) -> list[tuple[bytes, int]]:
    return [(to, message.session_id) for to, message in desk.sent if isinstance(message, Open)]


def wait(desk: Desk, seconds: float) -> None:
    for _ in range(round(2 * seconds)):
        desk.now += 0.5
        for worker in desk.broker.state.workers.all():
            desk.beat(worker.identity)
        desk.take(desk.broker.tick(desk.now))
