"""The path of a request: calls become client requests, and results or pieces become answers.

Exactly once over HTTP: a repeated request with the same `Idempotency-Key` finds its jobs again.

    Idempotency-Key   together with the name of the API key, it is the job key. Job ids and seeds follow from it
    Last-Event-ID     the position from which to resume a stream

The broker keeps the jobs, with a digest of the request in their label. It refuses the same key with another request
(`conflict`). The gateway keeps no state.

Rule: if a caller leaves, its jobs stop, unless they are repeatable.

`Upstream` is the broker behind the gateway: a client for each model, and the broker's report."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import structlog

from specq.client import PieceStream, PreparedClient, Request, ServedModel, check_values, read_requests
from specq.gateway import sse
from specq.gateway.answer_form import read_chat
from specq.gateway.answers import Answering, Head
from specq.gateway.completion_call import Call
from specq.gateway.errors import OUR_FAULT, ApiError
from specq.gateway.guard import Caller
from specq.gateway.metrics import Metrics
from specq.gateway.parts import PLAIN, PartsForm
from specq.gateway.shapes import Json
from specq.protocol import JobError
from specq.runtime import traced
from specq.text import TextCodec

KEY_HEADER, POSITION_HEADER = "idempotency-key", "last-event-id"
MAX_KEY = 255


@dataclass(frozen=True, slots=True)
class Repeatable:
    """The keys of a repeatable request; `key` "": it cannot be repeated, and its jobs end with it.

    label  begins the label of its jobs: http, or a batch and the line in it (`Submit.digest` reads it).
    """

    key: str = ""
    digest: str = ""
    event_id: str = ""
    label: str = "http"

    def options(self, caller: str, *, num_prompts: int = 0) -> dict[str, Any]:
        """Return the job options for this caller.

        `num_prompts` is the length of a list of prompts.
        """
        if not self.key:
            return {}
        label = f"{self.label} {self.digest}"
        ids = [label] * num_prompts if num_prompts else label
        return {"job_key": f"http {caller} {self.key}", "keep_running": True, "id": ids}

    def position(self, num_choices: int) -> sse.Position:
        """Return the position at which the stream begins."""
        return sse.read_position(self.event_id, num_choices) if self.event_id else sse.start(num_choices)


def read(headers: Mapping[str, str], path: str, body: Any, call: Call) -> Repeatable:
    """Read the headers.

    Raises ApiError for an unusable key, or for a position without a key or stream.
    """
    key, event_id = read_key(headers), headers.get(POSITION_HEADER, "")
    if event_id and not (key and call.stream):
        raise ApiError(
            "Last-Event-ID resumes a stream; also give stream and the Idempotency-Key of that stream",
            param="Last-Event-ID",
        )
    return Repeatable(key, digest(path, body, call.arguments.get("grammar")), event_id) if key else Repeatable()


def read_key(headers: Mapping[str, str]) -> str:
    """Return the `Idempotency-Key`; "" for none. Raises ApiError for an unusable one."""
    key = headers.get(KEY_HEADER)
    if key is not None and not (0 < len(key) <= MAX_KEY and key.isascii() and key.isprintable()):
        message = f"Idempotency-Key must have 1 to {MAX_KEY} printable ASCII characters"
        raise ApiError(message, param="Idempotency-Key")
    return key or ""


def digest(path: str, body: Any, grammar: Any = None) -> str:
    """Return a digest of a request that ignores the order of its fields, but not that of a grammar's properties."""
    content = path.encode() + b"\n" + orjson.dumps(body, option=orjson.OPT_SORT_KEYS)
    content += orjson.dumps(grammar) if grammar else b""
    return hashlib.sha256(content).hexdigest()


REPORT_S = 1.0  # a report counts as new for this time
READY_S = 2.0  # a broker that does not answer for this time counts as gone


