"""Jobs: what was asked for, what is committed so far, and who works on it, each in a part of its own.

    request     what was asked for                     jobs/request.py
    transcript  prompt and committed tokens, the end   jobs/transcript.py
    stats       what is counted                        jobs/stats.py
    durable     what the journal holds of it           jobs/durable.py; jobs/records.py: as records, and back
    readers     the clients that follow it             jobs/readers.py
    session     the verifier that holds it             jobs/session.py
    drafters    those who draft for it                 jobs/drafters.py
    explanation what became of drafts, if asked for    specq.protocol.explanation
    crashes     of verifiers that held it              specq.broker.workers.quarantine
    trace       what happened to it                    jobs/trace.py
    state       where it stands                        jobs/lifecycle.py

Rule: the transcript is the truth, once the journal holds it. A client sees a token only after that, and a job can go on
from it on any verifier that has the same weights. Jobs that ended are kept for a while, so that a client that was away
can fetch them; the journal has those that are forgotten here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from specq.broker.jobs.drafters import Drafters
from specq.broker.jobs.durable import Durable
from specq.broker.jobs.lifecycle import JobEvent, JobState, after
from specq.broker.jobs.readers import Readers
from specq.broker.jobs.request import JobRequest
from specq.broker.jobs.session import JobSession
from specq.broker.jobs.stats import JobStats
from specq.broker.jobs.trace import JobTrace
from specq.broker.jobs.transcript import Transcript
from specq.journal import NO_CRASHES, Crashes
from specq.protocol import Explanation, JobInfo, Tokens

QUARANTINE_CRASHES = 2  # verifiers that crashed while they held a job, from which on it runs alone
CLEARED_AFTER = 16  # tokens beyond those that it had at the last crash, after which it no longer does


class Requirements(NamedTuple):
    """What a job needs of a verifier: a model by name, once it has tokens the weights that they came from, and whether
    it must be `alone` there; `avoided`: verifiers that it goes to only where there are no others; `apart`: the verifier
    keeps the texts of different owners apart."""

    model: str
    weights: str
    alone: bool = False
    avoided: frozenset[bytes] = frozenset()
    apart: bool = False


class BrokerJob:
    """One submitted prompt and its completion."""

    __slots__ = (
        *(
            "__weakref__",
            "crashes",
            "drafters",
            "durable",
            "explanation",
            "job_id",
            "readers",
            "request",
            "session",
            "_state",
            "stats",
            "trace",
            "transcript",
        ),
    )

    def __init__(self, request: JobRequest) -> None:
        self.job_id, self.request = request.submit.job_id, request
        self._state = JobState.NEW
        self.transcript = Transcript(request.prompt_ids, request.params)
        self.stats, self.durable, self.readers = JobStats(), Durable(), Readers()
        self.session, self.drafters = JobSession(), Drafters()
        self.crashes: Crashes = NO_CRASHES
        self.trace: JobTrace | None = None
        self.explanation = Explanation() if request.submit.explain else None

    @property
    def state(self) -> JobState:
        return self._state

    def note(self, event: JobEvent) -> None:
        """Change the state as the table says: the only place that does."""
        self._state = after(self._state, event)

    @property
    def has_details(self) -> bool:
        """Do its verdicts and tokens say more than tokens and their origins?"""
        return self.explanation is not None or self.transcript.logprobs.num_top >= 0

    @property
    def requirements(self) -> Requirements:
        weights = self.session.weights if self.transcript.token_ids else ""
        apart = bool(self.request.submit.cache_salt)
        return Requirements(self.request.model, weights, self.is_quarantined, self.session.avoided, apart)

    @property
    def is_quarantined(self) -> bool:
        """May it be what crashes verifiers? See `specq.broker.workers.quarantine`."""
        return self.crashes.total >= QUARANTINE_CRASHES

    @property
    def is_cleared(self) -> bool:
        """Is it past what would have crashed the verifier, if it is in quarantine?"""
        return self.is_quarantined and self.transcript.num_tokens >= self.crashes.length + CLEARED_AFTER

    def info(self, now: float) -> JobInfo:
        """Return what the job is at this time of the journal."""
        request = self.request
        return JobInfo(
            job_id=self.job_id,
            params=request.params,
            model=request.model,
            label=request.submit.label,
            ended=self.durable.has_ended,
            elapsed_ms=max(0, int(((self.transcript.ended_at or now) - request.submitted) * 1000)),
            prompt_ids=request.prompt_ids,
        )

    def delta(self, have: int) -> Tokens:
        """Return what a client that has `have` generated tokens lacks of those in the journal."""
        transcript, end = self.transcript, self.durable.num_tokens
        have = min(have, end)
        top = (end - have) * max(transcript.logprobs.num_top, 0)
        lengths = {"logprobs": end - have, "top_ids": top, "top_logprobs": top}
        arrays = transcript.logprobs.arrays(have)
        ended = self.durable.has_ended and not transcript.failure
        return Tokens(
            job_id=self.job_id,
            base_len=have,
            finish=transcript.finish if ended else "",
            stats=self.stats.to_dict() if ended else {},
            token_ids=np.array(transcript.token_ids[have:end], np.int32),
            origins=np.frombuffer(transcript.origins[have:end], np.uint8),
            **{name: array[: lengths[name]] for name, array in arrays.items()},
            **(self.explanation.arrays(have, end) if self.explanation else {}),
        )
