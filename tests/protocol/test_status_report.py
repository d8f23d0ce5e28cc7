"""A report travels in the header if it fits, else in a frame. An invalid report is refused."""

from __future__ import annotations

import numpy as np
import pytest

from specq.protocol.errors import ProtocolError
from specq.protocol.messages import Status
from specq.protocol.status_report import report_of, status_of
from specq.protocol.wire import MAX_HEADER, decode, encode
from tests.each import each


@each("size", [0, 10, MAX_HEADER - 150, MAX_HEADER - 100, MAX_HEADER, 20 * MAX_HEADER])
def test_a_report_of_any_size_survives_the_wire(size: int) -> None:
    report = {"models": ["x" * size], "counts": {"jobs": 3}}
    assert report_of(decode(encode(status_of(report)))) == report
    assert size > 10 or status_of(report) == Status(report=report), "a small one stays in the header"


@each("data", [b"x", b"[]", b"3", b'{"a":1e999}', b'{"a":18446744073709551615}', b"\xff"])
def test_an_invalid_report_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"status\.data"):
        report_of(Status(data=np.frombuffer(data, np.uint8)))
