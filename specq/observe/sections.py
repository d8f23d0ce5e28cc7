"""The sections of `specq status` and `specq top`, as rows of text: one function each, from a snapshot.

Rule: a section is values, not layout. `plain` prints it without colours and control characters. `specq.observe.screen`
shows it on a terminal. Names of workers and labels come from outside, so unprintable characters are replaced.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from specq.observe.report import Report, Snapshot, choice_of, choices, decided, sources_of, total, unused_sources
from specq.protocol import SHOWN, trace_events
from specq.runtime import columns

_BATCH_LINE = re.compile(
    r'"(batch_[0-9a-f]{24}) (\d+)/(\d+) '
)  # the label of a batch's job (`specq.gateway.batch_lines`)
UNKNOWN = "-"
NOT_USED = "not used: no gain"  # fits into 80 columns
_FINISHED = "finished in memory (specq jobs lists all)"  # a journal also has earlier ones


@dataclass(frozen=True, slots=True)
class ViewSection:
    """A title with a note, column names, and rows of texts or numbers.

    optional  the columns to leave out of a short line, the first one first.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]
    note: str = ""
    optional: tuple[str, ...] = ()

    @property
    def headline(self) -> str:
        """Return the title with its note."""
        return f"{self.title} ({self.note})" if self.note else self.title

    def lines(self, width: int = 0) -> list[str]:
        """Return the header and the rows in columns.

        Each line has at most `width` characters; 0 means no limit.
        """
        left_out: set[str] = set()
        for name in ("", *self.optional):
            left_out.add(name)
            kept = [place for place, column in enumerate(self.header) if column not in left_out]
            lines = columns([[row[place] for place in kept] for row in (self.header, *self.rows)]).splitlines()
            if not width or max(map(len, lines)) <= width:
                return lines
        return [line[:width] for line in lines]


@dataclass(frozen=True, slots=True)
class View:
    """The user's view: rows that contain `filter_by`, sessions sorted by the column `sort_by`."""

    sort_by: str = "TOK/S"
    reverse: bool = False
    filter_by: str = ""


# --- the sections -----------------------------------------------------------------------------------------------------


def headline(snapshot: Snapshot) -> str:
    """Return the most important figures in one line."""
    counts = snapshot.report.get("jobs", {})
    jobs = ", ".join(f"{count} {_FINISHED if state == 'finished' else state}" for state, count in counts.items())
    rate = snapshot.tokens_s
    return f"{number(rate)} tokens/s; jobs: {jobs}" if rate is not None else f"jobs: {jobs}"


def workers(snapshot: Snapshot, view: View) -> ViewSection:
    """Return a row for each worker."""
    per_second = ("TOK/S", "STEP/S", "DRAFT/S", "OUT B/S", "IN B/S")
    header = ("WORKER", "ROLE", "MODEL", "STATE", "JOBS", *per_second, "FREE KV", "SEEN")
    rows = [
        (
            *(clean(worker["name"], 14), worker["role"], clean(worker["model"], 12), worker["state"], worker["jobs"]),
            number(worker["tokens_s"] if worker["role"] == "target" else None),
            number(worker["steps_s"]),
            number(worker["drafts_s"] if worker["role"] == "draft" else None),
            *(number(worker["sent_bytes_s"]), number(worker["received_bytes_s"])),
            short(worker["free_slots"]) if worker["role"] == "target" else UNKNOWN,  # draft workers do not report it
            f"{worker['heard_s_ago']:.1f}s",
        )
        for worker in snapshot.workers
    ]
    optional = ("IN B/S", "OUT B/S", "FREE KV", "MODEL", "SEEN")
    return ViewSection("workers", header, _filtered(rows, view), optional=optional)


def sessions(snapshot: Snapshot, view: View) -> ViewSection:
    """Return a row for each session in the report."""
    found = sorted(snapshot.sessions, key=SORTS[view.sort_by], reverse=not view.reverse)
    rows = [
        (
            str(one["job"]),
            clean(one["label"].strip('"'), 10),
            one["state"],
            clean(one["verifier"] or UNKNOWN, 12),
            one["drafters"],
            f"{one['tokens']}/{one['max_tokens']}",
            number(one["tokens_s"]),
            percent(one["acceptance"]),
            f"{one['age_s']:.0f}s",
        )
        for one in found
    ]
    listed, there = len(found), snapshot.num_sessions
    note = f"the busiest {listed} of {there}" if there > listed else ""
    header = ("JOB", "ID", "STATE", "VERIFIER", "DR", "TOKENS", "TOK/S", "ACC", "AGE")
    return ViewSection("sessions", header, _filtered(rows, view), note, optional=("AGE", "DR", "VERIFIER"))


def _by(name: str) -> Callable[[Report], float]:
    return lambda session: -1.0 if session[name] is None else session[name]


