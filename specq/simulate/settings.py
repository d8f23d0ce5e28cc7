"""A scenario: hardware, network, hosts and traffic, as frozen dataclasses that check themselves.

Each section is a table of the TOML file that `specq simulate` reads with `specq.simulate.scenarios`. The names give the
units of times.
"""

from __future__ import annotations

import itertools
import typing
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

from specq.protocol import ConfigError, JobError, Speculation, known_names

Floats = tuple[float, ...]
Points = tuple[tuple[float, ...], ...]

_UNLIMITED = 2**31 - 1


def _option(default: Any, low: float = 0, high: float = _UNLIMITED) -> Any:
    """Return a field whose numbers must lie between `low` and `high`."""
    return field(default=default, metadata={"low": low, "high": high})


@dataclass(frozen=True, slots=True)
class ScenarioSection:
    """Base of the sections: types and ranges are checked when one is made."""

    NAME: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for f in fields(self):
            _check(f"{self.NAME}.{f.name}", getattr(self, f.name), f.metadata["low"], f.metadata["high"])

    @classmethod
    def from_table(cls, table: dict[str, Any]) -> Self:
        """Build from TOML values; raises ConfigError that names the key, and the right form."""
        kinds = typing.get_type_hints(cls)
        refuse_unknown(cls.NAME, table, [f.name for f in fields(cls)])
        return cls(**{key: _coerce(f"{cls.NAME}.{key}", value, kinds[key]) for key, value in table.items()})


@dataclass(frozen=True, slots=True)
class EngineSettings(ScenarioSection):
    """The target's hardware.

    verifiers      the number of verifiers.
    step_ms        [[rows, milliseconds], ...]: a forward pass with this number of rows.
    helped_ms      likewise, with a thread on the broker's core, which helps while draft workers are silent. Empty: no
                   helper.
    session_us     added for each session of a step.
    context_us     added for each 1,000 tokens of KV of the step's sessions.
    overlaps       1: a device computes, and the next step may be launched before the last one ends. 0: the host
                   computes.
    """

    NAME = "engine"
    verifiers: int = _option(1, low=1)
    step_ms: Points = _option(((1, 25.0), (154, 25.0), (308, 50.0)))
    helped_ms: Points = _option(())
    session_us: float = _option(20.0)
    context_us: float = _option(0.0)
    overlaps: int = _option(0, high=1)
    kv_slots: int = _option(10_000_000, low=1)
    max_sessions: int = _option(64, low=1, high=65_536)
    max_step_rows: int = _option(512, low=1, high=65_536)

    def __post_init__(self) -> None:
        ScenarioSection.__post_init__(self)
        _check_points("engine.step_ms", self.step_ms)
        if self.helped_ms:
            _check_points("engine.helped_ms", self.helped_ms)


@dataclass(frozen=True, slots=True)
class DrafterSettings(ScenarioSection):
    """The drafters' hardware, model and options.

    drafters     the number of drafters. 0: none.
    models       the number of draft models among them. Each makes its own errors.
    pass_ms      [[rows, milliseconds], ...]: a pass over this number of nodes (and tokens without KV).
    acceptance, ranks, claims   as in `specq.simulate.stubs.StubGuesses`.
    width, fan_out, max_ahead, chain   as in `specq.config.sections.DraftConfig`. A chain takes a pass a level.
    """

    NAME = "draft"
    drafters: int = _option(1)
    models: int = _option(1, low=1, high=8)
    pass_ms: Points = _option(((1, 2.4), (8, 2.75)))
    acceptance: Floats = _option((0.8,), high=1)
    ranks: Floats = _option((0.5, 0.33, 0.25), high=1)
    claims: Floats = _option((), high=1)
    width: int = _option(8, low=1, high=1024)
    fan_out: int = _option(3, low=1, high=64)
    max_ahead: int = _option(32, low=1, high=1024)
    chain: int = _option(1, low=1, high=32)

    def __post_init__(self) -> None:
        ScenarioSection.__post_init__(self)
        _check_points("draft.pass_ms", self.pass_ms)
        if not self.acceptance:
            raise ConfigError("draft.acceptance is empty, but must be a probability from 0 to 1, or a list of them")


