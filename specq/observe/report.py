"""Two reports of a broker as one snapshot: the state, and rates per second.

Rule: a report holds counters that only grow. A rate is their difference by the broker's own clock. So a late answer
does not change it. If a counter is smaller than before, its worker or the broker was restarted. Then it counts from 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from specq.protocol import DRAFT_WORKER, ORIGINS, REMOTE, trace_events

Report = dict[str, Any]
Labelled = dict[str, dict[str, list[float]]]  # counts of a worker: names, labels, numbers


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A report, and the one before it (empty without one; then rates are unknown)."""

    report: Report
    before: Report = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Return the time between the reports by the broker's clock; 0 without a rate."""
        seconds: float = self.report.get("time_s", 0.0) - self.before.get("time_s", float("inf"))
        return max(seconds, 0.0)

    @property
    def workers(self) -> list[Report]:
        """Return the workers, each with its rates: `tokens_s`, `steps_s`, `drafts_s` (None: unknown yet).

        `sent_bytes_s` and `received_bytes_s` are since it registered, if there is no report before.
        """
        known = {_identity(worker): worker for worker in self.before.get("workers", ())}
        found = []
        for worker in self.report.get("workers", ()):
            former = known.get(_identity(worker))
            rates = {f"{name}_s": self.rate(worker, former, name) for name in ("tokens", "steps", "drafts")}
            rates |= {f"{name}_s": self._bytes_s(worker, former, name) for name in ("sent_bytes", "received_bytes")}
            found.append(worker | rates | {"metrics": self._new_metrics(worker, former or {})})
        return found

    def of_role(self, role: str) -> list[Report]:
        """Return the workers of one role, with their rates."""
        return [worker for worker in self.workers if worker.get("role") == role]

    def counted(self, name: str) -> list[dict[str, list[float]]]:
        """Return each verifier's counts under a name since the report before."""
        return [worker["metrics"].get(name, {}) for worker in self.of_role("target")]

    @property
    def sessions(self) -> list[Report]:
        """Return the sessions in the report, each with `tokens_s` and the accepted share of its drafts."""
        known = {session["job"]: session for session in _sessions(self.before)}
        return [self._session(one, known.get(one["job"])) for one in _sessions(self.report)]

    @property
    def num_sessions(self) -> int:
        """Return the number of sessions; a report lists only the busiest."""
        number: int = self.report.get("sessions", {}).get("num", 0)
        return number

    @property
    def tokens_s(self) -> float | None:
        """Return the tokens that all verifiers commit a second."""
        rates = [one["tokens_s"] for one in self.of_role("target") if one["tokens_s"] is not None]
        return sum(rates) if rates else None

    def to_dict(self) -> Report:
        """Return the report with its rates."""
        listed = {"num": self.num_sessions, "busiest": self.sessions}
        return self.report | {
            "seconds": self.seconds,
            "tokens_s": self.tokens_s,
            "workers": self.workers,
            "sessions": listed,
        }

    def _session(self, session: Report, former: Report | None) -> Report:
        drafted = session["draft_tokens"]
        acceptance = session["accepted_tokens"] / drafted if drafted else None
        return session | {"tokens_s": self.rate(session, former, "tokens"), "acceptance": acceptance}

    def rate(self, now: Report, before: Report | None, name: str) -> float | None:
        """Return the growth of a counter per second; None without two values."""
        if before is None or not self.seconds or name not in now or name not in before:
            return None
        grown = now[name] - before[name]
        return float(grown if grown >= 0 else now[name]) / self.seconds

    def _bytes_s(self, worker: Report, former: Report | None, name: str) -> float | None:
        rate, seconds = self.rate(worker, former, name), worker.get("registered_s_ago", 0.0)
        if rate is None and not self.before and seconds:
            return float(worker.get(name, 0) / seconds)
        return rate

    def _new_metrics(self, worker: Report, former: Report) -> Labelled:
        """Return a worker's counts by label since the last report, or since its start."""
        known = _labelled(former) if self.seconds else {}
        return {name: _grown(value, known.get(name, {})) for name, value in _labelled(worker).items()}


def _identity(worker: Report) -> tuple[Any, ...]:
    """Return the fields that distinguish two workers of one name.

    An old broker does not report the incarnation.
    """
    return worker["name"], worker.get("incarnation")


def _labelled(worker: Report) -> dict[str, dict[str, Any]]:
    """Return a worker's counts by label. A name may have labels in one report and none in another."""
    return {name: value for name, value in worker.get("metrics", {}).items() if isinstance(value, dict)}


def _sessions(report: Report) -> list[Report]:
    found: list[Report] = report.get("sessions", {}).get("busiest", [])
    return found


def _grown(now: dict[str, Any], before: dict[str, Any]) -> dict[str, list[float]]:
    """Return the growth of each label's numbers.

    If the worker was restarted meanwhile, these are the full numbers.
    """
    numbers = {label: _numbers(value) for label, value in now.items()}
    earlier = {label: _numbers(value) for label, value in before.items()}
    grown = {
        label: [new - old for new, old in zip_longest(own, earlier.get(label, ()), fillvalue=0.0)]
        for label, own in numbers.items()
    }
    return numbers if any(one < 0 for own in grown.values() for one in own) else grown


def _numbers(value: Any) -> list[float]:
    return [float(one) for one in (value if isinstance(value, list) else [value])]


def unused_sources(report: Report) -> set[str]:
    """Return the draft sources without gain: no verifier uses them at its present or last load."""
    known, used = set[str](), set[str]()
    for worker in report.get("workers", ()):
        found = choices(worker)
        known |= {source for label, _, _ in found for source in sources_of(label)}
        in_use = [label for label, is_used, _ in found if is_used]
        used |= {source for label in in_use for source in sources_of(label)}
        if not in_use and worker.get("role") == "target":
            return set()  # without this information, the verifier may use them all
    return known - used


def choices(worker: Report) -> list[tuple[str, bool, float]]:
    """Return the choices of a verifier (`specq.verifier.control.choices`).

    Each has its label, whether it is in use, and the expected tokens a second.
    """
    numbers = {label: _numbers(value) for label, value in _labelled(worker).get("choices", {}).items()}
    return [(label, bool(one[0]), one[1]) for label, one in numbers.items() if len(one) > 1]


def sources_of(label: str) -> list[str]:
    """Return the sources of a choice."""
    return [one for one in label.partition(" ")[0].split("+") if one not in ("none", "")]


def choice_of(code: int) -> str:
    """Return the label of a choice from its number (`trace_events.DECIDED`)."""
    names = {REMOTE if name == DRAFT_WORKER else name for place, name in enumerate(ORIGINS) if code >> place & 1}
    return ("+".join(sorted(names)) or "none") + " unread" * bool(code & trace_events.UNREAD)


def decided(worker: Report) -> Report:
    """Return a verifier's last decision as an event of `trace_events.DECIDED`; empty without a known one."""
    values = worker.get("metrics", {}).get("decided")
    names = trace_events.DECIDED.values
    is_known = isinstance(values, list) and len(values) >= len(names) and all(type(one) is int for one in values)
    return dict(zip(names, values, strict=False)) if is_known else {}


def total(counted: Iterable[dict[str, list[float]]], place: int = 0) -> dict[str, float]:
    """Return the sums over workers of one number of each label."""
    sums: dict[str, float] = {}
    for one in counted:
        for label, numbers in one.items():
            sums[label] = sums.get(label, 0.0) + (numbers[place] if place < len(numbers) else 0.0)
    return sums
