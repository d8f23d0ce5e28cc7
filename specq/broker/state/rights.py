"""What each peer of the broker may do, and how many requests it may make.

Roles, with keys. The broker checks each message against the roles of the key that it came with. The socket knows the
key (`who`, the key's name). What a peer claims about itself does not count. A job belongs to the key that submitted it.
Other keys get no information about it, not even that it exists. The grants, by name, may change at any time. A removed
key loses all rights, and receives no more messages: see `specq.broker.gate.Revocation`. Without keys, every peer may do
everything.

Rates: each peer may make a number of requests a second. A peer is a key, or a socket without keys. Bytes count too,
those of answers included. Bytes of headers count most, since decoding a header of 60 KB takes 20 ms. A report of the
broker's state also costs a look at each job. A peer repeats a dropped request by itself, and every request is safe to
repeat.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple

from specq.protocol import (
    Activations,
    Cancel,
    Draft,
    Drafts,
    Failed,
    FetchTokenizer,
    Follow,
    GetClock,
    GetStatus,
    GetTrace,
    Heartbeat,
    Hello,
    ListJobs,
    Message,
    Refused,
    SessionFailed,
    Submit,
    TokenizerChunk,
    Trace,
    TraceEvents,
    Verdict,
    Verdicts,
)
from specq.transport import Grant

REVOKED = "this key is no longer allowed"
MAX_SOCKETS = 65_536  # sockets whose keys are remembered
_CLIENT, _WORKER, _TARGET = frozenset({"client"}), frozenset({"target", "draft"}), frozenset({"target"})
MAY: dict[type[Message], frozenset[str]] = {
    Submit: _CLIENT,
    Follow: _CLIENT,
    Cancel: _CLIENT,
    ListJobs: _CLIENT,
    FetchTokenizer: _CLIENT,
    GetTrace: _CLIENT | {"broker"},
    GetClock: _CLIENT | _WORKER,
    TraceEvents: _CLIENT | _WORKER,
    GetStatus: frozenset({"broker", "target", "draft", "client"}),
    Hello: _WORKER,
    Heartbeat: _WORKER,
    Draft: frozenset({"draft"}),
    Drafts: frozenset({"draft"}),
    Verdict: _TARGET,  # these at the front only from verifiers that dial out: `Gate.dialled_verifier`
    Verdicts: _TARGET,
    SessionFailed: _TARGET,
    Activations: _TARGET,
    TokenizerChunk: _TARGET,
}
MAX_PEERS = 4096  # peers with counted requests; beyond it, the longest silent peer starts anew
REQUESTS_S, REQUESTS_BURST = 2000.0, 8000.0
REQUEST_BYTES = 8192  # bytes that count as one request
HEADER_BYTES = 256  # header bytes beyond SMALL_HEADER that count as one request
GRAMMAR_BYTES = 1024  # the same where the header has a grammar: text takes less time than lists of numbers
SMALL_HEADER = 1024
STATUS_JOBS, LISTED_JOBS = 2000, 500  # jobs in a report that count as one request; the second if it lists sessions


class Shown(NamedTuple):
    """The key that a socket has shown: its name, and the public key of that name at the time."""

    name: str = ""
    public_key: bytes = b""


NOBODY = Shown()


class Roles:
    """The allowed keys, and the keys of the sockets."""

    def __init__(self, grants: Mapping[str, Grant] | None = None) -> None:
        self._grants = grants
        self._names: OrderedDict[bytes, Shown] = OrderedDict()
        self._seen: dict[str, Grant] = {}  # the grants at the last check

    def refusal(self, identity: bytes, who: str, kind: type[Message], role: str = "") -> str:
        """Return why this key may not send such a message, or "". `role`: as a worker claims."""
        if self._grants is None:
            return ""
        grant = self._grants.get(who)
        self._note(identity, Shown(who, grant.public_key) if grant is not None else NOBODY)
        if grant is None:
            return REVOKED
        self._seen.setdefault(who, grant)  # it may come and go between two checks
        allowed = MAY.get(kind, frozenset())
        wanted = allowed & {role} if role else allowed
        if wanted.isdisjoint(grant.roles):
            its = " and ".join(grant.roles)
            return f"the key {who} has the role {its}; expected the role {' or '.join(sorted(wanted)) or 'of nobody'}"
        return ""

    def _note(self, identity: bytes, shown: Shown) -> None:
        """Remember the key of a socket. Libzmq gives a connected identity to no other socket."""
        if self._names.get(identity) != shown:
            self._names[identity] = shown
            if len(self._names) > MAX_SOCKETS:
                self._names.popitem(last=False)

    def peer(self, identity: bytes) -> str:
        """Return the name for limits and shares: the key's, or the socket's without keys."""
        return identity.hex() if self._grants is None else self.shown(identity).name

    def owns(self, identity: bytes, owner: str) -> bool:
        """Return whether this peer may know of a job of this owner."""
        return self._grants is None or (bool(owner) and self.shown(identity).name == owner)

    def owner(self, identity: bytes) -> str | None:
        """Return the owner whose jobs this peer may know. None: all."""
        return None if self._grants is None else self.shown(identity).name

    def seen_by(self, owner: str) -> str:
        """Return who may know of a job of this owner. "": every peer."""
        return "" if self._grants is None else owner

    def sees(self, identity: bytes, owner: str) -> bool:
        """Return whether this peer may look at a job of this owner. The broker's own key may look at all."""
        grant = self._grant(self.shown(identity))
        return self.owns(identity, owner) or (grant is not None and "broker" in grant.roles)

    def trusts(self, shown: Shown) -> bool:
        """Return whether the draft distributions of a drafter with this key are trusted."""
        if self._grants is None:
            return True
        grant = self._grant(shown)
        return grant is not None and grant.trusted

    def refused_priority(self, identity: bytes, priority: int) -> str:
        """Return why this peer's job may not have this priority, or "". Without keys, any priority is allowed."""
        grant = self._grant(self.shown(identity))
        if grant is None or priority <= grant.max_priority:
            return ""
        most = f"the key {grant.name} may claim at most {grant.max_priority}"
        where = "max_priority in its .pub file at the broker; specq keys --max-priority"
        return f"priority is {priority}; {most} ({where})"

    def refused_tenant(self, identity: bytes, tenant: str) -> str:
        """Return why this peer may not submit jobs for a tenant, or "". Without keys, it may."""
        grant = self._grant(self.shown(identity))
        if not tenant or grant is None or grant.tenants:
            return ""
        where = "tenants in its .pub file at the broker; specq keys --tenants"
        return f"the key {grant.name} may not submit for tenants ({where})"

    def public_key(self, identity: bytes) -> bytes:
        """Return the public key of a peer, or b"" if it is unknown."""
        grant = self._grant(self.shown(identity))
        return grant.public_key if grant is not None else b""

    def shown(self, identity: bytes) -> Shown:
        """Return the key that this socket has shown."""
        return self._names.get(identity, NOBODY)

    # --- keys that are taken away -----------------------------------------------------------------------------------

    def have_changed(self) -> bool:
        """Return whether the grants have changed since the last call. The first call returns True."""
        if self._grants is None or self._grants == self._seen:
            return False
        self._seen = dict(self._grants)
        return True

    def stands(self, shown: Shown, role: str) -> bool:
        """Return whether this key is still listed, under this name and with this role."""
        if self._grants is None:
            return True
        grant = self._grant(shown)
        return grant is not None and role in grant.roles

    def is_client(self, identity: bytes) -> bool:
        """Return whether the key of this socket still has the role of a client."""
        return self.stands(self.shown(identity), "client")

    def may_own(self, owner: str) -> bool:
        """Return whether the key of this name may have jobs. A key that replaces another keeps its jobs."""
        return self._grants is None or (owner in self._grants and "client" in self._grants[owner].roles)

    def _grant(self, shown: Shown) -> Grant | None:
        """Return the current grant of a key, or None if another key has its name."""
        grant = (self._grants or {}).get(shown.name)
        return grant if grant is not None and grant.public_key == shown.public_key else None


