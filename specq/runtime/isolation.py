"""Limit an error to the session that causes it.

    with faults.of(session, "planned"):    work for one session
        ...
    in_halves(sessions, act, faults, ...)  work for many sessions, which may be repeated with some of them

Rule: an error fails the session that caused it, and no other session. Only `EngineLostError`, which no session causes,
passes through and ends the process. Errors are logged with the session's id, and never with user input.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, TypeVar, overload

import structlog

from specq.protocol import EngineLostError, Fault, SpecqError
from specq.runtime.log import traced

log = structlog.get_logger(__name__)

MOST_SAID = 500  # characters of an error's message


class Identified(Protocol):
    """A session, or work for a session."""

    @property
    def session_id(self) -> int: ...


R = TypeVar("R")


class Divisible(Protocol):
    """A sequence of sessions, or of work for them. A slice of it has the same type."""

    def __len__(self) -> int: ...

    @overload
    def __getitem__(self, index: int, /) -> Any: ...
    @overload
    def __getitem__(self, index: slice, /) -> Any: ...


G = TypeVar("G", bound=Divisible)


class Faults:
    """The faults of sessions; `found` has the first fault of each, by session id.

    `is_unexpected`: some fault is an error that specq does not raise on purpose.
    """

    def __init__(self) -> None:
        self.found: dict[int, Fault] = {}
        self.is_unexpected = False

    def __contains__(self, session: Identified) -> bool:
        return session.session_id in self.found

    def add(self, session: Identified, fault: Fault) -> None:
        """Record a known fault."""
        self.found.setdefault(session.session_id, fault)

    def note(self, session: Identified, doing: str, error: Exception, *, retry: bool = False) -> None:
        """Record that this error was raised when the session was being `doing`, as in "planned"."""
        log.error("session_failed", session=session.session_id, doing=doing, **traced(error))
        if isinstance(error, SpecqError):
            self.add(session, Fault(str(error), retry=True))
            return
        self.is_unexpected = True
        said = f"{type(error).__name__}: {error}".encode("utf-8", "replace").decode()[:MOST_SAID]
        self.add(session, Fault(f"the session could not be {doing}: {said}", retry))

    def of(self, session: Identified, doing: str) -> _Guard:
        """Return a context: any error raised inside is a fault of this session."""
        return _Guard(self, session, doing)


class _Guard:
    """See `Faults.of`.

    It is a class because it is entered for each session of each step. `contextmanager` costs a microsecond more.
    """

    __slots__ = ("doing", "faults", "session")

    def __init__(self, faults: Faults, session: Identified, doing: str) -> None:
        self.faults, self.session, self.doing = faults, session, doing

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if not isinstance(error, Exception) or isinstance(error, EngineLostError):
            return False
        self.faults.note(self.session, self.doing, error)
        return True


def in_halves(
    sessions: G, act: Callable[[G], R], faults: Faults, doing: str, *, retry: bool = False
) -> list[tuple[G, R]]:
    """Do something for sessions together. If that raises, repeat it for halves, down to the session at fault.

    Returns the results, each with its sessions. `act` must leave the state unchanged if it raises.

    - retry: another process may succeed with the session at fault.
    """
    if not sessions:
        return []
    try:
        return [(sessions, act(sessions))]
    except EngineLostError:
        raise
    except Exception as error:  # noqa: BLE001 - see `Faults.of`
        if len(sessions) == 1:
            faults.note(sessions[0], doing, error, retry=retry)
            return []
        log.warning("batch_bisected", doing=doing, num_sessions=len(sessions), **traced(error))
    middle = len(sessions) // 2
    return [
        done
        for half in (sessions[:middle], sessions[middle:])
        for done in in_halves(half, act, faults, doing, retry=retry)
    ]
