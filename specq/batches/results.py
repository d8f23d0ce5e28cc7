"""Results of lines, as lines of the output file and the error file; pure. The form is OpenAI's."""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson

from specq.batches.lines import BatchLine
from specq.batches.values import LineResult, StoredBatch


class LineAnswer(NamedTuple):
    """The answer of the endpoint to a line: status, body as JSON, and an id for logs."""

    status: int
    body: Any
    request_id: str


def answered(batch: StoredBatch, line: BatchLine, answer: LineAnswer) -> LineResult:
    """Return the result of a line with an answer, which may be an error of the endpoint."""
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": answer.body}
    data = _result(batch, line.number, line.custom_id, response, None)
    return LineResult(line.number, "completed" if answer.status < 400 else "failed", data)


def unrun(batch: StoredBatch, number: int, custom_id: str | None, code: str, message: str) -> LineResult:
    """Return the result of a line without an answer."""
    return LineResult(number, "unrun", _result(batch, number, custom_id, None, {"code": code, "message": message}))


def _result(batch: StoredBatch, number: int, custom_id: str | None, response: Any, error: Any) -> bytes:
    values = {"id": result_id(batch, number), "custom_id": custom_id, "response": response, "error": error}
    return orjson.dumps(values) + b"\n"


def result_id(batch: StoredBatch, number: int) -> str:
    """Return the id of a line's request. It follows from batch and line."""
    return f"batch_req_{batch.id.removeprefix('batch_')}_{number}"