SORTS: dict[str, Callable[[Report], float]] = {
    "TOK/S": _by("tokens_s"),
    "TOKENS": _by("tokens"),
    "ACC": _by("acceptance"),
    "AGE": _by("age_s"),
}


def batches(snapshot: Snapshot, view: View) -> ViewSection:
    """Return a row for each batch with lines among the sessions of the report. Labels name batch, line and lines."""
    found: dict[str, list[tuple[bool, int, str]]] = {}
    for one in snapshot.sessions:
        if line := _BATCH_LINE.match(one["label"]):
            batch, number, total = line.groups()
            found.setdefault(batch, []).append((one["state"] == "running", int(number), total))
    rows = [
        (batch, sum(runs), len(runs) - sum(runs), f"{max(numbers)}/{totals[0]}")
        for batch, lines in found.items()
        for runs, numbers, totals in [list(zip(*lines, strict=True))]
    ]
    return ViewSection("batches", ("BATCH", "RUNNING", "WAITING", "BEGUN"), _filtered(rows, view))


def speculation(snapshot: Snapshot, view: View) -> ViewSection:
    """Return a row for each source of drafts that has ever sent one.

    A row has the verified and accepted nodes of all verifiers since the report before. It also shows whether the source
    is out of use because it does not pay.
    """
    judged = snapshot.counted("judged")
    verified, accepted = total(judged), total(judged, 1)
    ever, unused = total(Snapshot(snapshot.report).counted("judged")), unused_sources(snapshot.report)
    rows = [
        (
            *(clean(SHOWN.get(source, source), 27), short(count), short(accepted[source])),
            *(_share(accepted[source], count), NOT_USED if source in unused else ""),
        )
        for source, count in sorted(verified.items())
        if ever.get(source)
    ]
    return ViewSection(
        "drafts by source", ("SOURCE", "VERIFIED", "ACCEPTED", "ACCEPTANCE", "NOTE"), _filtered(rows, view)
    )


def drafters(snapshot: Snapshot, view: View) -> ViewSection:
    """Return a row for each draft worker and verifier that it drafts for, with its accepted tokens."""
    rows = []
    for worker in snapshot.of_role("draft"):
        accepted, jobs = worker["metrics"].get("accepted_for", {}), worker.get("drafts_for", {})
        for verifier in sorted({**accepted, **jobs}):
            count = sum(accepted.get(verifier, ()))
            rate = count / snapshot.seconds if snapshot.seconds else None
            rows.append(
                (clean(worker["name"], 14), clean(verifier, 14), jobs.get(verifier, 0), short(count), number(rate))
            )
    header = ("DRAFT WORKER", "VERIFIER", "JOBS", "ACCEPTED", "TOK/S")
    return ViewSection("who drafts for whom", header, _filtered(rows, view))


def drafting(snapshot: Snapshot, view: View) -> ViewSection:
    """Return the choice of each verifier at its present or last load, and the reason."""
    targets = [one for one in snapshot.report.get("workers", ()) if one.get("role") == "target"]
    said = [(clean(one["name"], 14), clean(text, 300)) for one in targets if (text := _used(one))]
    lines = [(name, wrapped(str(text), 62)) for name, text in _filtered(said, view)]  # of 80 columns
    rows = [("" if i else name, line) for name, found in lines for i, line in enumerate(found)]
    return ViewSection("drafting in use", ("VERIFIER", "CHOICE"), tuple(rows))


def steps(snapshot: Snapshot, view: View) -> ViewSection:
    """Return a row for each verifier: how its steps' time is divided since the last report."""
    split = [(one["name"], total([one["metrics"].get("step_us", {})])) for one in snapshot.of_role("target")]
    phases = tuple(dict.fromkeys(phase for _, parts in split for phase in parts))
    rows = [
        (clean(name, 14), *(_share(parts.get(phase, 0.0), sum(parts.values())) for phase in phases))
        for name, parts in split
        if parts
    ]
    header = ("VERIFIER", *(clean(phase, 12).upper() for phase in phases))
    return ViewSection("step time by phase", header, _filtered(rows, view))


def faults(snapshot: Snapshot, view: View) -> ViewSection:
    """Return a row for each of the last faults, the newest first."""
    rows = [
        (
            _age(one["age_s"]),
            one["kind"].replace("_", " "),
            clean(one["who"], 19),
            one["count"],
            clean(one["reason"], 300),
        )
        for one in snapshot.report.get("faults", ())
    ]
    return ViewSection("last faults", ("AGO", "FAULT", "WHO", "TIMES", "REASON"), _filtered(rows, view))


