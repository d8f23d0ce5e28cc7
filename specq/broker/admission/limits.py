"""How much one peer may take up of the broker and of the verifiers. What goes beyond is dropped and counted, never
queued.

    requests   of a peer (a key, or a socket where there are no keys): a number a second, which bytes count towards,
               those of the answers included, and those of headers most, since these take the time: a header of 60 KB is
               20 ms of decoding. A report of the broker's state also costs a look at each job. What is dropped the peer
               asks again by itself: all requests may be repeated
    drafts     of a lane: its share of the verifier's time. All sessions of a verifier together may make it spend half
               of its time on drafts, each as much as any other, and within a session each lane. A draft costs what it
               takes there to decode and graft (DRAFT_US, NODE_US as measured by `specq bench calibrate`)
    jobs       of a key: as many as there is room left for others, which is half of the queue for one, a third each for
               two

Rules: tokens and verdicts are never dropped here. Drafts to a verifier that is silent are not sent at all, so that what
waits for it is what it must receive.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from specq.broker.admission.bucket import Bucket
from specq.broker.jobs.drafters import DrafterLane, Drafters
from specq.broker.workers.registry import Worker
from specq.protocol import Draft, Heartbeat, ProtocolError, array_frame

MAX_PEERS = 4096  # whose requests are counted; beyond, the one that has been silent for longest starts anew
REQUESTS_S, REQUESTS_BURST = 2000.0, 8000.0
REQUEST_BYTES = 8192  # that count as a request
HEADER_BYTES = 256  # of a header beyond SMALL_HEADER, likewise
SMALL_HEADER = 1024
STATUS_JOBS, LISTED_JOBS = 2000, 500  # that a report looks at, likewise; where it lists sessions

DRAFT_US, NODE_US, DISTRIBUTION_US = 40.0, 3.0, 5.0  # a draft, each node of it, each KiB of it
DRAFTS_SHARE = 0.5  # of a verifier's time
BURST_S = 0.25
MAX_DRAFT_NODES = 512  # as many as a session's tree holds
MAX_DRAFT_BYTES = 1 << 20

MAX_SESSIONS = 4096  # in a heartbeat, beyond those that the worker has: left from before a restart
MAX_TOKENS = 32_000_000  # that all jobs together have or may generate
MAX_REASON = 2000  # characters; a reason may quote a value as long as the message in which it came
MAX_RECORDS = 100_000  # that may wait for the journal before new jobs are refused
_TOKENS = array_frame(Draft, "token_ids")


class Limits:
    """The buckets of all peers' requests; those of lanes are in `job.drafters`."""

    def __init__(self) -> None:
        self._peers: OrderedDict[str, Bucket] = OrderedDict()

    def admit_request(self, peer: str, num_bytes: int, now: float, *, num_header_bytes: int = 0) -> bool:
        """Return whether this peer may ask for something now, in this number of bytes, headers included."""
        bucket = self._peers.get(peer)
        if bucket is None:
            bucket = self._peers[peer] = Bucket(REQUESTS_BURST, now)
            if len(self._peers) > MAX_PEERS:
                self._peers.popitem(last=False)
        self._peers.move_to_end(peer)
        cost = 1 + num_bytes / REQUEST_BYTES + max(0, num_header_bytes - SMALL_HEADER) / HEADER_BYTES
        return bucket.take(cost, REQUESTS_S, REQUESTS_BURST, now)

    def charge_answer(self, peer: str, num_bytes: int) -> None:
        """Count what a peer was answered."""
        bucket = self._peers.get(peer)
        if bucket is not None:
            bucket.charge(num_bytes / REQUEST_BYTES)

    def charge_status(self, peer: str, num_jobs: int, *, lists_sessions: bool) -> None:
        """Count that a peer was shown the state of a broker that has so many jobs."""
        bucket = self._peers.get(peer)
        if bucket is not None:
            bucket.charge(num_jobs / (LISTED_JOBS if lists_sessions else STATUS_JOBS))


def admit_draft(
    drafters: Drafters, lane: DrafterLane, verifier: Worker, frames: Sequence[bytes], num_bytes: int, now: float
) -> bool:
    """May this draft on one of a job's lanes, `num_bytes` long, take up the verifier's time?

    Earlier drafts decide: this one's size depends on the tokens that were drawn for it, and these must not decide
    whether it arrives (decision 0008).
    """
    num_nodes = len(frames[_TOKENS]) // 4 if len(frames) > _TOKENS else 0
    if num_nodes > MAX_DRAFT_NODES or num_bytes > MAX_DRAFT_BYTES:
        return False
    rate = 1e6 * DRAFTS_SHARE / ((len(verifier.job_ids) or 1) * len(drafters.lanes))
    burst = BURST_S * rate
    bucket = lane.budget
    if bucket is None:
        bucket = lane.budget = Bucket(burst, now)
    return bucket.spend(DRAFT_US + NODE_US * num_nodes + DISTRIBUTION_US * num_bytes / 1024, rate, burst, now)


def clipped(reason: str) -> str:
    """Return a reason that fits into a message."""
    return reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]} ..."


def check_heartbeat(worker: Worker | None, message: Heartbeat) -> None:
    """Raise ProtocolError for one that lists more sessions than a worker can have, or whose arrays differ in length."""
    num_jobs = len(worker.job_ids) if worker is not None else 0
    sizes = {len(message.session_ids), len(message.epochs), len(message.lengths)}
    if len(sizes) > 1 or max(sizes) > MAX_SESSIONS + 2 * num_jobs:
        raise ProtocolError(f"a heartbeat with {max(sizes)} sessions")
