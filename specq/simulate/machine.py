"""Processes that share a machine: how long their computing takes beside each other.

Three things are shared. A core: processes of the same urgency take turns on it. Urgency: what gives way (drafters, which run
at niceness 19) stands still while something else computes on its core. Memory and cache: while another core computes with a
model, too, work takes `stretch` times as long, and more by as much for each further core.

A process that computes has been told when it will be done, and that does not change. Who begins later knows of it, and is
slowed by it; what this takes from the earlier one is owed to it, and added to its next work. So work is conserved: over a
while, each process gets done what it would in lockstep with the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Tenant:
    """A process on a machine: on which core, how many times as long its work takes while another core computes with a
    model; whether it computes with a model itself, and gives way to others on its core.

    busy_until   it computes until then, as far as is known; owed_s: seconds of work that others took from it since
    """

    core: int
    stretch: float = 1.0
    has_model: bool = True
    gives_way: bool = False
    busy_until: float = 0.0
    owed_s: float = 0.0


class Machine:
    """Those who share it. Times are in seconds of the virtual clock; work is in seconds that it takes alone."""

    def __init__(self) -> None:
        self._tenants: list[Tenant] = []

    def add(self, tenant: Tenant) -> Tenant:
        """Let a process compute here, too."""
        self._tenants.append(tenant)
        return tenant

    def remove(self, tenant: Tenant) -> None:
        """A process is gone, and computes no more."""
        self._tenants.remove(tenant)

    def compute(self, tenant: Tenant, start: float, work_s: float) -> float:
        """Return when work ends that a process begins at `start`; what it takes from others is owed to them."""
        work_s, tenant.owed_s = work_s + tenant.owed_s, 0.0
        busy = sorted(
            (t for t in self._tenants if t is not tenant and t.busy_until > start), key=lambda t: t.busy_until
        )
        now = start
        for i, first in enumerate(busy):
            others = busy[i:]
            rate = _rate(tenant, others)
            end = min(first.busy_until, now + work_s / rate) if rate else first.busy_until
            _charge(tenant, others, end - now)
            work_s, now = work_s - rate * (end - now), end
            if work_s <= 0 or end < first.busy_until:
                work_s = 0.0
                break
        tenant.busy_until = now + work_s
        return tenant.busy_until


def _charge(tenant: Tenant, others: list[Tenant], seconds: float) -> None:
    """Note what a process that has come takes from those who computed before, in so many seconds beside each other."""
    for other in others:
        before = [t for t in others if t is not other]
        other.owed_s += seconds * (_rate(other, before) - _rate(other, [*before, tenant]))


def _rate(tenant: Tenant, others: Iterable[Tenant]) -> float:
    """Return how much of its work a process gets done in a second beside these."""
    here = [other for other in others if other.core == tenant.core]
    if tenant.gives_way and not all(other.gives_way for other in here):
        return 0.0
    num_turns = 1 + sum(other.gives_way == tenant.gives_way for other in here)
    num_cores = len({other.core for other in others if other.has_model} - {tenant.core})
    return 1.0 / num_turns / (1 + (tenant.stretch - 1) * num_cores)
