"""Processes that share a machine: how long their computations take beside each other.

Processes share cores: processes of the same priority take turns on a core. Processes of low priority (drafters, which
run at niceness 19) stop while another process computes on their core. Processes share memory and cache: while another
core computes with a model, too, work takes `stretch` times as long. Each further core adds the same amount. Processes
also share helpers: a thread on another core that takes part in a verifier's step takes turns there. The step never
waits for it. Work that the helper cannot do is done on the step's own core.

A process that computes knows when it will be done, and that does not change. A process that begins later is slowed by
it. The time that this would take from the earlier process is owed to it. It is added to its next work. So work is
conserved. Over time, each process does as much as in lockstep with the others.

This module has a virtual clock and an event queue. It runs one event at a time, in the order of time, then of request.
It also has the lines between two processes, one way each, which compute when a message arrives.

No I/O and no clock: times are arguments. So the simulator and bench.delay_proxy delay by the same rule.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from specq.protocol import ConfigError, EngineError


class EventQueue:
    """Runs actions at their virtual times; `now` is in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0  # run so far
        self._num_asked = 0
        self._events: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []

    def at(self, time: float, action: Callable[..., object], *arguments: Any) -> None:
        """Call `action` at a time; a time in the past means now."""
        self._num_asked += 1
        heapq.heappush(self._events, (max(time, self.now), self._num_asked, action, arguments))

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self._next()
        self.now = end

    def run_until(self, condition: Callable[[], bool], limit_s: float) -> None:
        """Let time pass until the condition holds; raises EngineError if it does not within the limit."""
        end = self.now + limit_s
        while not condition():
            if not self._events or self._events[0][0] > end:
                raise EngineError(f"the awaited event did not happen within {limit_s:g} s of virtual time")
            self._next()

    def _next(self) -> None:
        self.now, _, action, arguments = heapq.heappop(self._events)
        self.num_events += 1
        action(*arguments)


