"""Requests of the client's core that belong to no job of its own: the tokenizer, the broker's report, lists, traces.

`Inquiries` also holds the state that they share with requests for jobs, which are in `specq.client.core`.
"""

from __future__ import annotations

from specq.client.brokers import KnownBrokers
from specq.client.events import AwaitedModel, Event, JobPage, RequestFailed, StatusReport, TokenizerReady, TraceReport
from specq.client.grammar_check import CAPABILITIES, GrammarCheck
from specq.client.pending import PendingRequest
from specq.client.sending import OpenRequests
from specq.client.tokenizer_files import Recall, TokenizerPieces
from specq.client.tracing import JobTracing
from specq.protocol import (
    FetchTokenizer,
    GetStatus,
    GetTrace,
    JobError,
    JobList,
    ListJobs,
    ProtocolError,
    Status,
    TokenizerChunk,
    Trace,
    report_of,
    split_addresses,
)

RETRY_S = 1.0  # first pause before a request is sent again, in seconds
RETRY_MAX_S = 4.0
VERIFIER_WAIT_S = 60.0  # wait for a verifier to register, if the caller gives no other limit

# keys of requests that do not belong to a job
TOKENIZER = "tokenizer"
STATUS = "status"
LISTING = "listing"
TRACE = "trace"