def queues(snapshot: Snapshot) -> str:
    """Return the waiting jobs and the counters other than 0, in one line."""
    journal = snapshot.report.get("journal", {})
    waiting = f"journal records waiting: {journal.get('records_waiting', 0)}" if journal.get("kept") else "no journal"
    counts = ", ".join(f"{name} {count}" for name, count in sorted(snapshot.report.get("counts", {}).items()) if count)
    brokers = snapshot.report.get("brokers", ())
    shared = f"brokers: {', '.join(brokers)}" if len(brokers) > 1 else ""
    parts = [shared, waiting, f"counters: {counts}" if counts else "", journal.get("trouble", "")]
    return "; ".join(part for part in parts if part)


SECTIONS = (workers, sessions, batches, drafters, speculation, drafting, steps, faults)


def sections(snapshot: Snapshot, view: View) -> list[ViewSection]:
    """Return all sections with rows, in order."""
    return [section for make in SECTIONS if (section := make(snapshot, view)).rows]


# --- the choice of a verifier -----------------------------------------------------------------------------------------

# By reason: its text, and whether the choice changes then.
REASONS = {
    "probe": ("{other} is in a trial", False),
    "probe_won": ("a trial was faster", True),
    "probe_lost": ("a trial of {other} was slower", False),
    "drafts_fell": ("{other} became slower", True),
}


def _used(worker: Report) -> str:
    """Return a verifier's choice, the next best one, and the last decision.

    Returns "" if it does not report its choice.
    """
    *others, (used, is_used, rate) = sorted(choices(worker), key=lambda one: one[1:]) or [("", False, 0.0)]
    if not is_used:
        return ""
    label, _, other_rate = others[-1] if others else ("", False, 0.0)
    other = drafts_by(label)
    text = f"{drafts_by(used)}: {number(rate)} tokens/s expected" + f", {other} {number(other_rate)}" * bool(others)
    last = decided(worker)
    if not last:
        return text
    why, changes = _reason(last, other)
    return f"{text} ({'in use since ' * changes}{why})"


def decision(event: Report) -> str:
    """Return an event of `trace_events.DECIDED` in words."""
    used, other = (drafts_by(choice_of(event[name])) for name in ("used", "other"))
    rate, other_rate = (number(event[f"{name}_in_1000_s"] / 1000) for name in ("tokens", "other"))
    why, changes = _reason(event, other)
    sessions = f"{event['sessions']} session{'s' * (event['sessions'] != 1)}"
    return (
        f"{used} {'from now on' if changes else 'still'}, with {sessions}: "
        f"{rate} tokens/s expected, {other} {other_rate} ({why})"
    )


def _reason(event: Report, named: str) -> tuple[str, bool]:
    """Return the reason for a decision, and whether it changes the choice.

    named  the choice that was named just before.
    """
    reason = dict(enumerate(trace_events.DECISIONS)).get(event["reason"], "")
    words, changes = REASONS.get(reason, (f"reason {event['reason']}", False))
    other = drafts_by(choice_of(event["other"]))
    return words.format(other="it" if other == named else other), changes


def drafts_by(label: str) -> str:
    """Return a choice in words."""
    names = " + ".join(SHOWN.get(one, one) for one in sources_of(label))
    return f"drafts from {names}{', unread' * label.endswith(' unread')}" if names else "plain decoding"


# --- as plain text ----------------------------------------------------------------------------------------------------


def wrapped(text: str, width: int) -> list[str]:
    """Break a line between words into lines of at most `width` characters; 0 means no limit."""
    return textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False) if width else [text]


def plain(snapshot: Snapshot, view: View, width: int = 0) -> str:
    """Return all sections as text without colours, each line at most `width` characters; 0 means no limit."""
    lines = [*wrapped(headline(snapshot), width), *wrapped(queues(snapshot), width)]
    for section in sections(snapshot, view):
        lines += ["", section.headline, *section.lines(width)]
    if not snapshot.report.get("workers"):
        lines += ["", "no workers (a worker appears here after it has loaded its model)"]
    return "\n".join(line[:width] if width else line for line in lines)


# --- values -----------------------------------------------------------------------------------------------------------


def clean(text: Any, most: int) -> str:
    """Return text with printable characters only, cut to `most` characters."""
    shown = "".join(one if one.isprintable() else "?" for one in str(text))
    return shown if len(shown) <= most else shown[: most - 1] + "~"


def number(value: float | None) -> str:
    """Return a rate with its significant digits."""
    if value is None:
        return UNKNOWN
    return f"{value:.1f}" if value < 100 else short(value)


def short(value: float) -> str:
    """Return a count in at most five characters."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            scaled = value / (1e3 if unit == "k" else size)
            return f"{scaled:.1f}{unit}" if scaled < 100 else f"{scaled:.0f}{unit}"
    return f"{value:.0f}"


def percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{100 * share:.0f}%"


def _share(part: float, whole: float) -> str:
    return percent(part / whole if whole else None)


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


def _filtered(rows: Sequence[tuple[object, ...]], view: View) -> tuple[tuple[object, ...], ...]:
    wanted = view.filter_by.casefold()
    return tuple(row for row in rows if wanted in " ".join(map(str, row)).casefold())