@dataclass(frozen=True, slots=True)
class NetworkSettings(ScenarioSection):
    """The lines between the processes; all in order, as in TCP.

    rtt_ms         drafter to broker and back.
    jitter_ms      mean extra delay of each way.
    bandwidth_mbit of a drafter's line, each way. 0: unlimited.
    loss           probability that a message to or from a drafter is lost.
    near_rtt_ms    verifiers and clients to the broker and back.
    heartbeat_ms   interval between worker heartbeats.
    """

    NAME = "network"
    rtt_ms: float = _option(1.0)
    jitter_ms: float = _option(0.0)
    bandwidth_mbit: float = _option(0.0)
    loss: float = _option(0.0, high=1)
    near_rtt_ms: float = _option(0.2)
    heartbeat_ms: int = _option(500, low=10, high=60_000)


@dataclass(frozen=True, slots=True)
class HostSettings(ScenarioSection):
    """The costs of the processes themselves, in microseconds.

    broker_us    the broker, for a message that it receives. Verdicts that arrive as one message count separately.
    draft_us     a verifier, for a draft that it receives.
    graft_us     a verifier, for each node in a draft.
    lookup_us    a verifier, for each node that it looks up.
    verdict_us   a verifier, for a session's verdict.
    plan_us      a verifier, for a session and step, before the forward pass.
    hear_us      a drafter, for a verdict that it receives.
    pass_us      a drafter, for a pass, besides the model's time.
    send_us      a drafter, for a draft that it sends.
    client_us    a client, for a message that it receives.
    """

    NAME = "host"
    broker_us: float = _option(30.0)
    draft_us: float = _option(40.0)
    graft_us: float = _option(3.0)
    lookup_us: float = _option(0.0)
    verdict_us: float = _option(60.0)
    plan_us: float = _option(20.0)
    hear_us: float = _option(60.0)
    pass_us: float = _option(0.0)
    send_us: float = _option(60.0)
    client_us: float = _option(0.0)


@dataclass(frozen=True, slots=True)
class MachineSettings(ScenarioSection):
    """The one machine that all processes share, if any. `specq.simulate.machine` describes how they affect each other.

    draft_cores    cores for broker, clients and drafters, which take turns there, as `specq up` divides them. Each
                   verifier has cores of its own, and help on the broker's. 0: each process has a machine of its own.
    step_stretch   how many times as long a verifier's work takes while another core computes with a model.
    helped_stretch likewise a step with help, while a drafter would compute on the helper's core.
    pass_stretch   as step_stretch, for a drafter.
    """

    NAME = "machine"
    draft_cores: int = _option(0, high=1024)
    step_stretch: float = _option(1.0, low=1.0, high=100.0)
    helped_stretch: float = _option(1.0, low=1.0, high=100.0)
    pass_stretch: float = _option(1.0, low=1.0, high=100.0)


@dataclass(frozen=True, slots=True)
class TrafficSettings(ScenarioSection):
    """The users' jobs, and the measured time.

    sessions        jobs in flight: a new one is submitted when one ends. Not used if jobs_per_s > 0.
    jobs_per_s      jobs submitted at random times (Poisson), independently of the jobs in flight.
    prompt_tokens, output_tokens   of each job.
    warm_s          virtual seconds before the measurement.
    seconds         measured virtual seconds.
    num_jobs        maximum number of submitted jobs. 0: no limit.
    seed            of texts, guesses, arrivals, jitter and losses.
    """

    NAME = "traffic"
    sessions: int = _option(1, low=1, high=1_000_000)
    jobs_per_s: float = _option(0.0)
    prompt_tokens: int = _option(64, low=1, high=1_000_000)
    output_tokens: int = _option(128, low=1, high=1_000_000)
    warm_s: float = _option(2.0)
    seconds: float = _option(20.0, low=0.001)
    num_jobs: int = _option(0)
    seed: int = _option(0)