class Inquiries:
    """The open requests, and the calls for requests that belong to no job. The parameters are those of `ClientCore`."""

    def __init__(self, address: str, timeout_s: float, recall: Recall) -> None:
        self.timeout_s, self._recall = timeout_s, recall
        self._pieces: dict[str, TokenizerPieces] = {}  # by broker
        self._patience = min(RETRY_S, timeout_s / 4)
        self._longest_patience = min(RETRY_MAX_S, timeout_s / 3)
        self.brokers = KnownBrokers(split_addresses(address), self._patience)
        self._sender = self.brokers.current  # of the message that is handled
        self._requests = OpenRequests(self.brokers, self._patience, self._longest_patience)
        self._grammars = GrammarCheck(self.brokers, self._requests, self._patience)
        self.tracing = JobTracing(self.brokers)

    def fetch_tokenizer(self, model: str, now: float, wait_s: float | None = None) -> None:
        """Request the tokenizer of a model; "" means the only model.

        wait_s  how long to wait for a broker to answer and for a verifier of the model to register. An event
                `AwaitedModel` reports such a wait. None: `timeout_s` for a broker, VERIFIER_WAIT_S for a verifier.
        """
        self._pieces.clear()
        request = PendingRequest(lambda: FetchTokenizer(model=model), self._patience)
        request.broker_until = now + (wait_s or 0.0)
        request.verifier_until = now + (VERIFIER_WAIT_S if wait_s is None else wait_s)
        self._requests.ask(TOKENIZER, request, now)

    def get_status(self, now: float, num_sessions: int = 0) -> None:
        """Request the broker's state, with the `num_sessions` busiest sessions."""
        self._requests.ask(STATUS, PendingRequest(lambda: GetStatus(sessions=num_sessions), self._patience), now)

    def list_jobs(self, limit: int, skip: int, now: float) -> None:
        """Request a page of jobs. Gives JobPage, or RequestFailed with the key LISTING."""
        self._requests.ask(LISTING, PendingRequest(lambda: ListJobs(limit=limit, skip=skip), self._patience), now)

    def get_trace(self, job_id: int, now: float) -> None:
        """Request the events of a job; 0 means the last job. Gives TraceReport, or RequestFailed with the key TRACE."""
        request = PendingRequest(lambda: GetTrace(job_id=job_id), self._patience)
        self._requests.ask(TRACE, request, now, self.brokers.place(job_id))

    # --- answers ----------------------------------------------------------------------------------------------------

    def _status(self, message: Status, now: float) -> list[Event]:
        """Take the broker's report: for a caller, and for the jobs that wait for what the broker can do."""
        report, events = report_of(message), list[Event]()
        if self._sender in (self.brokers.current, self.brokers.place(CAPABILITIES)):
            events = self._ended(self._grammars.answered(report, now))
        request = self._requests.get(STATUS)
        asked = request.message() if request else None
        if isinstance(asked, GetStatus) and (not asked.sessions or "sessions" in report):
            self._requests.forget(STATUS)
            events.append(StatusReport(STATUS, report))
        return events

    def _trace(self, message: Trace, now: float) -> list[Event]:
        """Handle the trace that was requested last."""
        request = self._requests.get(TRACE)
        asked = request.message() if request else None
        if request is None or not isinstance(asked, GetTrace) or asked.job_id != message.job_id:
            return []
        if message.reason:
            is_over = self._is_asked(TRACE) and not self._requests.try_another(TRACE, request, self._sender, now)
            return self._fail(TRACE, "unknown", message.reason) if is_over else []
        self._requests.forget(TRACE)
        return [TraceReport(TRACE, message.data.tobytes())]

    def _page(self, message: JobList, now: float) -> list[Event]:
        """Handle the page that was requested last."""
        request = self._requests.get(LISTING)
        asked = request.message() if request else None
        if not isinstance(asked, ListJobs) or asked.skip != message.skip:
            return []
        self._requests.forget(LISTING)
        return [JobPage(LISTING, message.data.tobytes())]

    def _tokenizer_piece(self, piece: TokenizerChunk, now: float) -> list[Event]:
        request = self._requests.get(TOKENIZER)
        if request is None:
            return []
        request.sent = request.progress = now
        try:
            files = self._pieces.setdefault(self._sender, TokenizerPieces(self._recall)).add(piece)
        except ProtocolError as error:
            return self._fail(TOKENIZER, "lost", f"the tokenizer of {piece.model.name}: {error}")
        if files is None:
            return []
        self._requests.served(request, self._sender)
        self._requests.forget(TOKENIZER)
        self._pieces.clear()
        return [TokenizerReady(TOKENIZER, piece.model, files)]

    def _fail(self, key: int | str, code: str, reason: str) -> list[Event]:
        """End a request with the broker's reason; for a lookup, FoundJob carries the reason."""
        request, error = self._requests[key], JobError(reason, code)
        self._requests.forget(key)
        self.tracing.ended(key)
        if request.is_search and isinstance(key, int):
            return [request.found(key, error)]
        return [RequestFailed(key, error)]

    def _ended(self, events: list[Event]) -> list[Event]:
        """Return events that end their requests, and end the traces of these."""
        for event in events:
            self.tracing.ended(event.key)
        return events

    def _is_asked(self, key: int | str) -> bool:
        """Return whether the sender is the broker to which this request was sent last."""
        return not self.brokers.several or self._sender == self.brokers.place(key)

    # --- time -------------------------------------------------------------------------------------------------------

    def _send_again(self, key: int | str, request: PendingRequest, now: float) -> list[Event]:
        """Repeat a request.

        A request that waits for the first broker is already in the socket's queue. Then only `GetStatus` is added.
        """
        if self.brokers.heard is not None or now >= request.broker_until:
            self._requests.send(key, request, now)
            return []
        is_queued = self.brokers.place(key) in request.queued_at
        self._requests.send(key, request, now, GetStatus() if is_queued else None)
        return self._waits(request, f"a broker at {self.brokers.names}")

    def _waits(self, request: PendingRequest, what: str, reason: str = "") -> list[Event]:
        """Report once what the tokenizer request waits for, and again for another reason.

        The reason changes, for example, when the broker now serves other models.
        """
        if request.waits_for == (what, reason):
            return []
        request.waits_for = (what, reason)
        return [AwaitedModel(TOKENIZER, what)]

    def _wanted_verifier(self, request: PendingRequest) -> str:
        """Return the model whose verifier the tokenizer request waits for."""
        asked = request.message()
        of_model = f" of model {asked.model!r}" if isinstance(asked, FetchTokenizer) and asked.model else ""
        return f"a verifier{of_model} to register with the broker at {self.brokers.names}"
