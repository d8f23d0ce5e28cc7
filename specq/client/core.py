"""The client without its socket: broker messages in, events out, time as an argument.

    submit, cancel, abandon            jobs with a waiting caller
    submit_detached, find, list_jobs   jobs without a waiting caller, by their ids
    fetch_tokenizer, get_status, get_trace   other requests
    receive(message, now)              handles a message of the broker
    tick(now)                          repeats unanswered requests and gives up on a broker that is gone

Rules:
- The client repeats every request until it is answered. So a lost message or a restarted broker does not lose a
  request.
- A job can be submitted again under its id without harm. `have` is the number of its tokens that the client has.
- Tokens count by position. The client drops repeated tokens, and requests missing ones again.
- A request fails when it gets no answer for `timeout_s`, even if the broker sends other messages.
- A job that the broker has accepted fails when the broker is silent for `timeout_s`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from specq.client.events import (
    AwaitedModel,
    Event,
    JobAccepted,
    JobDone,
    JobPage,
    ReceivedTranscript,
    RequestFailed,
    StatusReport,
    TokenizerReady,
    TraceReport,
)
from specq.client.grammar_check import GrammarCheck
from specq.client.pending import PendingRequest, own_job, search
from specq.client.sending import OpenRequests, Stops
from specq.client.tokenizer_files import Recall, TokenizerPieces
from specq.client.tracing import JobTracing
from specq.protocol import (
    Accepted,
    Clock,
    Failed,
    FetchTokenizer,
    GetStatus,
    GetTrace,
    JobError,
    JobInfo,
    JobList,
    JobTokens,
    ListJobs,
    Message,
    ProtocolError,
    Status,
    Submit,
    TokenizerChunk,
    Tokens,
    Trace,
    newer_fields,
    report_of,
    version_spoken,
)

RETRY_S = 1.0  # first pause before a request is sent again, in seconds
RETRY_MAX_S = 4.0
GAP_RETRY_S = 0.1  # shortest time between two requests for missing tokens, in seconds
UNKNOWN = re.compile(r"unknown sampling parameter '(\w+)'")  # in the reason of a broker that is older
VERIFIER_WAIT_S = 60.0  # wait for a verifier to register, if the caller gives no other limit

# keys of requests that do not belong to a job
TOKENIZER = "tokenizer"
STATUS = "status"
LISTING = "listing"
TRACE = "trace"


class ClientCore:
    """The state of a client's requests.

    address    used in messages to the user only.
    timeout_s  silence of the broker after which its requests fail.
    recall     takes the first piece of a tokenizer and returns its files if they are cached.
    """

    def __init__(self, address: str, timeout_s: float, recall: Recall = lambda _: None) -> None:
        self.address, self.timeout_s, self._pieces = address, timeout_s, TokenizerPieces(recall)
        self._patience = min(RETRY_S, timeout_s / 4)
        self._longest_patience = min(RETRY_MAX_S, timeout_s / 3)
        self._requests = OpenRequests()
        self._grammars = GrammarCheck(address, self._requests, self._patience)
        self._stops, self.tracing = Stops(self._longest_patience), JobTracing()
        self._heard: float | None = None
        self._handlers: dict[type[Message], Callable[[Any, float], list[Event]]] = {
            Accepted: self._accepted,
            Failed: self._failed,
            JobInfo: self._info,
            JobList: self._page,
            Status: self._status,
            TokenizerChunk: self._tokenizer_piece,
            Tokens: self._tokens,
            JobTokens: self._job_tokens,
            Trace: self._trace,
            Clock: self._clock,
        }

    def take_outbox(self) -> list[Message]:
        """Return the messages to send, and clear the outbox."""
        outbox, self._requests.outbox = self._requests.outbox, []
        return outbox + self.tracing.take_outbox()

    # --- requests ---------------------------------------------------------------------------------------------------

    def submit(self, job: Submit, now: float, *, keep_running: bool = False) -> list[Event]:
        """Start a job. Its events have its id: NewTokens, and at the end JobDone or RequestFailed.

        If the client already waits for this job, the caller joins it. The return value is then what the caller missed.
        """
        request = self._requests.get(job.job_id)
        if request is not None and request.is_own:
            return request.join(job)
        self._stops.forget(job.job_id)
        self.tracing.submitted(job, now)
        request = own_job(job, self._patience, now, keep_running=keep_running)
        return self._ended(self._grammars.queue(job, request, now))

    def submit_detached(self, job: Submit, now: float) -> list[Event]:
        """Leave a job to the broker. Gives JobTaken or RequestFailed, with the job's id."""
        self._stops.forget(job.job_id)
        return self._grammars.queue(job, PendingRequest(lambda: job, self._patience), now)

    def find(self, job_id: int, now: float, *, until_end: bool) -> None:
        """Look up a job, and wait for its end if `until_end`.

        Gives FoundJob, or RequestFailed if the broker is gone.
        """
        self._requests.queue(job_id, search(job_id, self._patience, now, until_end=until_end), now)

    def list_jobs(self, limit: int, skip: int, now: float) -> None:
        """Request a page of jobs. Gives JobPage, or RequestFailed with the key LISTING."""
        self._requests.ask(LISTING, PendingRequest(lambda: ListJobs(limit=limit, skip=skip), self._patience), now)

    def cancel(self, job_id: int, now: float) -> None:
        """Stop a running job. Its result holds the tokens so far."""
        if job_id in self._requests:
            if self._requests.is_unsent(job_id) and not self._requests.is_held(job_id):
                self._requests.send_now(job_id, now)
            self._requests.outbox.append(self._stops.add(job_id, now))

    def abandon(self, key: int | str, now: float) -> None:
        """Forget a request that has no waiting caller. A job of this client stops, unless `keep_running` is set."""
        request = self._requests.get(key)
        self.tracing.ended(key)
        if request is not None and request.keep_running:
            self._requests.leave(key)
            return
        if request is not None and request.is_own and isinstance(key, int) and not self._requests.is_unsent(key):
            self.cancel(key, now)
        self._requests.forget(key)

    def abandon_all(self, now: float) -> None:
        """Forget all requests and stop the jobs of this client."""
        for key in list(self._requests):
            self.abandon(key, now)

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

    def get_trace(self, job_id: int, now: float) -> None:
        """Request the events of a job; 0 means the last job. Gives TraceReport, or RequestFailed with the key TRACE."""
        self._requests.ask(TRACE, PendingRequest(lambda: GetTrace(job_id=job_id), self._patience), now)

    # --- answers ----------------------------------------------------------------------------------------------------

    def receive(self, message: Message, now: float) -> list[Event]:
        """Handle a message; drop an answer without a waiting request."""
        self._heard = now
        self._stops.take(message)
        handle = self._handlers.get(type(message))
        events = handle(message, now) if handle else []
        self._requests.send_waiting(now)
        return events

    def _status(self, message: Status, now: float) -> list[Event]:
        """Take the broker's report: for a caller, and for the jobs that wait for what the broker can do."""
        report = report_of(message)
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
        if not isinstance(asked, GetTrace) or asked.job_id != message.job_id:
            return []
        if message.reason:
            return self._fail(TRACE, "unknown", message.reason)
        self._requests.forget(TRACE)
        return [TraceReport(TRACE, message.data.tobytes())]

    def _clock(self, message: Clock, now: float) -> list[Event]:
        self.tracing.clock(message)
        return []

    def _page(self, message: JobList, now: float) -> list[Event]:
        """Handle the page that was requested last."""
        request = self._requests.get(LISTING)
        asked = request.message() if request else None
        if not isinstance(asked, ListJobs) or asked.skip != message.skip:
            return []
        self._requests.forget(LISTING)
        return [JobPage(LISTING, message.data.tobytes())]

    def _accepted(self, message: Accepted | Tokens, now: float) -> list[Event]:
        """Note that the broker has a job. A detached job needs no further messages."""
        self._requests.answered(message.job_id, now)
        self.tracing.accepted(message.job_id, now)
        request = self._requests.get(message.job_id)
        if request is None or request.transcript is not None:
            return []
        self._requests.forget(message.job_id)
        return [JobAccepted(message.job_id)]

    def _info(self, message: JobInfo, now: float) -> list[Event]:
        """Store the description of a job that is looked up. Its tokens follow."""
        request = self._requests.get(message.job_id)
        if request is None or not request.is_search:
            return []
        self._requests.answered(message.job_id, now)
        request.take_info(message)
        if message.ended or request.until_end:
            return []
        self._requests.forget(message.job_id)
        return [request.found(message.job_id)]

    def _tokenizer_piece(self, piece: TokenizerChunk, now: float) -> list[Event]:
        request = self._requests.get(TOKENIZER)
        if request is None:
            return []
        request.sent = request.progress = now
        try:
            files = self._pieces.add(piece)
        except ProtocolError as error:
            return self._fail(TOKENIZER, "lost", f"the tokenizer of {piece.model.name}: {error}")
        if files is None:
            return []
        self._requests.forget(TOKENIZER)
        self._pieces.clear()
        return [TokenizerReady(TOKENIZER, piece.model, files)]

    def _failed(self, message: Failed, now: float) -> list[Event]:
        """End a request, unless a restarted broker only waits for verifiers."""
        key = message.job_id or (LISTING if LISTING in self._requests else TOKENIZER)
        request = self._requests.get(key)
        if request is None:
            return []
        if message.code == "no_verifier":
            if key == TOKENIZER and now < request.verifier_until:
                request.progress, request.patience = now, self._patience
                return self._waits(request, self._wanted_verifier(request), message.reason)
            if request.is_own and request.progress is not None and now < request.progress + self.timeout_s:
                return []
        return self._fail(key, message.code, self._explained(request.message(), message.reason))

    def _explained(self, asked: Message, reason: str) -> str:
        """Return the broker's reason. A broker that is too old to know the request reports only versions."""
        newer = newer_fields(asked) if version_spoken(reason) else []
        if isinstance(asked, Submit) and (found := UNKNOWN.search(reason)):
            newer = [found[1]]
        return f"the broker at {self.address} is older than {' and '.join(newer)}: {reason}" if newer else reason

    def _job_tokens(self, message: JobTokens, now: float) -> list[Event]:
        return [event for tokens in message.each() for event in self._tokens(tokens, now)]

    def _tokens(self, message: Tokens, now: float) -> list[Event]:
        request = self._requests.get(message.job_id)
        if request is None or request.transcript is None:
            return self._accepted(message, now)
        if request.is_search and request.info is None:
            return []  # the client requests it again
        self._requests.answered(message.job_id, now)
        known = request.transcript.token_ids
        tokens = message.token_ids.tolist()
        num_known = len(known) - message.base_len
        if num_known < 0 or message.base_len < 0:
            request.patience = min(request.patience, max(GAP_RETRY_S, now - request.sent))  # request it again soon
            return []
        if known[message.base_len : message.base_len + len(tokens)] != tokens[:num_known]:
            return self._fail(message.job_id, "lost", "the broker told two different stories of this job")
        return self._extend(request, message, num_known, now)

    def _extend(self, request: PendingRequest, message: Tokens, num_known: int, now: float) -> list[Event]:
        """Append the tokens after the first `num_known`, and the end if the message has it."""
        transcript, end = request.transcript, list[Event]()
        if transcript is None:
            return end
        if new := transcript.extend(message, num_known, now):
            self.tracing.received(message, now)
            request.sent, request.patience = now, self._patience
        if message.finish and message.base_len + len(message.token_ids) >= len(transcript.token_ids):
            end = self._finish(request, message, transcript, now)
        if not new:
            return end
        return [replace(new, ends=True), *end] if end else [new]

    def _finish(
        self, request: PendingRequest, message: Tokens, transcript: ReceivedTranscript, now: float
    ) -> list[Event]:
        if message.finish == "error":
            request.doomed, request.sent = True, now
            return []
        self._requests.forget(message.job_id)
        self.tracing.ended(message.job_id, len(transcript.token_ids))
        transcript.finish, transcript.stats, transcript.finished = message.finish, message.stats, now
        return [request.found(message.job_id) if request.is_search else JobDone(message.job_id, transcript)]

    def _fail(self, key: int | str, code: str, reason: str) -> list[Event]:
        """End a request with the broker's reason; for a lookup, FoundJob carries the reason."""
        request, error = self._requests[key], JobError(reason, code)
        self._requests.forget(key)
        self.tracing.ended(key)
        if request.is_search and isinstance(key, int):
            return [request.found(key, error)]
        return [RequestFailed(key, error)]

    # --- time -------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Event]:
        """Repeat requests, and end requests whose time is over."""
        doomed = [key for key, request in self._requests.items() if request.doomed and now >= request.due]
        events = [event for key in doomed for event in self._fail(key, "engine", "the job failed")]
        for request in self._requests.values():
            if now >= request.due:
                request.sent, request.patience = now, min(2 * request.patience, self._longest_patience)
                events += self._send_again(request, now)
        self.tracing.tick(now)
        self._requests.outbox += self._stops.due(now, self._requests)
        given_up = self._requests.give_up(self.address, self.timeout_s, self._heard, now)
        given_up += self._grammars.given_up(given_up)
        self._requests.send_waiting(now)
        return events + self._ended(given_up)

    def _ended(self, events: list[Event]) -> list[Event]:
        """Return events that end their requests, and end the traces of these."""
        for event in events:
            self.tracing.ended(event.key)
        return events

    def _send_again(self, request: PendingRequest, now: float) -> list[Event]:
        """Repeat a request.

        A request that waits for the first broker is already in the socket's queue. Then only `GetStatus` is added.
        """
        if self._heard is not None or now >= request.broker_until:
            self._requests.outbox.append(request.message())
            return []
        self._requests.outbox.append(GetStatus())
        return self._waits(request, f"a broker at {self.address}")

    def _wanted_verifier(self, request: PendingRequest) -> str:
        """Return the model whose verifier the tokenizer request waits for."""
        asked = request.message()
        of_model = f" of model {asked.model!r}" if isinstance(asked, FetchTokenizer) and asked.model else ""
        return f"a verifier{of_model} to register with the broker at {self.address}"

    def _waits(self, request: PendingRequest, what: str, reason: str = "") -> list[Event]:
        """Report once what the tokenizer request waits for, and again for another reason.

        The reason changes, for example, when the broker now serves other models.
        """
        if request.waits_for == (what, reason):
            return []
        request.waits_for = (what, reason)
        return [AwaitedModel(TOKENIZER, what)]

    @property
    def idle(self) -> bool:
        """Whether no request waits for an answer, so that `tick` need not run."""
        return not self._requests and not self._stops
