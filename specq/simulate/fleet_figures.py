"""The figures of a fleet: load of the brokers, fairness, placement, and the storm after a failure.

All but processor times are determined by the scenario and its seed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from specq.protocol import EngineError
from specq.simulate.fleet import Fleet
from specq.simulate.fleet_users import FleetUsers
from specq.simulate.run import calm_collector
from specq.simulate.settings import Scenario

_BOOT_S = 2.0  # the brokers list each other, and all workers register
_SAMPLE_S = 0.5
_MOST_NAMED = 6
Row = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class FleetFigures:
    """The results of the measured time. Spreads are (least, mean, most).

    cores              processor seconds of a broker's core in a second of virtual time, mean and busiest broker.
    core_us            processor microseconds for a token, by what the cores did: the largest parts.
    longest_ms         the longest single calls, by what they did.
    messages, megabytes   of a broker in a second, both ways. `sent_most`: the most frequent kinds.
    clients_fairness   Jain's index of tokens a session: clients of a broker, mean over brokers. 1: equal.
    brokers_fairness, drafters_fairness   the same for brokers at a verifier, and drafts of brokers at a drafter.
    first_ms           median time to the first token: of the clients with half a broker's sessions, and of the others.
    verifier_sessions, drafter_sessions   at one of them, over samples.
    over_room          the most sessions of a verifier beyond its `max_sessions`.
    prefix_hits        opened sessions whose prompt's beginning the verifier had computed.
    taken              jobs that each broker took from lost ones; `taken_s`: time from the failure to the last of them.
    reopened           opened sessions that the verifier had already.
    gap_s              the longest time between tokens of a job since the failure: median, 99th percentile, longest.
    storm              messages a second that the first 10 s after the failure added, of all brokers: the most, by kind.
    peak               messages of all brokers in each second of the measured time.
    asked_again, moved requests of clients at other brokers, and answers that name another broker.
    simulator_s        processor time of the whole run.
    """

    tokens_per_s: float
    jobs: int
    in_flight: int
    cores: tuple[float, float]
    core_us: dict[str, float]
    longest_ms: dict[str, float]
    messages: float
    megabytes: float
    sent_most: dict[str, float]
    clients_fairness: float
    brokers_fairness: float
    drafters_fairness: float
    first_ms: tuple[float, float]
    verifier_sessions: tuple[float, ...]
    drafter_sessions: tuple[float, ...]
    over_room: int
    prefix_hits: float
    taken: list[int]
    taken_s: float
    reopened: float
    gap_s: tuple[float, ...]
    storm: dict[str, float]
    peak: list[int]
    asked_again: int
    moved: int
    simulator_s: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def simulate_fleet(scenario: Scenario) -> FleetFigures:
    """Run a scenario with `fleet.brokers`, and return its figures. Raises EngineError if a token is lost or doubled."""
    with calm_collector():
        return FleetRun(scenario).run()


class FleetRun:
    """A fleet with its users, measured."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.fleet = scenario, Fleet(scenario)
        self.users = FleetUsers(self.fleet)
        self.figures: FleetFigures
        self._of_verifiers, self._of_drafters = list[int](), list[int]()
        self._peak, self._kinds = list[int](), list[Counter[str]]()

    def run(self) -> FleetFigures:
        """Warm up, measure; the failure is in the middle of the measured time."""
        started, seconds = time.process_time(), self.scenario.traffic.seconds
        fleet = self.fleet
        fleet.queue.run(_BOOT_S)
        self.users.start()
        fleet.queue.run(self.scenario.traffic.warm_s)
        before = self._counts()
        waits = {client: len(times) for client, times in self.users.waits.items()}
        for broker in fleet.brokers.values():
            broker.longest_s.clear()
        self._sample_for(seconds / 2)
        half = self._counts()
        self.users.note_fault()
        fault_at = fleet.queue.now
        fleet.fail()
        self._sample_for(seconds / 2)
        self._check()
        self.figures = self._figures(before, half, waits, fault_at, time.process_time() - started)
        return self.figures

    def _sample_for(self, seconds: float) -> None:
        fleet = self.fleet
        for _ in range(round(seconds / _SAMPLE_S)):
            kinds = self._messages()
            fleet.queue.run(_SAMPLE_S)
            self._kinds.append(self._messages() - kinds)
            self._of_verifiers += [len(one.sessions) for one in fleet.verifiers if one.alive]
            self._of_drafters += [len(one.sessions) for one in fleet.drafters if one.alive]

    def _messages(self) -> Counter[str]:
        return _sum(one.messages for one in self.fleet.brokers.values())

    def _counts(self) -> dict[str, Any]:
        brokers = self.fleet.brokers.values()
        return {
            "core": [dict(one.core_s) for one in brokers],
            "clocks": (time.process_time(), time.perf_counter()),
            "messages": [one.messages.copy() for one in brokers],
            "bytes": [one.bytes.total() for one in brokers],
            "tokens": self.users.tokens.copy(),
            "verifiers": [one.tokens.copy() for one in self.fleet.verifiers],
            "drafts": [one.drafts.copy() for one in self.fleet.drafters],
            "opened": [(one.opened, one.prefix_hits, one.reopened) for one in self.fleet.verifiers],
            "jobs": self.users.num_finished,
        }

    def _check(self) -> None:
        """Raise EngineError if a job is nowhere, or the journal and its client differ."""
        held = set[int]().union(*(one.jobs for one in self.fleet.live))
        for job in self.users.jobs.values():
            stored = self.fleet.journal.fake.jobs.get(job.job_id)
            if stored is not None and stored.num_tokens < job.num_tokens:
                raise EngineError(f"job {job.job_id}: the client has tokens that the journal lacks")
            holder = self.fleet.journal.holders.get(job.job_id)
            if holder in self.fleet.brokers and self.fleet.brokers[holder].alive and job.job_id not in held:
                raise EngineError(f"job {job.job_id} is held by {holder}, which does not know it")

    # --- figures ------------------------------------------------------------------------------------------------------

    def _figures(
        self, before: dict[str, Any], half: dict[str, Any], waits: dict[bytes, int], fault_at: float, spent_s: float
    ) -> FleetFigures:
        after, seconds, fleet = self._counts(), self.scenario.traffic.seconds, self.fleet
        calm = half if self._fails else after  # the brokers' load is that before the failure
        calm_s = seconds / 2 if self._fails else seconds
        worked, passed = (new - old for new, old in zip(calm["clocks"], before["clocks"], strict=True))
        share = min(worked / max(passed, 1e-9), 1.0)  # of the time that passed, this process computed
        cpu = [_more(new, old) for new, old in zip(calm["core"], before["core"], strict=True)]
        kinds = _sum(new - old for new, old in zip(calm["messages"], before["messages"], strict=True))
        tokens = (calm["tokens"] - before["tokens"]).total()
        num, moved = len(fleet.brokers), _growth(calm["bytes"], before["bytes"])
        opened, hits, reopened = np.sum(np.array(after["opened"]) - np.array(before["opened"]), axis=0).tolist()
        loads = [share * sum(one.values()) / calm_s for one in cpu]
        spent = {name: sum(one.get(name, 0.0) for one in cpu) for name in {name for one in cpu for name in one}}
        most = dict[str, float]()
        for broker in fleet.brokers.values():
            most |= {name: max(value, most.get(name, 0.0)) for name, value in broker.longest_s.items()}
        gaps = [
            *self.users.gaps,
            *(max(job.gap, fleet.queue.now - job.heard) for job in self.users.jobs.values() if job.first),
        ]
        return FleetFigures(
            tokens_per_s=round((after["tokens"] - before["tokens"]).total() / seconds, 1),
            jobs=after["jobs"] - before["jobs"],
            in_flight=len(self.users.jobs),
            cores=(round(sum(loads) / num, 4), round(max(loads), 4)),
            core_us=_largest({name: 1e6 * share * value / max(tokens, 1) for name, value in spent.items()}),
            longest_ms=_largest({name: 1e3 * value for name, value in most.items()}),
            messages=round(kinds.total() / num / calm_s, 1),
            megabytes=round(sum(moved) / num / calm_s / 1e6, 3),
            sent_most=_largest({name: value / num / calm_s for name, value in kinds.items()}),
            clients_fairness=self._clients_fairness(calm["tokens"] - before["tokens"]),
            brokers_fairness=self._brokers_fairness(calm, before),
            drafters_fairness=self._drafters_fairness(calm, before),
            first_ms=(self._first_ms(waits, big=True), self._first_ms(waits, big=False)),
            verifier_sessions=_spread(self._of_verifiers),
            drafter_sessions=_spread(self._of_drafters),
            over_room=max(one.most for one in fleet.verifiers) - self.scenario.engine.max_sessions,
            prefix_hits=round(hits / max(opened, 1), 4),
            taken=[one.taken for one in fleet.brokers.values()],
            taken_s=round(max(fleet.last_taken - fault_at, 0.0), 3),
            reopened=round(reopened / max(opened, 1), 4),
            gap_s=tuple(round(float(value), 3) for value in np.quantile(gaps or [0.0], (0.5, 0.99, 1.0))),
            storm=self._storm(),
            peak=[int(sum(one.total() for one in self._kinds[i : i + 2])) for i in range(0, len(self._kinds), 2)],
            asked_again=self.users.num_asked_again,
            moved=self.users.num_moved,
            simulator_s=round(spent_s, 1),
        )

    def _first_ms(self, waits: dict[bytes, int], *, big: bool) -> float:
        """Return the median time to the first token of the clients with half a broker's sessions, or of the others."""
        of = [times[waits[who] :] for who, times in self.users.waits.items() if who.endswith(b"-0") is big]
        times = [time for own in of for time in own]
        return round(1e3 * float(np.median(times)), 1) if times else 0.0

    @property
    def _fails(self) -> bool:
        fleet = self.scenario.fleet
        return bool(fleet.lost_brokers or fleet.lost_verifiers or fleet.lost_drafters or fleet.journal_stands_s)

    def _clients_fairness(self, tokens: Counter[bytes]) -> float:
        rates: dict[bytes, list[float]] = {}
        for client, sessions in self.users.sessions.items():
            if sessions:
                rates.setdefault(client.split(b"-")[1], []).append(tokens[client] / sessions)
        return round(float(np.mean([jain(own) for own in rates.values()])), 4)

    def _brokers_fairness(self, after: dict[str, Any], before: dict[str, Any]) -> float:
        gained = [new - old for new, old in zip(after["verifiers"], before["verifiers"], strict=True)]
        return round(float(np.mean([jain([own[name] for name in self.fleet.brokers]) for own in gained])), 4)

    def _drafters_fairness(self, after: dict[str, Any], before: dict[str, Any]) -> float:
        gained = [new - old for new, old in zip(after["drafts"], before["drafts"], strict=True)]
        found = [jain([own[name] for name in self.fleet.brokers]) for own in gained if own]
        return round(float(np.mean(found or [1.0])), 4)

    def _storm(self) -> dict[str, float]:
        """Return how many messages a second were added by the failure, by kind."""
        half = len(self._kinds) // 2
        calm, storm = self._kinds[:half], self._kinds[half : half + round(10 / _SAMPLE_S)]
        mean = {name: value / max(len(calm), 1) / _SAMPLE_S for name, value in _sum(calm).items()}
        grown = {n: v / max(len(storm), 1) / _SAMPLE_S - mean.get(n, 0.0) for n, v in _sum(storm).items()}
        return _largest({name: value for name, value in grown.items() if value > 0}) if self._fails else {}


def jain(values: Sequence[float]) -> float:
    """Return Jain's fairness index: 1 if all are equal, 1 / n if one has all (Jain, Chiu and Hawe 1984)."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def _sum(counters: Iterable[Counter[str]]) -> Counter[str]:
    total = Counter[str]()
    for one in counters:
        total.update(one)
    return total


def _more(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def _growth(after: Sequence[int], before: Sequence[int]) -> list[int]:
    return [new - old for new, old in zip(after, before, strict=True)]


def _largest(values: dict[str, float]) -> dict[str, float]:
    named = sorted(values.items(), key=lambda one: -one[1])[:_MOST_NAMED]
    return {name: round(value, 2) for name, value in named}


def _spread(values: Sequence[int]) -> tuple[float, ...]:
    return (min(values, default=0), round(float(np.mean(values or [0])), 2), max(values, default=0))


def fleet_rows(figures: FleetFigures) -> list[Row]:
    """Return figures as rows for the screen."""
    return [(name, _shown(value)) for name, value in figures.to_dict().items()]


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(one)}" for name, one in value.items()) or "-"
    if isinstance(value, (list, tuple)):
        return " ".join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
