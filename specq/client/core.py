"""The client without its socket: messages of the broker in, events out, time as an argument.

    submit, cancel, fetch_tokenizer, get_status    requests of the user
    receive(message, now)                          what the broker sent
    tick(now)                                      sends again what got no answer, gives up on a broker that is gone

Rules: every request is repeated until it is answered, so that nothing is lost with a message or a broker; submitting a
job again under its id is harmless, and `have` tells the broker what need not be sent again. Tokens count by position:
what comes twice is dropped, what comes too early is asked for again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from specq.client.events import (
    Event,
    JobDone,
    NewTokens,
    RequestFailed,
    StatusReport,
    TokenizerReady,
    Transcript,
)
from specq.errors import JobError, ProtocolError
from specq.logprob_record import LogprobRecord
from specq.messages import (
    Accepted,
    Cancel,
    Failed,
    FetchTokenizer,
    GetStatus,
    Message,
    Status,
    Submit,
    TokenizerChunk,
    Tokens,
)
from specq.tokenizer_chunks import join_chunks

RETRY_S = 1.0  # silence after which a request is sent again, at first
RETRY_MAX_S = 4.0
GAP_RETRY_S = 0.1  # least time between two requests for tokens that went missing

TOKENIZER = "tokenizer"
STATUS = "status"


Recall = Callable[[TokenizerChunk], dict[str, str] | None]


@dataclass(slots=True)
class _Request:
    """A request that waits for its answer."""

    message: Callable[[], Message]
    started: float
    sent: float
    patience: float
    transcript: Transcript | None = None
    progress: float | None = None  # when the broker last took the job or sent tokens of it
    doomed: bool = False  # its tokens ended with "error"; the reason may still be on its way

    @property
    def due(self) -> float:
        return self.sent + self.patience


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
        self._requests: dict[int | str, _Request] = {}
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
        self._request(job.job_id, lambda: replace(job, have=len(transcript.token_ids)), now, transcript)

    def cancel(self, job_id: int) -> None:
        """Stop a job that still runs; it ends with what it has."""
        if job_id in self._requests:
            self._outbox.append(Cancel(job_id=job_id))

    def abandon(self, key: int | str) -> None:
        """Forget a request: nobody listens to its answer any more; a job is stopped."""
        if isinstance(key, int):
            self.cancel(key)
        self._requests.pop(key, None)

    def abandon_all(self) -> None:
        """Stop all jobs and forget them."""
        for key in list(self._requests):
            self.abandon(key)

    def fetch_tokenizer(self, model: str, now: float) -> None:
        """Ask for the tokenizer of a model ("": of the only one)."""
        self._pieces.clear()
        self._request(TOKENIZER, lambda: FetchTokenizer(model=model), now)

    def get_status(self, now: float) -> None:
        """Ask for the broker's state."""
        self._request(STATUS, GetStatus, now)

    def _request(
        self, key: int | str, message: Callable[[], Message], now: float, transcript: Transcript | None = None
    ) -> None:
        self._requests[key] = _Request(message, now, now, self._patience, transcript)
        self._outbox.append(message())

    # --- answers ----------------------------------------------------------------------------------------------------

    def receive(self, message: Message, now: float) -> list[Event]:
        """Take a message; those that nobody waits for are dropped."""
        self._heard = now
        match message:
            case Accepted() if message.job_id in self._requests:
                self._requests[message.job_id].progress = now
            case Tokens():
                return self._tokens(message, now)
            case Failed():
                return self._failed(message, now)
            case TokenizerChunk() if TOKENIZER in self._requests:
                self._requests[TOKENIZER].sent = now
                return self._tokenizer_piece(message)
            case Status() if self._requests.pop(STATUS, None):
                return [StatusReport(STATUS, message.report)]
        return []

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
        if message.code == "no_verifier" and request.progress is not None and now < request.progress + self.timeout_s:
            return []
        return self._fail(key, message.code, message.reason)

    def _tokens(self, message: Tokens, now: float) -> list[Event]:
        request = self._requests.get(message.job_id)
        if request is None or request.transcript is None:
            return []
        known = request.transcript.token_ids
        tokens = message.token_ids.tolist()
        num_known = len(known) - message.base_len
        if num_known < 0 or message.base_len < 0:
            request.patience = min(request.patience, max(GAP_RETRY_S, now - request.sent))  # ask again soon
            return []
        if known[message.base_len : message.base_len + len(tokens)] != tokens[:num_known]:
            return self._fail(message.job_id, "lost", "the broker told two different stories of this job")
        return self._extend(request, message, num_known, now)

    def _extend(self, request: _Request, message: Tokens, num_known: int, now: float) -> list[Event]:
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
            request.sent, request.patience, request.progress = now, self._patience, now
            events.append(NewTokens(message.job_id, new, flags[: len(new)]))
        if message.finish and message.base_len + len(message.token_ids) >= len(transcript.token_ids):
            events += self._finish(message, transcript, now)
        return events

    def _finish(self, message: Tokens, transcript: Transcript, now: float) -> list[Event]:
        if message.finish == "error":
            request = self._requests[message.job_id]
            request.doomed, request.sent = True, now
            return []
        del self._requests[message.job_id]
        transcript.finish, transcript.stats, transcript.finished = message.finish, message.stats, now
        return [JobDone(message.job_id, transcript)]

    def _fail(self, key: int | str, code: str, reason: str) -> list[Event]:
        del self._requests[key]
        return [RequestFailed(key, JobError(reason, code))]

    # --- time -------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Event]:
        """Do what time asks for."""
        doomed = [key for key, request in self._requests.items() if request.doomed and now >= request.due]
        events = [event for key in doomed for event in self._fail(key, "engine", "the job failed")]
        for request in self._requests.values():
            if now >= request.due:
                request.sent, request.patience = now, min(2 * request.patience, self._longest_patience)
                self._outbox.append(request.message())
        silent = [key for key, request in self._requests.items() if now >= self._deadline(request)]
        return events + [event for key in silent for event in self._fail(key, *self._silence())]

    @property
    def idle(self) -> bool:
        """Nothing waits for an answer, so that `tick` has nothing to do."""
        return not self._requests

    def _deadline(self, request: _Request) -> float:
        return max(request.started, self._heard or request.started) + self.timeout_s

    def _silence(self) -> tuple[str, str]:
        if self._heard is None:
            return "no_broker", no_broker(self.address, self.timeout_s)
        return "lost", f"the broker at {self.address} has been silent for {self.timeout_s:g} s"


def no_broker(address: str, timeout_s: float) -> str:
    """Return the message for a user whose broker does not answer."""
    return (
        f"no broker answered at {address} within {timeout_s:g} s; start one with `make broker` or `specq up`, "
        "or name another with --broker; one with keys answers only to keys that it knows (--keys)"
    )
