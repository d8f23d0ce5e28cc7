"""A broker's report as a `Status`, and back: in the header if it fits, else as JSON in a frame of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

from specq.protocol.bounds import REPORT
from specq.protocol.errors import ProtocolError
from specq.protocol.messages import Status
from specq.protocol.wire import MAX_HEADER

_OTHERS = 100  # bytes for the other parts of a header


def status_of(report: dict[str, Any]) -> Status:
    """Return the message that carries a report."""
    data = orjson.dumps(report)
    if len(data) <= MAX_HEADER - _OTHERS:
        return Status(report=report)
    return Status(data=np.frombuffer(data, np.uint8))


def report_of(status: Status) -> dict[str, Any]:
    """Return the report that a message carries.

    Raises ProtocolError for a frame that does not hold a report.
    """
    if not len(status.data):
        return status.report
    try:
        report = orjson.loads(status.data.tobytes())
    except orjson.JSONDecodeError as error:
        raise ProtocolError(f"status.data is not valid JSON: {error}") from None
    if not isinstance(report, dict) or not REPORT.admits(report):
        raise ProtocolError(f"status.data must be {REPORT.allowed}")
    return report
