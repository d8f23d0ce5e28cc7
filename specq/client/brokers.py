"""The brokers that a client knows, and which of them gets which message.

The brokers share one journal. New requests go to the current one. A request for a job goes where the job is: to the
broker that answered for it last, or that `Moved` named.

Rules:
- A broker is silent if it sends nothing for `patience` seconds after a request. A silent one is left for the next.
- A client returns to the first broker when it answers again. So clients are spread again after all brokers restarted.
- Only the caller's addresses and those of `Moved` are used. `Moved` adds an address only if it can be connected to.
- With one known broker there is nothing to choose, and nothing is stored.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from specq.protocol import names_one_peer

MOST_BROKERS = 64
LOOK_S = 10.0  # between two questions to the first broker while another one is the current one
MOST_PLACES = 20_000  # keys whose broker is remembered; a forgotten one costs a `Moved`


@dataclass(slots=True)
class _Seen:
    """Times of a broker's last message, and of the first request after it; None: there was none."""

    heard: float | None = None
    asked: float | None = None


class KnownBrokers:
    """The brokers by address.

    addresses  the caller's, kept as `given`; the first is the current one at the start.
    patience   in seconds, as above.
    """

    def __init__(self, addresses: Sequence[str], patience: float) -> None:
        self.given, self._patience = tuple(addresses), patience
        self._seen = {address: _Seen() for address in addresses}
        self._places: dict[int | str, str] = {}
        self.current = addresses[0]
        self.several = len(self._seen) > 1
        self.heard: float | None = None  # time of the last message of any of them
        self.num_bad_addresses = 0  # of `Moved`, ignored
        self._next_look, self._is_awaited = 0.0, False  # when to ask the first one again; whether it was asked

    @property
    def names(self) -> str:
        """The caller's addresses, for messages to the user."""
        return ", ".join(self.given)

    def __contains__(self, address: str) -> bool:
        return address in self._seen

    def place(self, key: int | str) -> str:
        """Return the broker to which a request's messages go."""
        return self._places.get(key, self.current)

    def put(self, key: int | str, address: str) -> None:
        """Send a request's messages to this broker from now on."""
        if self.several and self._places.get(key) != address and address in self._seen:
            self._places.pop(key, None)
            self._places[key] = address
            if len(self._places) > MOST_PLACES:
                del self._places[next(iter(self._places))]

    def note_asked(self, address: str, now: float) -> None:
        """Note that a request was sent to a broker."""
        seen = self._seen[address]
        if seen.asked is None:
            seen.asked = now

    def note_heard(self, address: str, now: float) -> None:
        """Note that a broker sent a message. If the current one is silent, or this is the first, it becomes current."""
        self.heard = now
        seen = self._seen.get(address)
        if seen is None:  # forgotten meanwhile
            return
        is_first_again = address == self.given[0] and self._is_awaited
        if is_first_again or self._is_silent(self._seen[self.current], now):
            self.current, self._is_awaited = address, False
        seen.heard, seen.asked = now, None

    def heard_from(self, address: str) -> float | None:
        """Return the time of this broker's last message; None: there was none."""
        seen = self._seen.get(address)
        return seen.heard if seen else None

    def silent(self, now: float) -> Collection[str]:
        """Return the silent brokers; none if only one is known."""
        if not self.several:
            return ()
        return {address for address, seen in self._seen.items() if self._is_silent(seen, now)}

    def to_look_at(self, now: float) -> str | None:
        """Return the first broker if another one is the current one, and it is time to ask whether it is back."""
        if not self.several or self.current == self.given[0]:
            self._next_look = now + LOOK_S
        if now < self._next_look:
            return None
        self._next_look, self._is_awaited = now + LOOK_S, True
        return self.given[0]

    def _is_silent(self, seen: _Seen, now: float) -> bool:
        return seen.asked is not None and now >= seen.asked + self._patience

    def other(self, address: str, avoided: Collection[str]) -> str | None:
        """Return the next broker after this one, if possible none of the `avoided`. None: there is no other one."""
        known = list(self._seen)
        at = known.index(address) if address in self._seen else -1
        others = known[at + 1 :] + known[: max(at, 0)]
        return next((one for one in others if one not in avoided), others[0] if others else None)

    def learn(self, address: str) -> bool:
        """Return whether a `Moved` names a broker that can be used. Count one that names none."""
        if address in self._seen:
            return True
        if not names_one_peer(address):
            self.num_bad_addresses += 1
            return False
        if len(self._seen) >= MOST_BROKERS:
            self._forget_one()
        self._seen[address], self.several = _Seen(), True
        return True

    def _forget_one(self) -> None:
        """Forget the broker that was silent for the longest time, of those named by `Moved`."""
        learnt = [address for address in self._seen if address not in (*self.given, self.current)]
        if learnt:
            oldest = min(learnt, key=lambda address: self._seen[address].heard or 0.0)
            del self._seen[oldest]
            self._places = {key: address for key, address in self._places.items() if address != oldest}
