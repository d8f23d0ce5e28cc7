"""A worker's links to all brokers of a journal, one for each broker.

Rules:

- A worker has a link to each configured address, and to each broker that a broker lists (`Brokers`).
- A link that is not configured is closed when its broker has lost this worker and no other broker lists it.
- A broker that is reached under two addresses would place sessions on one worker twice. So the link that registers
  second leaves at once. Its address is tried again when the other link has lost the broker.
- A session belongs to the broker that opened it. Only that broker's heartbeats list it.
- A broker that the others list no more has lost its jobs to them. Its sessions are closed GONE_S later. Without another
  broker they stay, because the broker may start again.

All brokers of a journal have the same keys. Addresses in `Brokers` that are not valid are dropped and counted.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import structlog
import zmq

from specq.protocol import (
    Brokers,
    ConfigError,
    Draft,
    Drafts,
    Frames,
    Heartbeat,
    Hello,
    Message,
    Welcome,
    names_one_peer,
    split_addresses,
)
from specq.transport.broker_link import HELLO_MS, WARN_BESIDE_S, WARN_S, BrokerLink
from specq.transport.keys import Curve
from specq.transport.sockets import Beat

log = structlog.get_logger(__name__)

GONE_S = 10.0  # the new holders of a broker's jobs open them within this time, unless another verifier has them
HELLOS_UNTIL_TOLD = 2  # a present broker answers the first
MOST_LINKS = 64


def new_incarnation() -> int:
    """Return a random number that identifies this start of the process."""
    return secrets.randbits(62)


class BrokerLinks:
    """All links of a worker. `heartbeat` is the timer of `beat`; it is due at once when a broker welcomes the worker.

    Their sockets are registered with the poller. Brokers go by name: see `BrokerLink`.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        addresses: str,
        hello: Hello,
        poller: zmq.Poller,
        curve: Curve | None = None,
        tell: Callable[[str], object] = bool,
    ) -> None:
        """Connect to the configured addresses, which commas separate.

        `tell` is called if none answers the first `Hello`. Raises ConfigError for an address that cannot be used.
        """
        self.hello, self.heartbeat, self.num_dropped = hello, Beat(HELLO_MS), 0
        self._context, self._poller, self._curve, self._tell = context, poller, curve, tell
        self._secret = secrets.token_bytes(16)
        self._links: dict[str, BrokerLink] = {}  # by address
        self._configured = split_addresses(addresses)
        self._names: dict[str, str] = {}  # of the brokers behind addresses whose link left because of another one
        self._lists: dict[str, frozenset[str]] = {}  # the last list that came over each link
        self._dropped = set[str]()  # brokers that a list had, and has no more
        self._absent_since: dict[str, float] = {}
        for address in self._configured:
            self._open(address)

    def __iter__(self) -> Iterator[BrokerLink]:
        return iter([*self._links.values()])

    @property
    def registered(self) -> bool:
        """Whether a broker has registered this worker."""
        return any(link.registered for link in self)

    def is_served(self, name: str) -> bool:
        """Return whether the broker of this name has registered this worker."""
        return any(link.registered and link.name == name for link in self)

    def name_of(self, said: str) -> str:
        """Return the name of the broker that says this name at another socket.

        A broker that says no name, there or over its link, goes by the address of its link.
        """
        if any(link.name == said for link in self):
            return said
        unnamed = sorted((link for link in self if not link.is_named), key=lambda link: not link.registered)
        return unnamed[0].name if unnamed else said

    def send(self, name: str, message: Message) -> bool:
        """Send to the broker of this name. Return False if it cannot be sent now."""
        return any(link.send(message) for link in self if link.name == name and link.registered)

    def send_drafts(self, name: str, drafts: Sequence[Draft]) -> None:
        """Send the drafts of a pass to the broker of this name, together if it reads them so."""
        for link in self:
            if link.name == name and link.registered:
                for message in Drafts.packed(drafts) if link.reads_many_drafts else drafts:
                    link.send(message)
                return

    # --- receiving ----------------------------------------------------------------------------------------------------

    def receive(
        self, ready: Mapping[Any, int], skips: Callable[[Frames], bool] | None = None
    ) -> Iterator[tuple[str, Message]]:
        """Yield the messages of ready sockets, each with its broker's name, without what `skips` selects.

        What concerns the links is handled here. Raises ConfigError if all brokers that were reached refuse this worker.
        """
        for link in self:
            if link.socket in ready:
                yield from self._receive(link, skips)

    def _receive(self, link: BrokerLink, skips: Callable[[Frames], bool] | None) -> Iterator[tuple[str, Message]]:
        try:
            for message in link.receive(skips):
                if isinstance(message, Welcome):
                    self.heartbeat = Beat(min(one.heartbeat_ms for one in self if one.registered))
                elif not isinstance(message, Brokers):
                    yield link.name, message
                elif not self._follow(link, message):
                    return
        except ConfigError as error:
            if not any(other.num_welcomes and not other.is_refused for other in self):
                raise
            log.warning("worker_refused", broker=link.endpoint, reason=str(error))

    def _follow(self, link: BrokerLink, message: Brokers) -> bool:
        """Note the sender's name and its list. If another link reaches the sender too, leave, and return False."""
        link.name, link.is_named = message.own or link.name, bool(message.own)
        if any(other.registered and other.name == link.name for other in self if other is not link):
            log.info("duplicate_link_closed", broker=link.name, address=link.endpoint)
            self._names[link.endpoint] = link.name
            link.send(Heartbeat(incarnation=self.hello.incarnation, state="leaving"))
            self._close(link)
            return False
        valid = frozenset(filter(names_one_peer, message.addresses))
        self.num_dropped += len(message.addresses) - len(valid)
        if valid:
            self._dropped |= self._lists.get(link.endpoint, frozenset()) - valid
            self._dropped -= valid
            link.listed = self._lists[link.endpoint] = valid
        return True

    # --- sending ------------------------------------------------------------------------------------------------------

    def beat(
        self,
        heartbeat: Heartbeat,
        broker_of: Callable[[int], str],
        messages: Callable[[str], Iterable[Message]],
        num_dropped: int = 0,
    ) -> None:
        """Send each broker the heartbeat with its own sessions, or the `Hello` until it has registered this worker.

        Call it when `self.heartbeat` is due.

        broker_of    returns the name of a session's broker.
        messages     returns what accompanies the heartbeat to a broker.
        num_dropped  dropped messages of other sockets.
        """
        self._follow_lists()
        self.send_heartbeat(heartbeat, broker_of, num_dropped)
        has_broker = self.registered
        for link in self:
            if link.registered:
                link.send_all(messages(link.name))
            else:
                link.say_hello(WARN_BESIDE_S if has_broker else WARN_S)
                if not has_broker and link.num_hellos == HELLOS_UNTIL_TOLD and not link.num_welcomes:
                    self._tell(f"waiting for the broker at {link.endpoint} (specq broker starts one)")

    def send_heartbeat(self, heartbeat: Heartbeat, broker_of: Callable[[int], str], num_dropped: int = 0) -> None:
        """Send the heartbeat, as `beat` does, but only to brokers that have registered this worker."""
        brokers = [broker_of(session_id) for session_id in heartbeat.session_ids.tolist()]
        for link in self:
            if link.registered:
                own = [i for i, broker in enumerate(brokers) if broker == link.name]
                link.beat(heartbeat.take(own), num_dropped + self.num_dropped)

    # --- which brokers there are --------------------------------------------------------------------------------------

    def gone(self, names: Iterable[str], now: float) -> list[str]:
        """Return which of these brokers others have replaced since GONE_S. Call it at each heartbeat."""
        names = set(names)
        absent = [name for name in names if not self._is_live(name)]
        self._absent_since = {name: self._absent_since.get(name, now) for name in absent}
        self._dropped &= names | {link.name for link in self}
        return [name for name, since in self._absent_since.items() if now - since >= GONE_S]

    def _is_live(self, name: str) -> bool:
        """Return whether a broker may still have its jobs, by the others' lists and the links."""
        serving = [link for link in self if link.registered]
        if not serving:
            return True
        if name in self._dropped:
            return False
        if any(name == link.name or name in link.listed for link in serving):
            return True
        return not any(link.listed for link in serving) and any(name == link.name for link in self)

    def _follow_lists(self) -> None:
        """Open links to listed brokers that are not reached yet. Close links to brokers that are gone."""
        listed = {address for link in self if link.registered for address in link.listed}
        for address in (*self._configured, *sorted(listed)):
            if address not in self._links and not self._reaches(address):
                self._open_listed(address)
        wanted = {*self._configured, *(address for address in listed if not self._reaches(address))}
        for link in self:
            if listed and not link.registered and link.endpoint not in wanted:
                self._close(link)

    def _reaches(self, address: str) -> bool:
        """Return whether a link under another address serves the broker at this one."""
        return any(link.registered and link.name in (address, self._names.get(address)) for link in self)

    def _open_listed(self, address: str) -> None:
        if len(self._links) >= MOST_LINKS:
            return
        try:
            self._open(address)
        except ConfigError as error:
            self.num_dropped += 1
            log.debug("broker_address_dropped", reason=str(error))

    def _open(self, address: str) -> None:
        """Open a link. Each address has an identity of its own, so that a broker that comes back knows this worker."""
        identity = b"\x01" + blake2b(address.encode(), digest_size=8, key=self._secret).digest()
        link = self._links[address] = BrokerLink(self._context, address, self.hello, self._curve, identity)
        self._poller.register(link.socket, zmq.POLLIN)

    def _close(self, link: BrokerLink) -> None:
        del self._links[link.endpoint]
        self._lists.pop(link.endpoint, None)
        self._poller.unregister(link.socket)
        link.socket.close()
