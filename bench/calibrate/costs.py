"""The costs of processes besides their models, in service, where caches are cold and sockets have their own threads.

The measured processes serve other jobs than the predicted ones, with drafts always in use. They run in three ways: in
mode `plain`, so that only verdicts are sent, with lookups alone, and with drafters. The first run gives the cost of a
verdict. The extra cost of the second is that of lookups. The extra cost of the third is that of the drafters' drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.calibrate.serving import Observed, Prompt, Setting, observed, serving
from specq.config import DraftConfig
from specq.protocol import SUFFIX
from specq.simulate.scenarios import HardwareCurve, Points

MICROSECONDS = 1e6
FAN_OUT = DraftConfig().fan_out


@dataclass(frozen=True, slots=True)
class Served:
    """The counts of some processes in one mode.

    verdicts    rounds of sessions.
    looked_up   nodes that the verifier looked up.
    drafts      sent drafts.
    passes      passes of all drafters.
    nodes       nodes of the drafts.
    host_s      processor seconds of the verifier, besides its engine.
    broker_s, drafter_s, client_s   all processor seconds of these processes.
    """

    verdicts: int
    looked_up: int = 0
    drafts: int = 0
    passes: int = 0
    nodes: int = 0
    host_s: float = 0.0
    broker_s: float = 0.0
    drafter_s: float = 0.0
    client_s: float = 0.0


def profile(setting: Setting, prompts: Sequence[Prompt], pass_ms: Points) -> dict[str, float]:
    """Serve these prompts; return the keys of HostSettings, in microseconds.

    pass_ms: the time of passes of a drafter's model.
    """
    with serving(replace(setting, drafters=0), drafts="always") as service:
        plain, looked_up = (_served(observed(service, prompts, setting, mode)) for mode in ("plain", "async"))
    with serving(setting, drafts="always") as service:
        drafted = _served(observed(service, prompts, setting, "async"))
    return costs(plain, looked_up, drafted, pass_ms)


def _served(found: Observed) -> Served:
    used = found.used.own
    return Served(
        verdicts=sum(int((result.stats | result.internal)["rounds"]) for result in found.results),
        looked_up=found.steps["sent"].get(SUFFIX, 0),
        drafts=found.drafted["drafts"],
        passes=found.drafted["passes"],
        nodes=found.drafted["draft_nodes"],
        host_s=found.steps["host_ms"] * found.steps["num_steps"] / 1e3,
        broker_s=used["broker"],
        drafter_s=sum(seconds for name, seconds in used.items() if name.startswith("draft")),
        client_s=used["client"],
    )


def costs(plain: Served, looked_up: Served, drafted: Served, pass_ms: Points) -> dict[str, float]:
    """Return the cost of each message and pass.

    A drafter's verdicts and drafts are part of the cost of a pass besides its model.
    """
    every = (plain, looked_up, drafted)
    verdicts, drafts = (sum(getattr(one, name) for one in every) for name in ("verdicts", "drafts"))
    verdict_s = plain.host_s / max(plain.verdicts, 1)
    lookup_s = max(looked_up.host_s - verdict_s * looked_up.verdicts, 0.0) / max(looked_up.looked_up, 1)
    draft_s = drafted.host_s - verdict_s * drafted.verdicts - lookup_s * drafted.looked_up
    found = {
        "verdict_us": verdict_s,
        "lookup_us": lookup_s,
        "draft_us": draft_s / max(drafted.drafts, 1),
        "pass_us": drafted.drafter_s / max(drafted.passes, 1) - HardwareCurve(pass_ms)(_rows(drafted)),
        "broker_us": sum(one.broker_s for one in every) / max(verdicts + drafts, 1),
        "client_us": sum(one.client_s for one in every) / max(verdicts, 1),
    }
    known = dict.fromkeys(("graft_us", "plan_us", "hear_us", "send_us"), 0.0)
    return known | {name: round(max(seconds, 0.0) * MICROSECONDS, 2) for name, seconds in found.items()}


def _rows(drafted: Served) -> float:
    """Return about how many rows a pass has: nodes whose children were sent, and a committed token for each verdict."""
    return (drafted.nodes / FAN_OUT + drafted.verdicts) / max(drafted.passes, 1)
