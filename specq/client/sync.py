"""The client for ordinary code: calls block until their result is ready.

    with specq.Client("tcp://127.0.0.1:5750") as client:
        print(client.generate("def add(a, b):", max_tokens=64).text)
        for piece in client.stream(messages=[{"role": "user", "content": "Why is the sky blue?"}]):
            print(piece.text, end="")

Several threads may use one client at once. `specq.client.base` implements the calls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, overload

from specq.client.base import BaseClient, BaseJob, run
from specq.client.events import Event
from specq.client.request import Request, ServedModel
from specq.client.result import Piece, Result
from specq.protocol import ModelInfo


class _Inbox:
    """The events of a request, read by a blocking thread."""

    def __init__(self) -> None:
        self._events = SimpleQueue[Event]()
        self.put = self._events.put

    async def get(self) -> Event:
        return self._events.get()


class _ThreadLock:
    """A lock between threads, for a coroutine that blocks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    async def __aenter__(self) -> None:
        self._lock.acquire()

    async def __aexit__(self, *error: object) -> None:
        self._lock.release()


class Job(BaseJob):
    """A submitted prompt. It runs, awaited or not, until the client is closed."""

    def __init__(self, client: Client, request: Request, served: ServedModel) -> None:
        self._ended = threading.Event()
        super().__init__(client, request, served, self._ended)

    def result(self, timeout_s: float | None = None) -> Result:
        """Wait for the end and return the only completion, or the first of several.

        Raises the errors of `results`.
        """
        return self.results(timeout_s)[0]

    def results(self, timeout_s: float | None = None) -> list[Result]:
        """Wait for the end of all completions and return them in order.

        Raises TimeoutError if one still runs after `timeout_s` seconds. Raises JobError if a job without `n` failed.
        With `n`, the result of a failed completion has `error`.
        """
        if not self._ended.wait(timeout_s):
            raise TimeoutError(f"job {self.id} is still running after {timeout_s} s")
        return self._completions.results()


class Client(BaseClient):
    """A connection to a broker.

        with specq.Client("tcp://127.0.0.1:5750") as client:
            print(client.generate("def add(a, b):", max_tokens=64).text)

    Parameters:

    broker     address of the broker. Or the addresses of several brokers of one journal, separated by commas: the jobs
               go on when one of them dies.
    model      name of a served model; "" means the only one.
    timeout_s  silence of the broker, in seconds, after which a call raises JobError. The code is `no_broker`, or `lost`
               if the broker had answered before.
    wait_s     how many seconds the first call waits for a broker to answer and a verifier of the model to register.
               None: `timeout_s` for a broker, 60 s for a verifier.
    on_wait    called with the name of what is missing, when the first call has to wait.
    cache_dir  directory for large tokenizers. None: SPECQ_CACHE, or specq in the user's cache.
    keys       directory of CURVE keys, or DIRECTORY/NAME (`specq.transport.keys`). "": no keys, for a broker without
               keys.

    Raises: every method raises JobError, with `code` and a message that gives the reason.

    Closing the client, or leaving its `with` block, stops all of its running jobs.
    """

    _lock_type = _ThreadLock  # one of several threads fetches the tokenizer, the others wait

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
        """Complete a prompt, a chat or token ids; or a list, all at once.

        Parameters:

        n       number of completions of each prompt, returned as a list. None: one completion, not in a list.
        params  `id` (for several prompts a list), `bad_words`, and fields of `SamplingParams` and `Speculation`.

        Returns a `Result`; for several prompts a list with the answer to each, in order.

        Raises JobError if a single prompt fails. In a list, the result of a failed prompt has `error`. Wrong arguments
        raise JobError before anything is sent. If the broker is gone, the call raises JobError and stops all its jobs.
        """
        arguments = {"prompt": prompt, "messages": messages, "token_ids": token_ids, "n": n, **params}
        return run(self._generate(arguments))

    def submit(
        self,
        prompt: str | None = None,
        *,
        messages: list[dict[str, Any]] | None = None,
        token_ids: list[int] | None = None,
        **params: Any,
    ) -> Job:
        """Start the work of `generate` and return at once."""
        job: Job = run(self._submit({"prompt": prompt, "messages": messages, "token_ids": token_ids, **params}))
        return job

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: list[dict[str, Any]] | None = None,
        token_ids: list[int] | None = None,
        resume_from: Sequence[int] = (),
        **params: Any,
    ) -> Iterator[Piece]:
        """Yield the completion piece by piece; the last piece of each completion has its result.

        Pieces of several completions arrive as they are made, each with its `index`. With several prompts, each piece
        has the `place` of its prompt. Closing the iterator early stops the jobs.

        resume_from  number of tokens of each completion, in order, that the caller has already; their text is not
                     yielded.
        """
        arguments = {"prompt": prompt, "messages": messages, "token_ids": token_ids, **params}
        return self._pieces(*run(self._read_all(arguments)), resume_from)

    def _pieces(self, requests: list[Request], served: ServedModel, known: Sequence[int]) -> Iterator[Piece]:
        stream = self._open_stream(requests, served, known)
        try:
            while not stream.ended:
                yield run(stream.piece())
        finally:
            stream.close()

    # --- the broker -------------------------------------------------------------------------------------------------

    @property
    def served(self) -> ServedModel:
        """The model and its tokenizer, fetched when first needed."""
        return run(self._get_served())

    @property
    def model(self) -> ModelInfo:
        """The name and the limits of the served model."""
        return self.served.info

    def status(self, *, sessions: int = 0) -> dict[str, Any]:
        """Return the broker's report: models, workers, jobs, counters, and the `sessions` busiest sessions."""
        return run(self._get_status(sessions))

    def trace(self, job_id: int = 0) -> dict[str, Any]:
        """Return the events of a job in all processes; 0 means the last job. See docs/live_view.md."""
        return run(self._get_trace(job_id))

    def wait_until_ready(self, *, num_targets: int = 1, num_drafters: int = 0, timeout_s: float = 60.0) -> None:
        """Wait until this many workers are ready.

        Raises JobError (`no_broker`, `no_verifier`) after `timeout_s` seconds.
        """
        run(self._wait_until_ready(num_targets, num_drafters, timeout_s))

    def leave(self) -> None:
        """Close the connection, but let jobs run.

        A later submission with the same job id joins the running job.
        """
        self._connection.link.leave()

    def close(self) -> None:
        """Close the connection. Running jobs stop and waiting calls fail."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- how it waits -----------------------------------------------------------------------------------------------

    def _inbox(self) -> _Inbox:
        return _Inbox()

    def _job(self, request: Request, served: ServedModel) -> Job:
        return Job(self, request, served)

    async def _results(self, job: Job) -> list[Result]:
        return job.results()

    async def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - no event loop runs this
