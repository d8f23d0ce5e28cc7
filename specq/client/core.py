"""The client without its sockets: brokers' messages in, events out, time as an argument.

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
- Of several brokers, `KnownBrokers` says which gets a message. Their answers may come twice, or from a former holder of
  the job: tokens count by position, and `Failed` counts if no other broker has the job.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from specq.client.events import (
    Event,
    JobAccepted,
    JobDone,
    ReceivedTranscript,
)
from specq.client.inquiries import LISTING, TOKENIZER, TRACE, Inquiries
from specq.client.pending import PendingRequest, own_job, search
from specq.client.sending import Stops
from specq.client.tokenizer_files import Recall
from specq.protocol import (
    Accepted,
    Cancel,
    Clock,
    Failed,
    GetStatus,
    GetTrace,
    JobInfo,
    JobList,
    JobTokens,
    Message,
    Moved,
    Status,
    Submit,
    TokenizerChunk,
    Tokens,
    Trace,
    newer_fields,
    version_spoken,
)

GAP_RETRY_S = 0.1  # shortest time between two requests for missing tokens, in seconds
UNKNOWN = re.compile(r"unknown sampling parameter '(\w+)'")  # in the reason of a broker that is older
NOT_NOW = ("busy", "no_verifier")  # refusals that another broker may not share


class ClientCore(Inquiries):
    """The state of a client's requests.

    address    of the broker, or several of one journal, separated by commas; the first is tried first.
    timeout_s  silence of the broker after which its requests fail.
    recall     takes the first piece of a tokenizer and returns its files if they are cached.
    """

    def __init__(self, address: str, timeout_s: float, recall: Recall = lambda _: None) -> None:
        super().__init__(address, timeout_s, recall)
        self._stops = Stops(self._longest_patience)
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
            Moved: self._moved,
        }

    def take_addressed(self) -> list[tuple[str, Message]]:
        """Return the messages to send, each with the address of its broker, and clear the outbox."""
        outbox, self._requests.outbox = self._requests.outbox, []
        return outbox + self.tracing.take_outbox()

    def take_outbox(self) -> list[Message]:
        """Return the messages to send if there is one broker, and clear the outbox."""
        return [message for _, message in self.take_addressed()]

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

    def cancel(self, job_id: int, now: float) -> None:
        """Stop a job, also one that another client left running. Its result holds the tokens so far."""
        if self._requests.is_unsent(job_id) and not self._requests.is_held(job_id):
            self._requests.send_now(job_id, now)
        self._requests.outbox.append((self.brokers.place(job_id), self._stops.add(job_id, now)))

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

    # --- answers ----------------------------------------------------------------------------------------------------

    def receive(self, message: Message, now: float, sender: str = "") -> list[Event]:
        """Handle a message of the broker at the address `sender`; drop an answer without a waiting request."""
        self._sender = sender or self.brokers.current
        self.brokers.note_heard(self._sender, now)
        if not (isinstance(message, Failed) and self.brokers.several) or self._ends(message):
            self._stops.take(message)
        handle = self._handlers.get(type(message))
        events = handle(message, now) if handle else []
        self._requests.send_waiting(now)
        return events

    def _clock(self, message: Clock, now: float) -> list[Event]:
        self.tracing.clock(message, self._sender)
        return []

    def _moved(self, message: Moved, now: float) -> list[Event]:
        """Send the requests for a job to the broker that has it."""
        job_id, address, requests = message.job_id, message.address, self._requests
        trace = requests.get(TRACE)
        keys = [job_id] if job_id in requests and not requests.is_unsent(job_id) else list[int | str]()
        keys += [TRACE] if trace is not None and trace.message() == GetTrace(job_id=job_id) else []
        if not (keys or job_id in self._stops) or not self.brokers.learn(address):
            return []
        is_new = address != self.brokers.place(job_id)
        self.brokers.put(job_id, address)
        for key in keys:
            requests.move(key, requests[key], address, now)
        if is_new and self._stops.follows(job_id):
            requests.outbox.append((address, Cancel(job_id=job_id)))
        return []

    def _accepted(self, message: Accepted | Tokens, now: float) -> list[Event]:
        """Note that the broker has a job. A detached job needs no further messages."""
        self._requests.answered(message.job_id, now, self._sender)
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
        self._requests.answered(message.job_id, now, self._sender)
        request.take_info(message)
        if message.ended or request.until_end:
            return []
        self._requests.forget(message.job_id)
        return [request.found(message.job_id)]

    def _failed(self, message: Failed, now: float) -> list[Event]:
        """End a request, unless another broker may take it, or a restarted broker only waits for verifiers."""
        key = message.job_id or (LISTING if LISTING in self._requests else TOKENIZER)
        request = self._requests.get(key)
        if request is None or not self._counts(key, message.code):
            return []
        if message.code in NOT_NOW and self._requests.try_another(key, request, self._sender, now):
            return []
        progress = request.progress  # None: no broker has taken the job
        if message.code == "no_verifier":
            if key == TOKENIZER and now < request.verifier_until:
                request.progress, request.patience = now, self._patience
                return self._waits(request, self._wanted_verifier(request), message.reason)
            if request.is_own and progress is not None and now < progress + self.timeout_s:
                return []
        if message.code == "busy" and self._may_be_away(request, now):
            return []
        return self._fail(key, message.code, self._explained(request.message(), message.reason))

    def _may_be_away(self, request: PendingRequest, now: float) -> bool:
        """Return whether a broker that is busy may only lack its journal for now, so that the request is sent again."""
        if request.transcript is None:
            return False
        if request.progress is None:  # the first look at a job
            return request.is_search and now < request.started + self.timeout_s - self._patience
        if self.brokers.several:
            request.progress = now  # another broker cannot look up the job now, for as long as the journal is away
        return self.brokers.several

    def _explained(self, asked: Message, reason: str) -> str:
        """Return the broker's reason. A broker that is too old to know the request reports only versions."""
        newer = newer_fields(asked) if version_spoken(reason) else []
        if isinstance(asked, Submit) and (found := UNKNOWN.search(reason)):
            newer = [found[1]]
        return f"the broker at {self._sender} is older than {' and '.join(newer)}: {reason}" if newer else reason

    def _job_tokens(self, message: JobTokens, now: float) -> list[Event]:
        return [event for tokens in message.each() for event in self._tokens(tokens, now)]

    def _tokens(self, message: Tokens, now: float) -> list[Event]:
        request = self._requests.get(message.job_id)
        if request is None or request.transcript is None:
            return self._accepted(message, now)
        if request.is_search and request.info is None:
            return []  # the client requests it again
        self._requests.answered(message.job_id, now, self._sender)
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

    def _counts(self, key: int | str, code: str) -> bool:
        """Return whether a refusal of the sender counts.

        One of a broker that is not asked any more counts if no broker has the job: it may have been slow.
        """
        request = self._requests.get(key)
        is_open = request is not None and not request.holder and request.moved is None
        return self._is_asked(key) or (is_open and code not in NOT_NOW)

    def _ends(self, message: Failed) -> bool:
        """Return whether a refusal of one of several brokers ends a job."""
        return message.code not in NOT_NOW and self._counts(message.job_id, message.code)

    # --- time -------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Event]:
        """Repeat requests, and end requests whose time is over."""
        doomed = [key for key, request in self._requests.items() if request.doomed and now >= request.due]
        events = [event for key in doomed for event in self._fail(key, "engine", "the job failed")]
        for key, request in self._requests.due(now):
            events += self._send_again(key, request, now)
        if (first := self.brokers.to_look_at(now)) is not None:
            self._requests.outbox.append((first, GetStatus()))
        self.tracing.tick(now)
        self._cancel_again(now)
        given_up = self._requests.give_up(self.timeout_s, now)
        given_up += self._grammars.given_up(given_up)
        self._requests.send_waiting(now)
        return events + self._ended(given_up)

    def _cancel_again(self, now: float) -> None:
        """Repeat each `Cancel` that is due: to the broker that has the job, and to another one if there is one."""
        for cancel in self._stops.due(now, self._requests):
            place = self.brokers.place(cancel.job_id)
            other = self.brokers.other(place, self.brokers.silent(now))
            self._requests.outbox += [(address, cancel) for address in (place, other) if address]

    @property
    def idle(self) -> bool:
        """Whether no request waits for an answer, so that `tick` need not run."""
        return not self._requests and not self._stops
