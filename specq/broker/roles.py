"""Who may say what to the broker, where keys are on: each message is held against the roles of the key it came with.

Rules: the socket says whose key it was (`who`, the key's name); a peer's word for who it is counts for nothing. A job belongs
to the key that submitted it, and others learn nothing of it, not even that there is one. A key that is taken off the list
(`Grant`s by name, which may change at any time) may do nothing from then on. Without keys everyone may do everything.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from specq.keys import Grant
from specq.messages import (
    Cancel,
    Draft,
    Failed,
    FetchTokenizer,
    Follow,
    GetStatus,
    Heartbeat,
    Hello,
    ListJobs,
    Message,
    Refused,
    Submit,
)

MAX_PEERS = 65_536  # sockets of which it is remembered whose they are
_CLIENT, _WORKER = frozenset({"client"}), frozenset({"target", "draft"})
MAY: dict[type[Message], frozenset[str]] = {
    Submit: _CLIENT,
    Follow: _CLIENT,
    Cancel: _CLIENT,
    ListJobs: _CLIENT,
    FetchTokenizer: _CLIENT,
    GetStatus: frozenset({"broker", "target", "draft", "client"}),
    Hello: _WORKER,
    Heartbeat: _WORKER,
    Draft: frozenset({"draft"}),
}


class Roles:
    """The keys that are allowed, and whose the sockets are."""

    def __init__(self, grants: Mapping[str, Grant] | None = None) -> None:
        self._grants = grants
        self._names: OrderedDict[bytes, str] = OrderedDict()

    def refusal(self, identity: bytes, who: str, kind: type[Message], role: str = "") -> str:
        """Return why this key may not send such a message, or ""; `role` is the one that a worker says it has."""
        if self._grants is None:
            return ""
        self._note(identity, who)
        grant = self._grants.get(who)
        if grant is None:
            return "this key is not allowed any more"
        wanted = MAY.get(kind, frozenset()) & ({role} if role else MAY.get(kind, frozenset()))
        if wanted.isdisjoint(grant.roles):
            its = " and ".join(grant.roles)
            return f"the key {who} has the role {its}; this takes the role {' or '.join(sorted(wanted)) or 'of nobody'}"
        return ""

    def _note(self, identity: bytes, who: str) -> None:
        """Remember whose socket this is: libzmq lets nobody else have its identity while it is connected."""
        if self._names.get(identity) != who:
            self._names[identity] = who
            if len(self._names) > MAX_PEERS:
                self._names.popitem(last=False)

    def peer(self, identity: bytes) -> str:
        """Return what limits and shares go by: the key's name, or where there are no keys the socket."""
        return identity.hex() if self._grants is None else self._names.get(identity, "")

    def owns(self, identity: bytes, owner: str) -> bool:
        """May this peer know of a job of this owner?"""
        return self._grants is None or (bool(owner) and self._names.get(identity) == owner)

    def owner(self, identity: bytes) -> str | None:
        """Return whose jobs this peer may be told of; None: everybody's."""
        return None if self._grants is None else self._names.get(identity, "")

    def trusts(self, identity: bytes) -> bool:
        """Is what this drafter says its tokens were drawn from to be believed?"""
        grant = self._grant(identity)
        return self._grants is None or (grant is not None and grant.trusted)

    def public_key(self, identity: bytes) -> bytes:
        """Return the public key of a peer; b"" of a stranger."""
        grant = self._grant(identity)
        return grant.public_key if grant is not None else b""

    @property
    def are_on(self) -> bool:
        return self._grants is not None

    def _grant(self, identity: bytes) -> Grant | None:
        return (self._grants or {}).get(self._names.get(identity, ""))


def forbidden(message: Message, reason: str) -> Message | None:
    """Return what a peer is told whose key may not send this; None: nothing."""
    if isinstance(message, Hello):
        return Refused(reason=reason)
    if isinstance(message, Submit | Follow | Cancel):
        return Failed(job_id=message.job_id, code="forbidden", reason=reason)
    if isinstance(message, ListJobs | FetchTokenizer):
        return Failed(job_id=0, code="forbidden", reason=reason)
    return None
