"""Answers the lines of batches, as the endpoints answer requests.

A line's jobs have a key that follows from batch and line, as with an `Idempotency-Key`. So each time they are the same
jobs. The tenant is the name of the owner's API key.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import structlog

from specq.batches import LineAnswer, LineRetryError, LineRun, result_id
from specq.gateway.completion_call import Call
from specq.gateway.errors import OUR_FAULT, ApiError, of_job
from specq.gateway.guard import Caller
from specq.gateway.metrics import Metrics
from specq.gateway.routes.text import ENDPOINTS
from specq.gateway.serving import Prepared, Repeatable, Upstream, complete, digest, prepare
from specq.protocol import JobError, bounds
from specq.runtime import traced

log = structlog.get_logger(__name__)

LATER = ("busy", "no_verifier", "no_broker", "lost")  # codes of errors that say nothing about the line
SPARE_S = 60.0  # a job may run so long after the window: the batch ends it before
MODEL_WAIT_S = 20.0  # for a model that is not served, perhaps since its verifier has not registered yet
MOST_MODELS = 1000


class BatchLines:
    """See `specq.batches.runner.AnswerLine`."""

    def __init__(self, upstream: Upstream, metrics: Metrics) -> None:
        self._upstream, self._metrics = upstream, metrics
        self._missing: dict[str, float] = {}  # model -> when it was first missing

    async def __call__(self, run: LineRun, /) -> LineAnswer:
        with self._metrics.running_line():
            answer = await self._answer(run)
        self._metrics.note_line(answer.status)
        return answer

    async def _answer(self, run: LineRun) -> LineAnswer:
        request_id = result_id(run.batch, run.line.number).removeprefix("batch_")
        try:
            answer = await self._complete(run)
        except ApiError as error:
            self._check_model(error, run)
            return LineAnswer(error.status, error.body, request_id)
        except JobError as error:
            if error.code in LATER:
                raise LineRetryError(str(error)) from None
            refusal = of_job(error)
            return LineAnswer(refusal.status, refusal.body, request_id)
        except Exception as error:  # noqa: BLE001 - one line's fault is nobody else's
            log.error("request_failed", path=run.batch.asked.endpoint, **traced(error))  # noqa: TRY400 - may quote a user
            return LineAnswer(500, ApiError(OUR_FAULT, 500).body, request_id)
        return LineAnswer(200, answer, request_id)

    def _check_model(self, error: ApiError, run: LineRun) -> None:
        """Raise LineRetryError for a model that has not been missing for long."""
        if error.code != "model_not_found":
            return
        model = str(run.line.body.get("model"))
        if len(self._missing) >= MOST_MODELS:
            self._missing.clear()
        if time.monotonic() - self._missing.setdefault(model, time.monotonic()) < MODEL_WAIT_S:
            raise LineRetryError(str(error)) from None

    async def stop(self, run: LineRun, /) -> None:
        """Stop a line's jobs, which another gateway may have left running."""
        with suppress(ApiError, JobError):  # then it has none
            prepared = await self._prepare(run, _call(run))
            prepared.client.stop(prepared.requests)

    async def _complete(self, run: LineRun) -> Any:
        call = _call(run)
        try:
            prepared = await self._prepare(run, call)
            self._missing.pop(call.model, None)
            return await self._run(prepared, run)
        except JobError as error:
            if error.code in LATER:
                raise
            raise call.refused(error) from None

    async def _prepare(self, run: LineRun, call: Call) -> Prepared:
        """Return the jobs of a line, always with the same ids."""
        endpoint, body, batch = run.batch.asked.endpoint, run.line.body, run.batch
        caller = Caller(batch.asked.owner, batch.asked.max_priority)
        key = f"{batch.id}\n{run.line.number}"  # no Idempotency-Key has a line break
        label = f"{batch.id} {run.line.number}/{batch.total}"
        repeatable = Repeatable(key, digest(endpoint, body, call.arguments.get("grammar")), label=label)
        _, make_answering = ENDPOINTS[endpoint]
        return await prepare(self._upstream, call, make_answering, caller, repeatable, run.line.size)

    async def _run(self, prepared: Prepared, run: LineRun) -> Any:
        """Return the answer. If the batch ends before, stop the jobs. If this gateway stops, they go on."""
        completing = asyncio.create_task(complete(prepared, run.seconds + SPARE_S, self._metrics))
        try:
            return await asyncio.shield(completing)
        except asyncio.CancelledError:
            if run.is_over():
                prepared.client.stop(prepared.requests)
            completing.cancel()
            await asyncio.gather(completing, return_exceptions=True)
            raise


def _call(run: LineRun) -> Call:
    """Return a line's call with the priority of its batch, or its own if that is lower.

    It ends with the batch's window.
    """
    read, _ = ENDPOINTS[run.batch.asked.endpoint]
    call = read(run.line.body)
    if call.stream:
        raise ApiError("stream is not supported in a batch", param="stream", code="unsupported_parameter")
    arguments = dict(call.arguments)
    own = arguments.get("priority", run.priority)
    if type(own) is int and bounds.PRIORITY.admits(own):  # anything else is refused by the client, by name
        arguments["priority"] = min(own, run.priority)
    arguments.setdefault("deadline", run.seconds + SPARE_S)
    return replace(call, arguments=arguments)