@dataclass(frozen=True, slots=True)
class LineSettings:
    """How a line delays and loses messages.

    delay_s       one way.
    jitter_s      mean of an exponentially distributed addition to the delay.
    bytes_per_s   a message waits until those before it have left. 0: unlimited.
    loss, double  probability that a message is lost, or arrives twice.
    in_order      as in TCP: a message never overtakes an earlier one.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float = 0.0
    loss: float = 0.0
    double: float = 0.0
    in_order: bool = True

    def __post_init__(self) -> None:
        for name in ("delay_s", "jitter_s", "bytes_per_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be a finite number, at least 0")
        for name in ("loss", "double"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be a probability from 0 to 1")


class DelayLine:
    """One direction of a connection."""

    __slots__ = ("_busy_until", "_last", "_random", "num_bytes", "num_lost", "num_messages", "settings")

    def __init__(self, settings: LineSettings, seed: int | str = 0) -> None:
        """Start idle. `seed` keys jitter, loss and doubling."""
        self.settings = settings
        self.num_messages = self.num_bytes = self.num_lost = 0
        self._random = random.Random(seed)
        self._busy_until = 0.0  # when the last message's last byte has left
        self._last = 0.0  # the last arrival

    def arrivals(self, now: float, num_bytes: int) -> list[float]:
        """Return when a message that is sent now arrives: once, twice, or never; in order of request."""
        settings = self.settings
        self.num_messages += 1
        self.num_bytes += num_bytes
        if settings.bytes_per_s:
            self._busy_until = max(now, self._busy_until) + num_bytes / settings.bytes_per_s
            now = self._busy_until
        if settings.loss and self._random.random() < settings.loss:
            self.num_lost += 1
            return []
        copies = 2 if settings.double and self._random.random() < settings.double else 1
        return [self._arrival(now) for _ in range(copies)]

    def _arrival(self, left: float) -> float:
        settings = self.settings
        time = left + settings.delay_s
        if settings.jitter_s:
            time += self._random.expovariate(1 / settings.jitter_s)
        if settings.in_order:
            self._last = time = max(time, self._last)
        return time


@dataclass(slots=True, eq=False)
class Tenant:
    """A process on a machine.

    core           the core that it runs on.
    stretch        how many times as long its work takes while another core computes with a model.
    has_model      whether it computes with a model itself.
    gives_way      whether it yields to others on its core.
    helper         the thread that takes part in its work, on a core that it shares with others.
    help_part      the part of the last work that the helper did.
    helped_stretch how many times as long that work takes while a process with a model yields to the helper.
    busy_until     it computes until then, as far as is known.
    owed_s         seconds of work that others took from it since.
    """

    core: int
    stretch: float = 1.0
    has_model: bool = True
    gives_way: bool = False
    helper: Tenant | None = None
    help_part: float = 0.0
    helped_stretch: float = 1.0
    busy_until: float = 0.0
    owed_s: float = 0.0

    @property
    def all(self) -> list[Tenant]:
        """The process, and its helper if it has one."""
        return [self] if self.helper is None else [self, self.helper]

    def take_owed(self) -> float:
        """Return the time owed to the process and its helper, and reset it to 0."""
        owed_s = self.owed_s + self.help_part * max(self.all[-1].owed_s - self.owed_s, 0.0)
        for one in self.all:
            one.owed_s = 0.0
        return owed_s


class SimulatedMachine:
    """The processes that share a machine.

    Times are in seconds of the virtual clock. Work is in seconds that it takes alone.
    """

    def __init__(self) -> None:
        self._tenants: list[Tenant] = []

    def add(self, tenant: Tenant) -> Tenant:
        """Let a process compute here, too."""
        self._tenants += tenant.all
        return tenant

    def remove(self, tenant: Tenant) -> None:
        """Remove a process, which computes no more."""
        self._tenants = [one for one in self._tenants if one not in tenant.all]

    def compute(self, tenant: Tenant, start: float, work_s: float, *, help_part: float = 0.0) -> float:
        """Return when work ends that a process begins at `start`; the time that it takes from others is owed to them.

        help_part   the part of the work that its helper would do if not disturbed.
        work_s      the time of the work in this case.
        """
        work_s += tenant.take_owed()
        tenant.help_part, computing = help_part, tenant.all if help_part else [tenant]
        busy = sorted(
            (t for t in self._tenants if t is not tenant and t.busy_until > start), key=lambda t: t.busy_until
        )
        now = start
        for i, first in enumerate(busy):
            others = busy[i:]
            rate = _pace(tenant, others)
            end = min(first.busy_until, now + work_s / rate) if rate else first.busy_until
            _charge(computing, others, end - now)
            work_s, now = work_s - rate * (end - now), end
            if work_s <= 0 or end < first.busy_until:
                work_s = 0.0
                break
        for one in computing:
            one.busy_until = now + work_s
        return tenant.busy_until


def _pace(tenant: Tenant, others: Sequence[Tenant]) -> float:
    """Return how much of its work a process gets done in a second beside these, with its helper if it has help."""
    own, helper = _rate(tenant, others), tenant.helper
    if helper is None or not tenant.help_part:
        return own
    is_near = any(other.has_model and other.gives_way and other.core == helper.core for other in others)
    pace = (1 - tenant.help_part) * own + tenant.help_part * _rate(helper, others)
    return pace / tenant.helped_stretch if is_near else pace


def _charge(computing: list[Tenant], others: list[Tenant], seconds: float) -> None:
    """Record the time that a new process takes from earlier ones, in `seconds` beside each other."""
    for other in others:
        before = [t for t in others if t is not other and t.helper is not other and other.helper is not t]
        other.owed_s += seconds * (_rate(other, before) - _rate(other, [*before, *computing]))


def _rate(tenant: Tenant, others: Sequence[Tenant]) -> float:
    """Return how much of its work a process gets done in a second beside these."""
    here = [other for other in others if other.core == tenant.core]
    if tenant.gives_way and not all(other.gives_way for other in here):
        return 0.0
    num_turns = 1 + sum(other.gives_way == tenant.gives_way for other in here)
    num_cores = len({other.core for other in others if other.has_model} - {tenant.core})
    return 1.0 / num_turns / (1 + (tenant.stretch - 1) * num_cores)