class Upstream:
    """Clients of one broker. A model's client is created when the broker is known to serve it."""

    def __init__(self, broker: str, keys: str | Path = "", timeout_s: float = 10.0) -> None:
        self._options: dict[str, Any] = {"broker": broker, "keys": keys, "timeout_s": timeout_s, "wait_s": 0.0}
        self._clients: dict[str, PreparedClient] = {"": PreparedClient(**self._options)}
        self._retired: list[PreparedClient] = []  # of replaced models; their jobs may still run
        self._first_served: dict[str, int] = {}  # model -> when, in seconds since 1970
        self._report: tuple[float, dict[str, Any]] = (0.0, {})
        self._asking: asyncio.Task[dict[str, Any]] | None = None

    async def report(self, timeout_s: float | None = None, fresh_s: float = REPORT_S) -> dict[str, Any]:
        """Return the broker's report, not older than `fresh_s`.

        Raises JobError, or TimeoutError after `timeout_s`, if the broker does not answer.
        """
        at, report = self._report
        if at and time.monotonic() - at < fresh_s:
            return report
        if self._asking is None:  # one request for all waiting callers
            self._asking = asyncio.create_task(self._ask())
            self._asking.add_done_callback(lambda task: task.cancelled() or task.exception())
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(self._asking)

    async def _ask(self) -> dict[str, Any]:
        try:
            report = await self._clients[""].status()
            self._report = (time.monotonic(), report)
            for model in report["models"]:
                self._first_served.setdefault(model, int(time.time()))
            return report
        finally:
            self._asking = None

    async def models(self) -> list[str]:
        """Return the names of the served models."""
        return list((await self.report())["models"])

    def first_served(self, model: str) -> int:
        """Return when this gateway first saw a model served, in seconds since 1970; 0 means never."""
        return self._first_served.get(model, 0)

    async def get(self, model: str) -> tuple[PreparedClient, ServedModel]:
        """Return a model's client and the model; "" means the only one.

        Raises ApiError if it is not served.
        """
        client = self._clients.get(model)
        if client is None:
            await self._check(model)
            client = self._clients.setdefault(model, PreparedClient(model=model, **self._options))
        try:
            served = await client.served()
        except JobError as error:
            if error.code == "no_verifier" and model:
                await self._check(model)
            raise
        if not _is_served(served, await self.report()):
            client = self._replace(model)
            served = await client.served()
        return client, served

    def _replace(self, model: str) -> PreparedClient:
        """Create a new client for a name that now belongs to another model.

        The new client fetches that model's tokenizer.
        """
        self._retired.append(self._clients[model])
        self._clients[model] = PreparedClient(model=model, **self._options)
        return self._clients[model]

    async def _check(self, model: str) -> None:
        models = await self.models()
        if model not in models and models:
            message = f"the model {model[:200]!r} is not served here; served: {', '.join(models)}"
            raise ApiError(message, 404, "model", "model_not_found")
        if model not in models:
            raise JobError("no verifier is registered", "no_verifier")

    async def close(self) -> None:
        """Close the clients, and stop the jobs that cannot be requested again."""
        await asyncio.gather(*(client.close() for client in (*self._clients.values(), *self._retired)))


def _is_served(served: ServedModel, report: dict[str, Any]) -> bool:
    """Return whether a verifier still has this model with this tokenizer.

    Without any verifier at the moment, the answer is True.
    """
    targets = [worker for worker in report["workers"] if worker["role"] == "target" and "tokenizer" in worker]
    found = [(worker["model"], worker["tokenizer"]) for worker in targets]
    if served.asked:
        found = [one for one in found if one[0] == served.asked]
    return not found or (served.info.name, served.info.tokenizer_hash) in found


log = structlog.get_logger(__name__)

