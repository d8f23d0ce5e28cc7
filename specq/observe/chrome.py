"""The trace of a job in Chrome's trace event format, which Perfetto and chrome://tracing open.

A process is a process, steps are spans with their phases inside, all else is a mark; what is known of an event are its
`args`.
"""

from __future__ import annotations

from typing import Any

from specq.observe.timeline import Trace, described, lane_names

_PHASES = ("wait", "plan", "forward", "commit")


def chrome(trace: Trace) -> dict[str, Any]:
    """Return a trace as an object of Chrome's format; times in microseconds from the first event on."""
    names = list(dict.fromkeys(["broker", *(event["process"] for event in trace["events"])]))
    found: list[dict[str, Any]] = [
        {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}}
        for pid, name in enumerate(names)
    ]
    start = trace["events"][0]["at_us"] if trace["events"] else 0
    lanes = lane_names(trace)
    for event in trace["events"]:
        args = {name: value for name, value in event.items() if name not in ("at_us", "process", "event")}
        at = {"pid": names.index(event["process"]), "tid": 0, "ts": event["at_us"] - start}
        found += _shown(event, at, args | {"text": described(event, lanes)})
    errors = {part["name"]: part["error_us"] for part in trace["processes"]}
    return {"traceEvents": found, "displayTimeUnit": "ms", "otherData": {"job": str(trace["job"]), "error_us": errors}}


def _shown(event: dict[str, Any], at: dict[str, Any], args: dict[str, Any]) -> list[dict[str, Any]]:
    if event["event"] == "prefill":
        return [at | {"ph": "X", "name": "prefill", "dur": event["us"], "args": args}]
    if event["event"] != "round":
        return [at | {"ph": "i", "s": "p", "name": event["event"], "args": args}]
    durations = [event[f"{name}_us"] for name in _PHASES]
    spans = [at | {"ph": "X", "name": "round", "dur": sum(durations), "args": args}]
    for place, name in enumerate(_PHASES):
        begin = at["ts"] + sum(durations[:place])
        spans.append(at | {"ph": "X", "name": name, "ts": begin, "dur": durations[place], "args": {}})
    return spans
