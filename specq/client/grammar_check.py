"""The client asks whether the broker passes on grammars before it sends the first job with one.

Rule: a job with a grammar goes only to a broker whose report names its kind. Until the answer it is held back. "Yes"
holds for the current broker. After "no" the client asks again, but not within RECHECK_S, since a broker may be
upgraded. A broker that is replaced by an older one refuses such a job as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from specq.client.brokers import KnownBrokers
from specq.client.events import Event, RequestFailed
from specq.client.pending import PendingRequest
from specq.client.sending import OpenRequests
from specq.protocol import GRAMMAR_KINDS, GetStatus, JobError, Submit, grammar_kind, has_grammar_kind

CAPABILITIES = "capabilities"  # key of the request
RECHECK_S = 10.0


class GrammarCheck:
    """The broker's answer, and the jobs that wait for it.

    patience  silence after which the request is sent again, in seconds.
    """

    def __init__(self, brokers: KnownBrokers, requests: OpenRequests, patience: float) -> None:
        self._brokers, self._requests, self._patience = brokers, requests, patience
        self._of = brokers.current  # the broker that was asked
        self._named: tuple[str, ...] = ()  # the broker's capabilities
        self._ask_after = -math.inf
        self._kinds: dict[int, str] = {}  # of the jobs that wait, by id

    def queue(self, job: Submit, request: PendingRequest, now: float) -> list[Event]:
        """Queue a job, or hold it until the broker has answered. Return its failure if the broker is too old."""
        if self._of != self._brokers.current:
            self._of, self._named, self._ask_after = self._brokers.current, (), -math.inf
        kind = grammar_kind(job.params.grammar)
        if not kind or has_grammar_kind(self._named, kind):
            self._requests.queue(job.job_id, request, now)
            return []
        if now < self._ask_after:
            return [self._refused(job.job_id, kind)]
        self._requests.hold(job.job_id, request)
        self._kinds[job.job_id] = kind
        if CAPABILITIES not in self._requests:
            self._requests.ask(CAPABILITIES, PendingRequest(GetStatus, self._patience), now)
        return []

    def answered(self, report: dict[str, Any], now: float) -> list[Event]:
        """Take the broker's report: queue the jobs that waited for it, and return the failures of the others."""
        self._requests.forget(CAPABILITIES)
        named = report.get("capabilities")
        self._named = tuple(map(str, named)) if isinstance(named, list) else ()
        self._ask_after = now + RECHECK_S
        failed: list[Event] = []
        for job_id, kind in self._take_waiting():
            if has_grammar_kind(self._named, kind):
                self._requests.release(job_id, now)
            else:
                self._requests.forget(job_id)
                failed.append(self._refused(job_id, kind))
        return failed

    def given_up(self, events: Iterable[Event]) -> list[Event]:
        """Return the failures of the jobs that wait, if the question itself is among the given up requests."""
        errors = [one.error for one in events if isinstance(one, RequestFailed) and one.key == CAPABILITIES]
        failed = [RequestFailed(job_id, error) for error in errors for job_id, _ in self._take_waiting()]
        for one in failed:
            self._requests.forget(one.key)
        return list[Event](failed)

    def _take_waiting(self) -> list[tuple[int, str]]:
        """Return the jobs that still wait, and forget them here."""
        kinds, self._kinds = self._kinds, {}
        return [(job_id, kind) for job_id, kind in kinds.items() if self._requests.is_held(job_id)]

    def _refused(self, job_id: int, kind: str) -> RequestFailed:
        known = ", ".join(kind for kind in GRAMMAR_KINDS if has_grammar_kind(self._named, kind))
        reason = (
            f"the broker at {self._brokers.current} is too old for a grammar of the kind {kind}; "
            f"{f'it knows {known}' if known else 'it knows no grammars'}. Upgrade it, or leave the grammar out"
        )
        return RequestFailed(job_id, JobError(reason, field="grammar"))
