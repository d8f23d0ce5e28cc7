"""The client without its socket: messages of the broker in, events out, time as an argument.

    submit, cancel, fetch_tokenizer, get_status    requests of the user
    receive(message, now)                          what the broker sent
    tick(now)                                      sends again what got no answer, gives up on a broker that is gone

Rules: every request is repeated until it is answered, so that nothing is lost with a message or a broker; submitting a
job again under its id is harmless, and `have` tells the broker what need not be sent again. Tokens count by position:
what comes twice is dropped, what comes too early is asked for again. A request is given up when nothing has come in answer
to it for `timeout_s`, whatever else the broker says; a job that the broker has taken, when the broker is silent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from specq.client.events import (
    Event,
    JobDone,
    NewTokens,
    RequestFailed,
    StatusReport,
    TokenizerReady,
    Transcript,
    Waiting,
)
from specq.client.pending import Pending, Turns
from specq.client.stops import Stops
from specq.protocol import (
    Accepted,
    Failed,
    FetchTokenizer,
    GetStatus,
    JobError,
    LogprobRecord,
    Message,
    ProtocolError,
    Status,
    Submit,
    TokenizerChunk,
    Tokens,
)
from specq.text import join_chunks

RETRY_S = 1.0  # silence after which a request is sent again, at first
RETRY_MAX_S = 4.0
GAP_RETRY_S = 0.1  # least time between two requests for tokens that went missing

VERIFIER_WAIT_S = 60.0  # for a verifier to register, where nothing else is said

TOKENIZER = "tokenizer"
STATUS = "status"


Recall = Callable[[TokenizerChunk], dict[str, str] | None]


class ClientCore:
    """All that a client knows.

    address    only for messages to the user
    timeout_s  silence of the broker after which its requests are given up
    recall     returns a tokenizer's files if they are known from before, given its first piece
    """

    def __init__(self, address: str, timeout_s: float, recall: Recall = lambda _: None) -> None:
        self.address, self.timeout_s, self._recall = address, timeout_s, recall
        self._pieces: dict[int, TokenizerChunk] = {}
        self._patience = min(RETRY_S, timeout_s / 4)
        self._longest_patience = min(RETRY_MAX_S, timeout_s / 3)
        self._requests: dict[int | str, Pending] = {}
        self._turns = Turns()
        self._stops = Stops(self._longest_patience)
        self._outbox: list[Message] = []
        self._heard: float | None = None

    def take_outbox(self) -> list[Message]:
        """Return what is to be sent, and forget it."""
        outbox, self._outbox = self._outbox, []
        return outbox

    # --- requests ---------------------------------------------------------------------------------------------------

    def submit(self, job: Submit, now: float) -> None:
        """Start a job; NewTokens and JobDone or RequestFailed will bear its id."""
        transcript = Transcript(now, logprobs=LogprobRecord(job.params.logprobs))

        def message() -> Submit:
            return replace(job, have=len(transcript.token_ids))

        self._requests[job.job_id] = Pending(message, self._patience, transcript=transcript)
        self._turns.add(job.job_id)
        self._stops.forget(job.job_id)
        self._send_waiting(now)

    def cancel(self, job_id: int, now: float) -> None:
        """Stop a job that still runs; it ends with what it has."""
        if job_id in self._requests:
            if job_id in self._turns:
                self._send_job(job_id, now)
            self._outbox.append(self._stops.add(job_id, now))

    def abandon(self, key: int | str, now: float) -> None:
        """Forget a request: nobody listens to its answer any more; a job that the broker may know is stopped."""
        if isinstance(key, int) and key not in self._turns:
            self.cancel(key, now)
        self._forget(key)

    def abandon_all(self, now: float) -> None:
        """Stop all jobs and forget them."""
        for key in list(self._requests):
            self.abandon(key, now)

    def fetch_tokenizer(self, model: str, now: float, wait_s: float | None = None) -> None:
        """Ask for the tokenizer of a model ("": of the only one).

        wait_s  how long to wait for a broker to answer and a verifier of the model to register, with an event `Waiting`
                when it comes to that; None: for a broker `timeout_s`, for a verifier VERIFIER_WAIT_S
        """
        self._pieces.clear()
        request = Pending(lambda: FetchTokenizer(model=model), self._patience)
        request.broker_until = now + (wait_s or 0.0)
        request.verifier_until = now + (VERIFIER_WAIT_S if wait_s is None else wait_s)
        self._ask(TOKENIZER, request, now)

    def get_status(self, now: float) -> None:
        """Ask for the broker's state."""
        self._ask(STATUS, Pending(GetStatus, self._patience), now)

    def _ask(self, key: int | str, request: Pending, now: float) -> None:
        self._requests[key] = request
        request.started = request.sent = now
        self._outbox.append(request.message())

    def _send_waiting(self, now: float) -> None:
        """Send jobs whose turn has come."""
        while (job_id := self._turns.next()) is not None:
            self._send_job(job_id, now)

    def _send_job(self, job_id: int, now: float) -> None:
        self._turns.sent(job_id)
        self._ask(job_id, self._requests[job_id], now)

    def _forget(self, key: int | str) -> None:
        self._requests.pop(key, None)
        if isinstance(key, int):
            self._turns.forget(key)

    # --- answers ----------------------------------------------------------------------------------------------------

    def receive(self, message: Message, now: float) -> list[Event]:
        """Take a message; those that nobody waits for are dropped."""
        self._heard = now
        self._stops.hear(message)
        events = self._dispatch(message, now)
        self._send_waiting(now)
        return events

    def _dispatch(self, message: Message, now: float) -> list[Event]:
        match message:
            case Accepted():
                self._answered(message.job_id, now)
            case Tokens():
                return self._tokens(message, now)
            case Failed():
                return self._failed(message, now)
            case TokenizerChunk() if TOKENIZER in self._requests:
                request = self._requests[TOKENIZER]
                request.sent = request.progress = now
                return self._tokenizer_piece(message)
            case Status() if self._requests.pop(STATUS, None):
                return [StatusReport(STATUS, message.report)]
        return []

    def _answered(self, job_id: int, now: float) -> None:
        request = self._requests.get(job_id)
        if request is not None:
            request.progress = now
            self._turns.answered(job_id)

    def _tokenizer_piece(self, piece: TokenizerChunk) -> list[Event]:
        """Collect pieces, in any order, perhaps twice; those of another model than before start anew."""
        if any(other.model != piece.model or other.count != piece.count for other in self._pieces.values()):
            self._pieces.clear()
        self._pieces[piece.index] = piece
        known = self._recall(piece) if piece.index == 0 else None
        if known is None and len(self._pieces) < piece.count:
            return []
        try:
            files = known or join_chunks(list(self._pieces.values()))
        except ProtocolError as error:
            return self._fail(TOKENIZER, "lost", f"the tokenizer of {piece.model.name}: {error}")
        del self._requests[TOKENIZER]
        self._pieces.clear()
        return [TokenizerReady(TOKENIZER, piece.model, files)]

    def _failed(self, message: Failed, now: float) -> list[Event]:
        """End a request, unless a restarted broker merely waits for its verifiers to come back to a job it had taken."""
        key = message.job_id or TOKENIZER
        request = self._requests.get(key)
        if request is None:
            return []
        if message.code == "no_verifier":
            if key == TOKENIZER and now < request.verifier_until:
                request.progress, request.patience = now, self._patience
                return self._waits(request, f"a verifier to register with the broker at {self.address}")
            if key != TOKENIZER and request.progress is not None and now < request.progress + self.timeout_s:
                return []
        return self._fail(key, message.code, message.reason)

    def _tokens(self, message: Tokens, now: float) -> list[Event]:
        request = self._requests.get(message.job_id)
        if request is None or request.transcript is None:
            return []
        self._answered(message.job_id, now)
        known = request.transcript.token_ids
        tokens = message.token_ids.tolist()
        num_known = len(known) - message.base_len
        if num_known < 0 or message.base_len < 0:
            request.patience = min(request.patience, max(GAP_RETRY_S, now - request.sent))  # ask again soon
            return []
        if known[message.base_len : message.base_len + len(tokens)] != tokens[:num_known]:
            return self._fail(message.job_id, "lost", "the broker told two different stories of this job")
        return self._extend(request, message, num_known, now)

    def _extend(self, request: Pending, message: Tokens, num_known: int, now: float) -> list[Event]:
        """Take the tokens beyond the first `num_known`, and the end if it is there."""
        transcript, events = request.transcript, list[Event]()
        if transcript is None:
            return events
        new = tuple(message.token_ids.tolist()[num_known:])
        flags = tuple(message.accepted.tolist()[num_known:]) + (0,) * len(new)
        if new:
            transcript.token_ids.extend(new)
            transcript.accepted.extend(flags[: len(new)])
            transcript.logprobs.extend(message, num_known)
            transcript.first_token = transcript.first_token or now
            request.sent, request.patience = now, self._patience
            events.append(NewTokens(message.job_id, new, flags[: len(new)]))
        if message.finish and message.base_len + len(message.token_ids) >= len(transcript.token_ids):
            events += self._finish(message, transcript, now)
        return events

    def _finish(self, message: Tokens, transcript: Transcript, now: float) -> list[Event]:
        if message.finish == "error":
            request = self._requests[message.job_id]
            request.doomed, request.sent = True, now
            return []
        self._forget(message.job_id)
        transcript.finish, transcript.stats, transcript.finished = message.finish, message.stats, now
        return [JobDone(message.job_id, transcript)]

    def _fail(self, key: int | str, code: str, reason: str) -> list[Event]:
        self._forget(key)
        return [RequestFailed(key, JobError(reason, code))]

    # --- time -------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Event]:
        """Do what time asks for."""
        doomed = [key for key, request in self._requests.items() if request.doomed and now >= request.due]
        events = [event for key in doomed for event in self._fail(key, "engine", "the job failed")]
        for request in self._requests.values():
            if now >= request.due:
                request.sent, request.patience = now, min(2 * request.patience, self._longest_patience)
                events += self._send_again(request, now)
        self._outbox += self._stops.due(now, self._requests)
        silent = [
            (key, request)
            for key, request in self._requests.items()
            if now >= request.deadline(self.timeout_s, self._heard)
        ]
        events += [
            event
            for key, request in silent
            for event in self._fail(key, *request.silence(self.address, self.timeout_s, self._heard, now))
        ]
        self._send_waiting(now)
        return events

    def _send_again(self, request: Pending, now: float) -> list[Event]:
        """Repeat a request. What waits for a broker is queued already: meanwhile something small is asked for."""
        if self._heard is not None or now >= request.broker_until:
            self._outbox.append(request.message())
            return []
        self._outbox.append(GetStatus())
        return self._waits(request, f"a broker at {self.address}")

    def _waits(self, request: Pending, what: str) -> list[Event]:
        """Say what the tokenizer waits for, once."""
        if request.waits_for == what:
            return []
        request.waits_for = what
        return [Waiting(TOKENIZER, what)]

    @property
    def idle(self) -> bool:
        """Nothing waits for an answer, so that `tick` has nothing to do."""
        return not self._requests and not self._stops
