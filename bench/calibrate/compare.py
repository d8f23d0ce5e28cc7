"""The simulator's prediction for a setting, beside the measurement: means of a verifier's own counts.

Counts are the same in a simulation as in a real process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from specq.protocol import PHASES, Speculation
from specq.simulate import Scenario
from specq.simulate.run import Simulation
from specq.simulate.settings import TrafficSettings
from specq.simulate.stubs import Choices, Texts

Metrics = Mapping[str, Any]  # as `Heartbeat.metrics`, with the heartbeat's number of steps as `steps`
ENGINE = ("forward", "judge")  # the phases in which the engine computes; the others are the host's


def since(before: Metrics, after: Metrics) -> dict[str, Any]:
    """Return the figures of the steps between two states, in milliseconds and counts a step.

    step_ms       time in the engine.
    host_ms       time between, for drafts, messages and bookkeeping.
    used          the sources that are in use afterwards.
    sent, judged  nodes in all, by source.
    """
    num_steps = after["steps"] - before["steps"]
    sums = {name: _less(after["step_us"], before["step_us"], name)[0] / 1e3 for name in PHASES}
    each = {name: round(ms / max(num_steps, 1), 4) for name, ms in sums.items()}
    return {
        "num_steps": num_steps,
        "step_ms": round(sum(each[name] for name in ENGINE), 4),
        "host_ms": round(sum(ms for name, ms in each.items() if name not in ENGINE), 4),
        "phases_ms": each,
        "rows": round(_less(after, before, "step_rows")[0] / max(num_steps, 1), 3),
        "sent": {name: count - before["sent"].get(name, 0) for name, count in after["sent"].items()},
        "judged": {name: _less(after["judged"], before["judged"], name) for name in after["judged"]},
        "used": next((name for name, (is_used, _) in after["choices"].items() if is_used), ""),
    }


def _less(after: Metrics, before: Metrics, name: str) -> list[int]:
    """Return the numbers of a name minus those before; lists may lack zeros at their ends."""
    new, old = _numbers(after, name), _numbers(before, name)
    old += [0] * (len(new) - len(old))
    return [a - b for a, b in zip(new, old, strict=False)] or [0]


def _numbers(metrics: Metrics, name: str) -> list[int]:
    values: Sequence[int] = metrics.get(name, ())
    return list(values)


COMPARED = ("tokens_per_second", "mean_accepted_length", "hit_rate")
WARM_LEN = 4  # tokens of the jobs that compute all prompts before the timed jobs


def predict(
    tables: dict[str, Any], texts: Texts, choices: Choices, rtt_ms: float, modes: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Simulate the run of the real processes in the same order, one mode after the other.

    The simulation runs the jobs of `texts`, with the drafters `rtt_ms` further away. It returns the compared figures
    for each mode.

    choices   the drafter's probabilities for the texts. None: as in the tables.
    """
    network = tables["network"]
    far = {**network, "rtt_ms": network["rtt_ms"] + rtt_ms}
    scenario = Scenario.from_tables({**tables, "network": far})
    simulation = Simulation(scenario, texts, choices)
    return {mode: _predict(simulation, len(texts), mode) for mode in modes}


def _predict(simulation: Simulation, num_jobs: int, mode: str) -> dict[str, Any]:
    traffic, speculation = simulation.scenario.traffic, Speculation(mode=mode)
    output_len, sessions = traffic.output_tokens, traffic.sessions
    simulation.run_jobs(TrafficSettings(sessions=1, output_tokens=WARM_LEN, num_jobs=num_jobs), speculation)
    before, num_before = simulation.metrics(), len(simulation.users.finished)
    timed = TrafficSettings(sessions=sessions, output_tokens=output_len, num_jobs=num_jobs)
    seconds = simulation.run_jobs(timed, speculation)
    sums = Counter[str]()
    for job in simulation.users.finished[num_before:]:
        sums.update({name: job.stats[name] for name in ("rounds", "hits", "misses")}, tokens=job.num_tokens)
    return {
        "tokens_per_second": round(sums["tokens"] / seconds, 2),
        "mean_accepted_length": round(sums["tokens"] / sums["rounds"], 4),
        "hit_rate": round(sums["hits"] / max(sums["hits"] + sums["misses"], 1), 4),
        "steps": since(before, simulation.metrics()),
    }


def compared(rtt_ms: float, mode: str, measured: dict[str, Any], predicted: dict[str, Any]) -> dict[str, Any]:
    """Return one run's line of the report: both sides, and predicted / measured."""
    ratios = {name: round(predicted[name] / measured[name], 4) for name in COMPARED if measured[name]}
    return {"rtt_ms": rtt_ms, "mode": mode, "measured": measured, "predicted": predicted, "ratio": ratios}


def rows(runs: list[dict[str, Any]]) -> list[tuple[object, ...]]:
    """Return the runs as rows for the screen, a header first."""
    header = (
        "RTT MS",
        "MODE",
        "MEASURED",
        "PREDICTED",
        "RATIO",
        "TOKENS/ROUND",
        "PREDICTED",
        "STEP MS",
        "PREDICTED",
        "HOST MS",
        "PREDICTED",
        "OTHERS",
    )
    return [header, *(_row(run) for run in runs)]


def _row(run: dict[str, Any]) -> tuple[object, ...]:
    measured, predicted = run["measured"], run["predicted"]
    return (
        run["rtt_ms"],
        run["mode"],
        f"{measured['tokens_per_second']:.1f}",
        f"{predicted['tokens_per_second']:.1f}",
        f"{run['ratio'].get('tokens_per_second', 0):.3f}",
        f"{measured['mean_accepted_length']:.2f}",
        f"{predicted['mean_accepted_length']:.2f}",
        f"{measured['steps']['step_ms']:.2f}",
        f"{predicted['steps']['step_ms']:.2f}",
        f"{measured['steps']['host_ms']:.2f}",
        f"{predicted['steps']['host_ms']:.2f}",
        f"{measured['load']['others']:.2f}",
    )
