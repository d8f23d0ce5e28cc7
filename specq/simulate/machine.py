"""Processes that share a machine: how long their computing takes beside each other.

Three things are shared. A core: processes of the same urgency take turns on it. Urgency: what gives way (drafters,
which run at niceness 19) stands still while something else computes on its core. Memory and cache: while another core
computes with a model, too, work takes `stretch` times as long, and more by as much for each further core. And help:
where a thread on another core takes part in a verifier's step, it takes turns there. Nobody waits for it: what it is
kept from, the step's own core does.

A process that computes has been told when it will be done, and that does not change. Who begins later knows of it, and
is slowed by it; what this takes from the earlier one is owed to it, and added to its next work. So work is conserved:
over a while, each process gets done what it would in lockstep with the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Tenant:
    """A process on a machine: on which core, how many times as long its work takes while another core computes with a
    model; whether it computes with a model itself, and gives way to others on its core.

    helper       the thread that takes part in its work where it is helped, on a core that it shares with others;
                 help_part: the part of the work that this one last did; helped_stretch: how many times as long that
                 work takes while something with a model gives way to the helper
    busy_until   it computes until then, as far as is known; owed_s: seconds of work that others took from it since
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
        """It, and who helps it."""
        return [self] if self.helper is None else [self, self.helper]

    def take_owed(self) -> float:
        """Return what is owed to it and its helper, which is nothing from now on."""
        owed_s = self.owed_s + self.help_part * max(self.all[-1].owed_s - self.owed_s, 0.0)
        for one in self.all:
            one.owed_s = 0.0
        return owed_s


class SimulatedMachine:
    """Those who share it. Times are in seconds of the virtual clock; work is in seconds that it takes alone."""

    def __init__(self) -> None:
        self._tenants: list[Tenant] = []

    def add(self, tenant: Tenant) -> Tenant:
        """Let a process compute here, too."""
        self._tenants += tenant.all
        return tenant

    def remove(self, tenant: Tenant) -> None:
        """A process is gone, and computes no more."""
        self._tenants = [one for one in self._tenants if one not in tenant.all]

    def compute(self, tenant: Tenant, start: float, work_s: float, *, help_part: float = 0.0) -> float:
        """Return when work ends that a process begins at `start`; what it takes from others is owed to them.
        `help_part`: the part of the work that its helper would do if nobody kept it from that; `work_s` is what it
        takes then."""
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
    """Note what a process that has come takes from those who computed before, in so many seconds beside each other."""
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