MakeAnswering = Callable[[TextCodec, Call], Answering]
KEEP_ALIVE_S = 15.0
THREAD_CHARACTERS = (
    4096  # longer requests, and chats, are read in a thread, so that tokens and templates do not block others
)
_SOURCES = ("prompt", "messages", "token_ids", "chat_template_kwargs")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is ready to be sent, and the form of its answer."""

    call: Call
    client: PreparedClient
    served: ServedModel
    requests: tuple[Request, ...]
    answering: Answering
    head: Head
    repeatable: Repeatable

    @property
    def num_choices(self) -> int:
        return self.call.num_prompts * self.call.n


async def prepare(
    upstream: Upstream, call: Call, make_answering: MakeAnswering, caller: Caller, repeatable: Repeatable, size: int
) -> Prepared:
    """Check a call against the model; raise ApiError or JobError.

    size  number of bytes of the call.
    """
    arguments = {**call.arguments, "tenant": caller.name}
    _check_priority(arguments.get("priority"), caller)
    try:
        client, served = await upstream.get(call.model)
    except JobError:  # errors that hold for every model come first
        check_values({name: value for name, value in arguments.items() if name not in _SOURCES})
        raise
    is_list = any(_is_list_of_prompts(arguments.get(name)) for name in ("prompt", "token_ids"))
    arguments |= repeatable.options(caller.name, num_prompts=call.num_prompts if is_list else 0)
    at_once = size < THREAD_CHARACTERS and "messages" not in arguments
    read, form = _read(arguments, served, call) if at_once else await asyncio.to_thread(_read, arguments, served, call)
    call = replace(call, form=form)
    requests = tuple(replace(request, listed=False, in_batch=False) for request in read)  # a failure ends all
    call = replace(call, prompts=requests)
    answering = make_answering(served.codec, call)
    head = _head(requests, served, answering.prefix)
    return Prepared(call, client, served, requests, answering, head, repeatable)


def _read(arguments: dict[str, Any], served: ServedModel, call: Call) -> tuple[list[Request], PartsForm]:
    if "messages" in arguments:
        return read_chat(arguments, served, call.tools, call.thinking_budget)
    return read_requests(arguments, served), PLAIN


def _is_list_of_prompts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and not isinstance(value[0], int)


def _check_priority(priority: Any, caller: Caller) -> None:
    if caller.max_priority is not None and isinstance(priority, int) and priority > caller.max_priority:
        message = f"priority is {priority}; the API key {caller.name} may claim at most {caller.max_priority}"
        raise ApiError(message, 403, "priority", "priority_not_granted")


def _head(requests: tuple[Request, ...], served: ServedModel, prefix: str) -> Head:
    number = requests[0].submits[0].job_id
    lengths = tuple(len(request.submits[0].prompt_ids) for request in requests)
    return Head(f"{prefix}{number:016x}", int(time.time()), served.info.name, served.info.fingerprint[:16], lengths)


async def complete(prepared: Prepared, total_s: float, metrics: Metrics) -> Json:
    """Return the whole answer."""
    started = time.monotonic()
    try:
        async with asyncio.timeout(total_s):
            results = await prepared.client.run(prepared.requests, prepared.served)
    except TimeoutError:
        raise _late(total_s) from None
    flat = [result for of_prompt in results for result in of_prompt]
    metrics.note_results(prepared.served.info.name, flat, time.monotonic() - started)
    return prepared.answering.whole(prepared.head, flat)


class AnswerStream:
    """The answer as events. `begin` raises failures before the first event, so that they have a status."""

    def __init__(self, prepared: Prepared, total_s: float, metrics: Metrics) -> None:
        position = prepared.repeatable.position(prepared.num_choices)
        with_ids = bool(prepared.repeatable.key)
        self._events = prepared.answering.events(prepared.head, position, with_ids=with_ids)
        self._total_s, self._started, self._refused = total_s, time.monotonic(), prepared.call.refused
        self._last = 0.0  # time of the last piece
        self._metrics, self._model = metrics, prepared.served.info.name
        self._pieces: PieceStream = prepared.client.open_stream(prepared.requests, prepared.served, position.known)
        self._first = b""

    async def begin(self) -> None:
        """Wait for the first piece, for a limited time.

        Raises JobError if the jobs are refused.
        """
        self._first = self._events.opening()
        if not self._pieces.ended:
            self._first += await self._next()
            self._metrics.note_first_token(time.monotonic() - self._started)

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the events; an error becomes an event."""
        yield self._first
        try:
            while not self._pieces.ended:
                yield await self._next()
            self._metrics.note_results(self._model, self._events.results, time.monotonic() - self._started)
            yield self._events.closing()
        except JobError as error:
            yield self._events.failed(self._refused(error))
        except ApiError as error:
            yield self._events.failed(error)
        except Exception as error:  # noqa: BLE001 - one request's fault is nobody else's
            log.error("stream_failed", **traced(error))  # noqa: TRY400 - `traced`: the message may quote a user
            yield self._events.failed(ApiError(OUR_FAULT, 500))

    async def _next(self) -> bytes:
        """Return the events of the next piece, or a sign of life after a long pause."""
        left = self._started + self._total_s - time.monotonic()
        if left <= 0:
            raise _late(self._total_s)
        try:
            async with asyncio.timeout(min(KEEP_ALIVE_S, left)):
                piece = await self._pieces.piece()
        except TimeoutError:
            return self._events.keep_alive
        now = time.monotonic()
        if self._last and piece.token_ids:
            self._metrics.note_event(self._model, now - self._last)
        self._last = now
        return self._events.take(piece)

    def close(self) -> None:
        """Leave the jobs; they stop unless they are repeatable."""
        self._pieces.close()


def _late(total_s: float) -> ApiError:
    return ApiError(f"the request took longer than {total_s:g} s", 504, code="timeout")
