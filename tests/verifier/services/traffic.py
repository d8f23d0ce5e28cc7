"""When jobs begin: clients that send one after another, or waves."""

from __future__ import annotations

from heapq import heappop, heappush
from random import Random

from tests.verifier.services.service import ONE_BY_ONE, POISSON, TOGETHER, WAVES, Service

PARTS = (1.0, 0.4, 0.7)  # of the sessions, that come with a burst, one after the other


class Traffic:
    """Told of time and of jobs that have ended, it says how many begin."""

    def __init__(self, service: Service) -> None:
        self._service, self._random = service, Random(service.seed)
        self._ready: list[float] = []  # when each waiting client sends its next job
        self._num_clients = self._num_waves = self._phase = 0
        self._next_wave: float | None = 0.0
        if service.arrivals not in WAVES:
            self._meet(0.0, 0)

    @property
    def next_at(self) -> float:
        """When the next job begins, if no job ends before."""
        if self._service.arrivals in WAVES:
            return self._next_wave if self._next_wave is not None else float("inf")
        return self._ready[0] if self._ready else float("inf")

    def begin(self, now: float) -> int:
        """Return how many jobs begin now."""
        phase = self._service.phase_at(now)
        if self._service.arrivals in WAVES:
            return self._wave(now, phase)
        if phase != self._phase:
            self._meet(now, phase)
        count = 0
        while self._ready and self._ready[0] <= now:
            heappop(self._ready)
            count += 1
        return count

    def _wave(self, now: float, phase: int) -> int:
        if self._next_wave is None or now < self._next_wave:
            return 0
        if phase != self._phase:
            self._phase, self._num_waves = phase, 0
        part = 1.0 if self._service.arrivals == TOGETHER else PARTS[self._num_waves % len(PARTS)]
        self._next_wave, self._num_waves = None, self._num_waves + 1
        return max(1, round(part * self._service.phases[phase].num_sessions))

    def _meet(self, now: float, phase: int) -> None:
        """Let clients come, until there are as many as the phase has."""
        self._phase, wanted = phase, self._service.phases[phase].num_sessions
        for i in range(max(wanted - self._num_clients, 0)):
            heappush(self._ready, now + self._first_gap_s(i, wanted))
        self._num_clients = max(self._num_clients, wanted)

    def _first_gap_s(self, number: int, num_clients: int) -> float:
        """Return after how many seconds a client sends its first job. Of POISSON some are in a pause already."""
        service = self._service
        if service.arrivals == ONE_BY_ONE:
            return number * service.gap_s
        text_s = service.text_len * service.machine.plain_s(num_clients)
        is_in_pause = self._random.random() < service.gap_s / (service.gap_s + text_s)
        return self._random.expovariate(1 / service.gap_s) if is_in_pause else 0.0

    def end(self, now: float, num_open: int) -> None:
        """Note that a job has ended, so that as many are open now."""
        if self._service.arrivals in WAVES:
            if not num_open:
                self._next_wave = now + (0.0 if self._service.arrivals == TOGETHER else self._service.gap_s)
        elif self._num_clients > self._service.phases[self._service.phase_at(now)].num_sessions:
            self._num_clients -= 1
        else:
            pause_s = self._random.expovariate(1 / self._service.gap_s) if self._service.arrivals == POISSON else 0.0
            heappush(self._ready, now + pause_s)
