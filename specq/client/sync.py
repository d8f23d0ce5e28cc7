"""The client for ordinary code: calls block until there is something to return.

    with specq.Client("tcp://127.0.0.1:5750") as client:
        print(client.generate("def add(a, b):", max_tokens=64).text)
        for piece in client.stream(messages=[{"role": "user", "content": "Why is the sky blue?"}]):
            print(piece.text, end="")

A client may be used by several threads at once.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, overload

from specq.client.core import STATUS
from specq.client.events import Event, RequestFailed, StatusReport, Waiting
from specq.client.job import Completions, Connection
from specq.client.request import Request, Served, is_batch, read_request, read_requests
from specq.client.result import Piece, Result
from specq.config import DEFAULT_BROKER
from specq.config import cache_dir as default_cache_dir
from specq.protocol import JobError, ModelInfo
from specq.transport import CLIENT_ROLES, curve_to_broker

POLL_S = 0.1


class Job:
    """A prompt that was submitted; it is worked on whether or not somebody waits for it, until the client is closed."""

    def __init__(self, client: Client, connection: Connection, request: Request) -> None:
        self.id = request.id
        self._client = client  # a client that nobody holds any more closes
        self._connection, self._request = connection, request
        self._completions, self._ended = Completions(request, client.served), threading.Event()
        connection.submit(request, self._hear)

    def _hear(self, event: Event) -> None:
        self._completions.take(event)
        if self._completions.ended:
            self._ended.set()

    def result(self, timeout_s: float | None = None) -> Result:
        """Wait for the end and return the only completion, or the first of several; errors as of `results`."""
        return self.results(timeout_s)[0]

    def results(self, timeout_s: float | None = None) -> list[Result]:
        """Wait for the end of all completions and return them in order.

        Raises TimeoutError if one runs on after `timeout_s`, and JobError if a job without `n` failed; with `n`, the
        result of a completion that failed has `error`.
        """
        if not self._ended.wait(timeout_s):
            raise TimeoutError(f"job {self.id} runs on after {timeout_s} s")
        return self._completions.results()

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def cancel(self) -> None:
        """Stop all completions; each result is what it has by then, with the finish reason "cancelled"."""
        self._connection.cancel(self._request)


class Client:
    """A connection to a broker.

    broker     address of the broker
    model      name of a served model; "": the only one
    timeout_s  silence of the broker after which a call fails with JobError (code `no_broker`, or `lost` if it had
               answered before)
    wait_s     how long the first call waits for a broker to answer and a verifier of the model to register; None: for a
               broker `timeout_s`, for a verifier 60 s
    on_wait    called with what is waited for, when it comes to that
    cache_dir  where large tokenizers are kept; None: SPECQ_CACHE, or specq in the user's cache
    keys       directory of CURVE keys, or DIRECTORY/NAME (`specq.transport.keys`); "": none, as the broker must have none then

    Every method raises JobError; its `code` and message say why. Closing the client, also by leaving its block, stops all
    of its jobs that still run.
    """

    def __init__(
        self,
        broker: str = DEFAULT_BROKER,
        *,
        model: str = "",
        timeout_s: float = 10.0,
        cache_dir: Path | None = None,
        keys: str | Path = "",
        wait_s: float | None = None,
        on_wait: Callable[[str], object] | None = None,
    ) -> None:
        curve = curve_to_broker(str(keys), *CLIENT_ROLES)
        self._connection = Connection(broker, model, timeout_s, cache_dir or default_cache_dir(), curve, wait_s)
        self._on_wait = on_wait or bool
        self._lock = threading.Lock()
        self._close = weakref.finalize(self, self._connection.link.close)

    # --- completions ------------------------------------------------------------------------------------------------

    @overload
    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: list[dict[str, Any]] | None = None,
        token_ids: list[int] | None = None,
        n: None = None,
        **params: Any,
    ) -> Result: ...
    @overload
    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: list[dict[str, Any]] | None = None,
        token_ids: list[int] | None = None,
        n: int,
        **params: Any,
    ) -> list[Result]: ...
    @overload
    def generate(self, prompt: list[str], *, n: None = None, **params: Any) -> list[Result]: ...
    @overload
    def generate(self, prompt: list[str], *, n: int, **params: Any) -> list[list[Result]]: ...
    @overload
    def generate(self, prompt: Any = None, *, n: int | None = None, **params: Any) -> Any: ...

    def generate(
        self,
        prompt: str | list[str] | None = None,
        *,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]] | None = None,
        token_ids: list[int] | list[list[int]] | None = None,
        n: int | None = None,
        **params: Any,
    ) -> Any:
        """Complete a prompt, a chat or token ids; or several in a list, all at once.

        n       so many completions of each prompt, in a list. None: one, as it is
        params  `id` (of several prompts a list), `bad_words`, and fields of `SamplingParams` and `Speculation`

        Returns a `Result`; for several prompts a list of what each gives, in order. A single one that fails raises
        JobError. In a list, it has `error` instead and harms no other; JobError is raised only for what is wrong with the
        arguments, before anything is sent, or if the broker is gone, and then all are stopped.
        """
        arguments = {"prompt": prompt, "messages": messages, "token_ids": token_ids, "n": n, **params}
        if is_batch(arguments):
            return self._generate_batch(arguments)
        request = self._prepare(**arguments)
        try:
            results = Job(self, self._connection, request).results()
        except KeyboardInterrupt:
            self._connection.abandon(request)
            raise
        return results[0] if n is None else results

    def _generate_batch(self, arguments: dict[str, Any]) -> list[Any]:
        requests = read_requests(arguments, self.served, self._connection.model)
        try:
            jobs = [Job(self, self._connection, request) for request in requests]
            return [job.results() if arguments["n"] is not None else job.result() for job in jobs]
        except BaseException:
            for request in requests:
                self._connection.abandon(request)
            raise

    def submit(
        self,
        prompt: str | None = None,
        *,
        messages: list[dict[str, Any]] | None = None,
        token_ids: list[int] | None = None,
        **params: Any,
    ) -> Job:
        """Start what `generate` does and return at once."""
        request = self._prepare(prompt=prompt, messages=messages, token_ids=token_ids, **params)
        return Job(self, self._connection, request)

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: list[dict[str, Any]] | None = None,
        token_ids: list[int] | None = None,
        **params: Any,
    ) -> Iterator[Piece]:
        """Yield what `generate` completes as it comes; the last piece of each completion has its result.

        Pieces of several completions come as they are made, each with its `index`. Closing early stops the jobs.
        """
        request = self._prepare(prompt=prompt, messages=messages, token_ids=token_ids, **params)
        return self._pieces(request)

    def _pieces(self, request: Request) -> Iterator[Piece]:
        completions, events = Completions(request, self.served), SimpleQueue[Event]()
        self._connection.submit(request, events.put)
        try:
            while not completions.ended:
                yield completions.piece(events.get())
        finally:
            if not completions.ended:
                self._connection.abandon(request)

    def _prepare(self, **arguments: Any) -> Request:
        return read_request(arguments, self.served, self._connection.model)

    # --- the broker -------------------------------------------------------------------------------------------------

    @property
    def served(self) -> Served:
        """The model and its tokenizer, fetched when first needed."""
        with self._lock:
            if self._connection.served is None:
                events: SimpleQueue[Event] = SimpleQueue()
                self._connection.fetch_tokenizer(events.put)
                while isinstance(event := events.get(), Waiting):
                    self._on_wait(event.what)
                self._connection.take_tokenizer(event)
            assert self._connection.served is not None
            return self._connection.served

    @property
    def model(self) -> ModelInfo:
        """What is known of the model that is served."""
        return self.served.info

    def status(self) -> dict[str, Any]:
        """Return the broker's report: models, workers, jobs, counters."""
        events: SimpleQueue[Event] = SimpleQueue()
        self._connection.link.request(STATUS, events.put, lambda core, now: core.get_status(now))
        event = events.get()
        if isinstance(event, RequestFailed):
            raise event.error
        assert isinstance(event, StatusReport)
        return event.report

    def wait_until_ready(self, *, num_targets: int = 1, num_drafters: int = 0, timeout_s: float = 60.0) -> None:
        """Wait until so many workers are ready; raises JobError (`no_broker`, `no_verifier`) after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while missing := missing_workers(self.status(), num_targets, num_drafters):
            if time.monotonic() > deadline:
                raise JobError(f"after {timeout_s:g} s only {missing} are ready", "no_verifier")
            time.sleep(POLL_S)

    def leave(self) -> None:
        """Close the connection, but let jobs run on: submitted again under its id, each is the job that there is."""
        self._connection.link.leave()

    def close(self) -> None:
        """Close the connection; jobs that run are stopped, waiting calls fail."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def count_ready(report: dict[str, Any]) -> tuple[int, int]:
    """Return how many targets and drafters a status report calls ready."""
    roles = [worker.get("role") for worker in report.get("workers", []) if worker.get("state") == "ready"]
    return roles.count("target"), roles.count("draft")


def missing_workers(report: dict[str, Any], num_targets: int, num_drafters: int) -> str:
    """Return how many of so many workers a status report calls ready; "" if all are."""
    targets, drafters = count_ready(report)
    if targets >= num_targets and drafters >= num_drafters:
        return ""
    return f"{targets} of {num_targets} targets and {drafters} of {num_drafters} drafters"