@dataclass(frozen=True, slots=True)
class FleetSettings(ScenarioSection):
    """Several brokers on one journal, with light stand-ins for workers and clients (`specq.simulate.fleet`).

    Sections and keys that a fleet does not use have no effect. `draft.max_ahead` is the length of each draft.

    brokers          the number of brokers. 0: one without a journal, and the real verifiers and drafters.
    clients          of each broker. They share its sessions: the first has half of them.
    prefixes         the number of different beginnings of prompts.
    prefix_tokens    the tokens of such a beginning. 0: prompts have no tokens in common.
    lost_brokers, lost_verifiers, lost_drafters   the numbers that die at once, in the middle of the measured time.
    journal_stands_s the seconds for which the journal does nothing, from then on.
    """

    NAME = "fleet"
    brokers: int = _option(0, high=64)
    clients: int = _option(8, low=1, high=1024)
    prefixes: int = _option(100, low=1)
    prefix_tokens: int = _option(0)
    lost_brokers: int = _option(0)
    lost_verifiers: int = _option(0)
    lost_drafters: int = _option(0)
    journal_stands_s: float = _option(0.0)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One value of every setting."""

    engine: EngineSettings = field(default_factory=EngineSettings)
    draft: DrafterSettings = field(default_factory=DrafterSettings)
    network: NetworkSettings = field(default_factory=NetworkSettings)
    host: HostSettings = field(default_factory=HostSettings)
    machine: MachineSettings = field(default_factory=MachineSettings)
    traffic: TrafficSettings = field(default_factory=TrafficSettings)
    fleet: FleetSettings = field(default_factory=FleetSettings)
    speculation: Speculation = field(default_factory=Speculation)

    @classmethod
    def from_tables(cls, tables: dict[str, Any]) -> Self:
        """Build from a TOML file's tables; raises ConfigError that names section and key."""
        refuse_unknown("", tables, [*SECTIONS, "speculation"])
        for name, table in tables.items():
            if not isinstance(table, dict):
                raise ConfigError(f"{name} is {table!r}, but must be a section, [{name}]")
        sections: dict[str, Any] = {name: kind.from_table(tables.get(name, {})) for name, kind in SECTIONS.items()}
        try:
            speculation = Speculation.from_dict(tables.get("speculation", {}))
        except JobError as error:
            raise ConfigError(f"speculation: {error}") from None
        return cls(**sections, speculation=speculation)


SECTIONS: dict[str, type[ScenarioSection]] = {
    kind.NAME: kind
    for kind in (
        *(EngineSettings, DrafterSettings, NetworkSettings, HostSettings, MachineSettings, TrafficSettings),
        FleetSettings,
    )
}


def refuse_unknown(section: str, given: typing.Iterable[str], known: typing.Sequence[str]) -> None:
    """Raise ConfigError if a key of a section ("": a section) is unknown."""
    for key in given:
        if key not in known:
            label = f"key {section}.{key}" if section else f"section {key}"
            raise ConfigError(f"unknown {label}; {known_names(key, known)}")


def _coerce(key: str, value: Any, kind: Any) -> Any:
    """Return a TOML value as its key's type: a whole number is valid for a fraction, a number for a list of one."""
    if kind is int and type(value) is int:
        return value
    if kind is float and _is_number(value):
        return float(value)
    if kind == Floats and _is_number(value):
        return (float(value),)
    if kind == Floats and isinstance(value, list) and all(map(_is_number, value)):
        return tuple(map(float, value))
    if kind == Points and isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        return tuple(_coerce(key, pair, Floats) for pair in value)
    names = {int: "a whole number", float: "a number", Floats: "a number or a list of numbers"}
    raise ConfigError(f"{key} is {value!r}, but must be {names.get(kind, 'a list of [load, milliseconds]')}")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _check(key: str, value: Any, low: float, high: float) -> None:
    """Raise ConfigError unless a number, or each number of a list, is in its range; NaN never is."""
    if isinstance(value, tuple):
        for item in value:
            _check(key, item, low, high)
    elif not low <= value <= high:
        raise ConfigError(f"{key} is {value!r}, but must be from {low} to {high}")


def _check_points(key: str, points: Points) -> None:
    loads = [load for load, _ in points]
    if not points or any(a >= b for a, b in itertools.pairwise(loads)):
        raise ConfigError(f"{key} must be a list of [load, milliseconds] with loads that ascend; it is {list(points)}")
    if min(milliseconds for _, milliseconds in points) <= 0:
        raise ConfigError(f"{key} has a time of 0; a pass takes time")