def forbidden(message: Message, reason: str) -> Message | None:
    """Return the answer to a peer whose key may not send this message, or None."""
    if isinstance(message, Hello):
        # A removed key may come back. A wrong role stays wrong.
        return Refused(reason=reason, fatal=reason != REVOKED)
    if isinstance(message, Submit | Follow | Cancel):
        return Failed(job_id=message.job_id, code="forbidden", reason=reason)
    if isinstance(message, GetTrace):
        return Trace(job_id=message.job_id, reason=reason)
    if isinstance(message, ListJobs | FetchTokenizer):
        return Failed(job_id=0, code="forbidden", reason=reason)
    return None


class Bucket:
    """A token bucket, full at first. `rate` is added each second, up to `burst`."""

    __slots__ = ("_at", "_level")

    def __init__(self, burst: float, now: float) -> None:
        self._level, self._at = burst, now

    def take(self, cost: float, rate: float, burst: float, now: float) -> bool:
        """Take the cost, but no more than the bucket can hold. Return False if there is not enough."""
        self._fill(rate, burst, now)
        is_enough = self._level >= cost or self._level >= burst
        self._level -= cost if is_enough else 0.0
        return is_enough

    def spend(self, cost: float, rate: float, burst: float, now: float) -> bool:
        """Take the whole cost. Return False if the bucket was already empty.

        The answer does not depend on the cost.
        """
        self._fill(rate, burst, now)
        if self._level <= 0:
            return False
        self._level -= cost
        return True

    def _fill(self, rate: float, burst: float, now: float) -> None:
        if now > self._at:
            self._level = min(burst, self._level + rate * (now - self._at))
            self._at = now

    def charge(self, cost: float) -> None:
        """Take the cost, even beyond the present level."""
        self._level -= cost


