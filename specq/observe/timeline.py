"""The trace of a job as text: one line per event, ordered by the broker's clock.

Rule: each line names the process that recorded it. The head shows the possible error of other processes' times.

The module also writes Chrome's trace event format, which Perfetto and chrome://tracing open.

In this format, steps are spans with their phases inside, and other events are marks. The data of an event are its
`args`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specq.observe.sections import clean, decision
from specq.protocol import SHOWN_OF_LANE

Event = dict[str, Any]
Trace = dict[str, Any]
_TAKEN_OVER = "taken over"


def timeline(trace: Trace) -> str:
    """Return a trace as text."""
    lanes = lane_names(trace)
    start = trace["events"][0]["at_us"] if trace["events"] else 0
    width = max([len(event["process"]) for event in trace["events"]] + [7])
    lines = [f"{'MS':>10}  {'PROCESS':<{width}}  EVENT"]
    for event in trace["events"]:
        at_ms = (event["at_us"] - start) / 1000
        lines.append(f"{at_ms:10.3f}  {clean(event['process'], width):<{width}}  {described(event, lanes)}")
    return "\n".join([*head(trace), "", *lines])


def head(trace: Trace) -> list[str]:
    """Return the description of the job, the clocks of the times, and the missing parts."""
    state = f"ended: {trace['finish']}" if trace["finish"] else "has not ended"
    lines = [
        f"job {trace['job']} {clean(trace['label'], 60)} on {clean(trace['model'], 40)}, {state}".replace("  ", " ")
    ]
    parts = trace["processes"]
    errors = ", ".join(
        f"{clean(part['name'], 20)} +-{part['error_us'] / 1000:.3f} ms" for part in parts if part["error_us"]
    )
    lines.append(f"times: the broker's clock{f'; {errors} (half of the shortest round trip)' if errors else ''}")
    if not trace["in_all_processes"]:
        lines.append("only the broker's milestones: this job was not traced in all processes (specq submit --trace)")
    lines += [f"{clean(part['name'], 20)}: {missing}" for part in parts if (missing := _missing(part))]
    if trace["dropped"]:
        lines.append(f"broker: {trace['dropped']} earlier events of rounds are forgotten")
    return lines


def _missing(part: dict[str, Any]) -> str:
    notes = ["was lost, with the events that it had not sent"] if part["is_lost"] else []
    if not part["is_complete"]:
        notes.append("has not sent all events yet")
    if part["dropped"]:
        notes.append(f"{part['dropped']} earlier events are forgotten")
    return "; ".join(notes)


def lane_names(trace: Trace) -> dict[int, str]:
    """Return the drafter of each lane."""
    names = dict(SHOWN_OF_LANE)
    for event in trace["events"]:
        if event["process"] == "broker" and event["event"] == "assigned":
            names[event["lane"]] = event["drafter"]
    return names


def described(event: Event, lanes: dict[int, str]) -> str:
    """Return an event in words; an event that this version does not know with its values."""
    describe = _WORDS.get((event["process"] == "broker", event["event"]))
    if describe is not None:
        return describe(event, lanes)
    values = ", ".join(
        f"{name} {clean(value, 60)}" for name, value in event.items() if name not in ("process", "event", "at_us")
    )
    return f"{clean(event['event'], 30)}{f': {values}' if values else ''}"


def _lane(event: Event, lanes: dict[int, str]) -> str:
    return clean(lanes.get(event["lane"], f"lane {event['lane']}"), 27)


def _round(event: Event, _lanes: dict[int, str]) -> str:
    wait, plan, forward, commit = (event[f"{name}_us"] / 1000 for name in ("wait", "plan", "forward", "commit"))
    return (
        f"round from {event['base_len']}: +{event['tokens']} tokens, {event['accepted']} of {event['verified']} "
        f"drafts accepted; wait {wait:.2f}, plan {plan:.2f}, forward {forward:.2f}, commit {commit:.2f} ms"
    )


def _verdict(event: Event, _lanes: dict[int, str]) -> str:
    return (
        f"verdict from {event['base_len']}: +{event['tokens']} tokens, {event['accepted']} of {event['verified']} "
        f"drafts accepted"
    )


def _finished(event: Event, _lanes: dict[int, str]) -> str:
    reason = f": {clean(event['reason'], 200)}" if event["reason"] else ""
    return f"finished ({event['finish']}) with {event['tokens']} tokens{reason}"


_Words = Callable[[Event, dict[int, str]], str]
_WORDS: dict[tuple[bool, str], _Words] = {  # by whether the broker reports it
    (True, "submitted"): lambda e, _: f"submitted: {e['prompt_tokens']} prompt tokens",
    (True, _TAKEN_OVER): lambda e, _: f"taken over from the journal with {e['tokens']} tokens",
    (True, "journaled"): lambda _e, _: "in the journal, accepted",
    (True, "opened"): lambda e, _: f"opens a session at {clean(e['verifier'], 20)} with {e['context_tokens']} tokens",
    (True, "assigned"): lambda e, _: f"assigns {clean(e['drafter'], 20)} (lane {e['lane']})",
    (True, "verdict"): _verdict,
    (True, "delivered"): lambda e, _: f"delivers up to token {e['tokens']}",
    (True, "moved"): lambda e, _: f"moves the session to {clean(e['verifier'], 20)}",
    (True, "crashed"): lambda e, _: f"LOST {clean(e['worker'], 20)}",
    (True, "left"): lambda e, _: f"{clean(e['worker'], 20)} left",
    (True, "given back"): lambda e, _: f"GIVEN BACK: {clean(e['reason'], 200)}",
    (True, "finished"): _finished,
    (False, "opened"): lambda e, _: f"opened the session with {e['context_tokens']} tokens",
    (False, "prefill"): lambda e, _: f"prefill of {e['tokens']} tokens in a step of {e['us'] / 1000:.2f} ms",
    (False, "draft_arrived"): lambda e, lanes: (
        f"draft of {e['nodes']} nodes from {e['base_len']} arrived ({_lane(e, lanes)})"
    ),
    (False, "round"): _round,
    (False, "judged"): lambda e, lanes: f"  {_lane(e, lanes)}: {e['accepted']} of {e['verified']} accepted",
    (False, "decided"): lambda e, _: decision(e),
    (False, "closed"): lambda e, _: f"closed the session at {e['length']} tokens",
    (False, "assigned"): lambda e, _: f"starts to draft after {e['context_tokens']} tokens",
    (False, "draft_sent"): lambda e, _: f"sends a draft of {e['nodes']} nodes from {e['base_len']}",
    (False, "verdict_arrived"): lambda e, _: f"verdict from {e['base_len']} arrived: +{e['tokens']} tokens",
    (False, "released"): lambda e, _: f"stops drafting at {e['length']} tokens",
    (False, "submitted"): lambda e, _: f"submitted: {e['prompt_tokens']} prompt tokens",
    (False, "accepted"): lambda _e, _: "receives the confirmation of the broker",
    (False, "received"): lambda e, _: f"receives {e['tokens']} tokens from position {e['base_len']}",
    (False, "ended"): lambda e, _: f"ended with {e['tokens']} tokens",
}


_PHASES = ("wait", "plan", "forward", "commit")


def chrome(trace: Trace) -> dict[str, Any]:
    """Return a trace as an object of Chrome's format.

    Times are in microseconds from the first event on.
    """
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
