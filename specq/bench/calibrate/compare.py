"""What the simulator predicts for a setting, beside what was measured."""

from __future__ import annotations

from collections import Counter
from typing import Any

from specq.protocol import Speculation
from specq.simulate import Scenario
from specq.simulate.run import Simulation
from specq.simulate.stub_text import Texts

COMPARED = ("tokens_per_second", "mean_accepted_length", "hit_rate")
SEEDS = range(5)  # of what the drafter guesses, over which predictions are averaged


def predict(tables: dict[str, Any], texts: Texts, rtt_ms: float, mode: str) -> dict[str, float]:
    """Simulate the jobs of the real runs, whose texts these are, with the drafters `rtt_ms` further away, in a mode; return
    what is compared: all jobs served from an idle system on."""
    network = tables["network"]
    far = {**network, "rtt_ms": network["rtt_ms"] + rtt_ms}
    speculation = {**tables.get("speculation", {}), **Speculation(mode=mode).to_dict()}
    traffic = {**tables["traffic"], "num_jobs": len(texts)}
    seconds, sums = 0.0, Counter[str]()
    for seed in SEEDS:
        own = {"network": far, "speculation": speculation, "traffic": {**traffic, "seed": seed}}
        simulation = Simulation(Scenario.from_tables({**tables, **own}), texts)
        seconds += simulation.run_jobs()
        for job in simulation.users.finished:
            sums.update({name: job.stats[name] for name in ("rounds", "hits", "misses")}, tokens=job.num_tokens)
    return {
        "tokens_per_second": round(sums["tokens"] / seconds, 2),
        "mean_accepted_length": round(sums["tokens"] / sums["rounds"], 4),
        "hit_rate": round(sums["hits"] / max(sums["hits"] + sums["misses"], 1), 4),
    }


def compared(rtt_ms: float, mode: str, measured: dict[str, Any], predicted: dict[str, float]) -> dict[str, Any]:
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
        "HITS",
        "PREDICTED",
        "STEP MS",
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
        f"{measured['hit_rate']:.0%}",
        f"{predicted['hit_rate']:.0%}",
        f"{measured['step_ms']:.2f}",
    )
