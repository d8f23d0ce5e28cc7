"""What the readers of jobs receive: acceptance of the job, its tokens, its end.

Rules: a reader receives only what the journal holds, and each token once. Tokens of a message not taken are sent again
at the next tick. New tokens of several jobs of one client go in one message.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

import numpy as np

from specq.broker.state.job import BrokerJob
from specq.broker.state.memory import BrokerState, Send
from specq.broker.state.peers import JobReader
from specq.protocol import Accepted, JobTokens, Tokens, decode, type_of

Span = tuple[BrokerJob, int, int]  # a job, and the range of generated tokens that a client lacks: start, end


class Delivery:
    """Sends the readers of jobs the tokens that the journal holds and they lack."""

    def __init__(self, state: BrokerState) -> None:
        self.state = state
        self._changed: dict[int, BrokerJob] = {}  # since the last `flush`

    def note(self, job: BrokerJob) -> None:
        """Note that a job has more to send. `flush` sends it."""
        self._changed[job.job_id] = job

    def flush(self) -> None:
        """Send all readers of the noted jobs what they lack."""
        if self._changed:
            self.update(list(self._changed.values()))

    def update(self, jobs: Sequence[BrokerJob]) -> None:
        """Send all readers of the given jobs what they lack."""
        together: defaultdict[bytes, list[Span]] = defaultdict(list)
        for job in jobs:
            self._changed.pop(job.job_id, None)
            durable = job.durable
            if durable.is_registered:
                end, is_alone = durable.num_tokens, durable.has_ended or job.has_details
                for client, reader in job.readers.by_client.items():
                    if reader.missed:
                        continue
                    if is_alone or not reader.greeted:
                        self._update(job, client, reader)
                    elif end > reader.sent:
                        together[client].append((job, reader.sent, end))
                        reader.sent = end
            if durable.has_ended and job.explanation:
                job.explanation.clear()
        for client, spans in together.items():
            self._send(client, spans)

    def _send(self, client: bytes, spans: Sequence[Span]) -> None:
        """Send a client tokens of running jobs."""
        self.state.outbox.send_front(client, spans[0][0].delta(spans[0][1]) if len(spans) == 1 else tokens_of(spans))
        for job, _, _ in spans:
            if job.trace is not None:
                self._trace(job)

    def _update(self, job: BrokerJob, client: bytes, reader: JobReader) -> None:
        """Send one client what it lacks of one job. For a failed job: first its tokens, then the reason."""
        if not reader.greeted:
            self.state.outbox.send_front(
                client, job.info(self.state.clock.journal_time) if reader.info else Accepted(job_id=job.job_id)
            )
            reader.greeted = True
            if job.trace is not None:
                job.trace.note_once("journaled", self.state.clock.now)
        durable, failure = job.durable, job.transcript.failure
        if durable.num_tokens > reader.sent or (durable.has_ended and not failure):
            self.state.outbox.send_front(client, job.delta(reader.sent))
            reader.sent = max(reader.sent, durable.num_tokens)
            self._trace(job)
        if durable.has_ended and failure:
            self.state.outbox.send_front(client, failure)

    def _trace(self, job: BrokerJob) -> None:
        if (trace := job.trace) is not None and trace.in_all_processes:
            trace.add_often(self.state.clock.now, "delivered", job.durable.num_tokens)

    def update_again(self, jobs: Sequence[BrokerJob]) -> None:
        """Send again what clients did not take."""
        for job in jobs:
            job.readers.next_tick()
        self.update(jobs)

    def note_undelivered(self, effect: Send) -> None:
        """Note that a client did not take a message. Its tokens are sent again from their position."""
        if type_of(effect.frames) not in (Tokens, JobTokens):
            return
        message = decode(effect.frames)
        for tokens in message.each() if isinstance(message, JobTokens) else [message]:
            if isinstance(tokens, Tokens) and (job := self.state.jobs.get(tokens.job_id)) is not None:
                job.readers.note_undelivered(effect.to, tokens.base_len)


def tokens_of(spans: Sequence[Span]) -> JobTokens:
    """Return one message with the tokens of the spans."""
    tokens = chain.from_iterable([job.transcript.token_ids[start:end] for job, start, end in spans])
    origins = b"".join([job.transcript.origins[start:end] for job, start, end in spans])
    return JobTokens(
        job_ids=np.array([job.job_id for job, _, _ in spans], np.int64),
        base_lens=np.array([start for _, start, _ in spans], np.int32),
        num_tokens=np.array([end - start for _, start, end in spans], np.int32),
        token_ids=np.fromiter(tokens, np.int32),
        origins=np.frombuffer(origins, np.uint8),
    )