class Limits:
    """The request buckets of all peers. Those of lanes are in `job.drafters`."""

    def __init__(self) -> None:
        self._peers: OrderedDict[str, Bucket] = OrderedDict()

    def admit_request(self, peer: str, num_bytes: int, now: float, *, num_header_bytes: int = 0) -> bool:
        """Return whether this peer may send a request of `num_bytes` bytes now, headers included."""
        bucket = self._peers.get(peer)
        if bucket is None:
            bucket = self._peers[peer] = Bucket(REQUESTS_BURST, now)
            if len(self._peers) > MAX_PEERS:
                self._peers.popitem(last=False)
        self._peers.move_to_end(peer)
        cost = 1 + num_bytes / REQUEST_BYTES + max(0, num_header_bytes - SMALL_HEADER) / HEADER_BYTES
        return bucket.take(cost, REQUESTS_S, REQUESTS_BURST, now)

    def refund_grammar(self, peer: str, num_characters: int, num_header_bytes: int) -> None:
        """Give back what a request with a grammar was charged too much for its header."""
        bucket = self._peers.get(peer)
        if bucket is not None:
            counted = min(num_characters, max(0, num_header_bytes - SMALL_HEADER))
            bucket.charge(counted / GRAMMAR_BYTES - counted / HEADER_BYTES)

    def charge_answer(self, peer: str, num_bytes: int) -> None:
        """Charge a peer for the bytes of its answers."""
        bucket = self._peers.get(peer)
        if bucket is not None:
            bucket.charge(num_bytes / REQUEST_BYTES)

    def charge_status(self, peer: str, num_jobs: int, *, lists_sessions: bool) -> None:
        """Charge a peer for a report of the state of a broker with `num_jobs` jobs."""
        bucket = self._peers.get(peer)
        if bucket is not None:
            bucket.charge(num_jobs / (LISTED_JOBS if lists_sessions else STATUS_JOBS))
