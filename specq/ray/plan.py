"""The plan of a deployment: which process runs on which node, with which arguments. Pure: no Ray, no clock, no I/O.

Rules:
- A process stays on its node while that node is alive.
- Brokers and gateways are spread over the nodes. Each has its own port, so a broker keeps its port when it moves.
- A verifier has all its GPUs on one node. If no node has enough, vLLM places its workers on several nodes.
- Draft workers run beside a verifier if there is room.
- An upgrade replaces one process at a time, and only while all others are ready.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import PurePath
from typing import Any

from specq import __version__
from specq.config import NO_ADDRESS, Config, Section, connect_address, options_of, section_name, to_arguments
from specq.journal import kind_of
from specq.processes.deployment import draft_section
from specq.protocol import ConfigError, parse_address

ROLES = ("broker", "target", "draft", "gateway")  # in the order in which an upgrade replaces them
SPREAD = ("broker", "gateway", "target")
PATHS = ("keys", "api_keys", "tls_cert", "tls_key")  # keys of sections
VLLM = "vllm"
OVER_NODES = 'distributed_executor_backend="ray"'  # vLLM's own option
GPUS_SEEN = "CUDA_VISIBLE_DEVICES"
READY, STARTING, STOPPING = "ready", "starting", "stopping"


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A living node: its id, the address where others reach it, and its resources."""

    node_id: str
    address: str
    cpus: float = 0.0
    gpus: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeCheck:
    """What a node says of itself: its version of specq, and whether Ray asks for a token there."""

    version: str
    has_token: bool


def check_node(node: ClusterNode, found: NodeCheck) -> None:
    """Raise ConfigError for a node that is open to others, or has another version of specq."""
    if not found.has_token and not ip_address(node.address).is_loopback:
        raise ConfigError(
            f"node {node.address} of the Ray cluster can be reached without authentication, so others could run "
            "programs on it; start Ray with RAY_AUTH_MODE=token on all nodes (ray get-auth-token --generate)"
        )
    if found.version != __version__:
        raise ConfigError(f"node {node.address} has specq {found.version}, not {__version__}; install the same")


@dataclass(frozen=True, slots=True)
class Numbers:
    """How many processes of each role there should be."""

    broker: int = 1
    target: int = 1
    draft: int = 0
    gateway: int = 0

    def names(self) -> list[tuple[str, str]]:
        """Return (name, role) of each process."""
        return [(f"{role}-{i}", role) for role in ROLES for i in range(1, getattr(self, role) + 1)]


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process: what Ray needs to place it, and the arguments of `specq`.

    - address: where it listens, "" for workers.
    - brokers: addresses of all brokers, for `--broker`; a change of these alone does not restart a process.
    """

    name: str
    role: str
    node_id: str
    arguments: tuple[str, ...]
    cpus: float
    gpus: float
    address: str = ""
    brokers: tuple[str, ...] = ()
    version: str = __version__

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the process, given its actor's, in which Ray names the actor's GPUs.

        A process without GPUs sees none, except if vLLM places its own workers.
        """
        others = {name: value for name, value in given.items() if name != GPUS_SEEN}
        if OVER_NODES in self.arguments:
            return others
        return dict(given) if self.gpus else others | {GPUS_SEEN: ""}

    def is_as(self, other: ProcessSpec) -> bool:
        """Return whether a process of the other specification may go on under this one."""
        return replace(self, brokers=()) == replace(other, brokers=())


@dataclass(frozen=True, slots=True)
class PlacedProcesses:
    """All processes that have a place, and a reason for each that has none."""

    processes: tuple[ProcessSpec, ...]
    waiting: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Need:
    """What one process takes of its node. `spans`: it takes GPUs of several nodes, which vLLM chooses."""

    name: str
    role: str
    cpus: float
    gpus: float
    spans: bool = False


def start_numbers(config: Config) -> Numbers:
    """Return the least numbers: those of a deployment without load. Automatic draft workers begin with one."""
    drafters = config.up.drafters if config.up.drafters >= 0 else min(1, config.ray.max_drafters)
    return Numbers(config.ray.brokers, config.up.targets, drafters, config.ray.brokers if config.up.serve else 0)


def most_numbers(config: Config) -> Numbers:
    """Return the largest numbers."""
    least, ray = start_numbers(config), config.ray
    return replace(least, target=max(least.target, ray.max_targets), draft=max(least.draft, ray.max_drafters))


def one_address(nodes: Iterable[ClusterNode]) -> str:
    """Return the address of the only machine, or "" if there are several."""
    found = {node.address for node in nodes}
    return found.pop() if len(found) == 1 else ""


def check_config(config: Config) -> None:
    """Raise ConfigError for a configuration that cannot serve on a cluster."""
    journal = config.broker.journal
    if config.ray.brokers > 1 and kind_of(journal) != "postgresql":
        raise ConfigError(
            f"ray.brokers is {config.ray.brokers}, and broker.journal is {journal or 'a file'}; several brokers need "
            "journal = postgresql://USER@HOST/DATABASE (docs/guides/postgresql.md)"
        )
    _check_ports(config)
    _check_keys(config)
    gpus = config.ray.draft_gpus
    if gpus != round(gpus, 0 if gpus > 1 else 4):  # Ray refuses it when the actor starts
        raise ConfigError(f"ray.draft_gpus is {gpus}; give a whole number, or a fraction with up to 4 decimals below 1")
    for section in (config.broker, config.target, config.draft, config.serve):
        for name in PATHS:
            value = getattr(section, name, "")
            if value and not PurePath(value).is_absolute():
                whose = section_name(type(section))
                raise ConfigError(f"{whose}.{name} is {value}; give an absolute path, the same on every node")
    for name, most, least in (
        ("max_targets", config.ray.max_targets, config.up.targets),
        ("max_drafters", config.ray.max_drafters, config.up.drafters),
    ):
        if most and most < least:
            raise ConfigError(f"ray.{name} is {most}, less than {least} in section up; raise it, or leave it out")


def _check_ports(config: Config) -> None:
    """Raise ConfigError unless each broker, gateway and verifier has a port of its own, whichever node it gets."""
    most = most_numbers(config)
    taken: dict[int, str] = {}
    for name, bind, number in (
        ("broker.bind", config.broker.bind, most.broker),
        ("serve.bind", config.serve.bind, most.gateway),
    ):
        found = parse_address(bind)
        if not found.is_tcp or found.is_any_port:
            raise ConfigError(f"{name} is {bind}; specq ray up needs tcp:// and a fixed port")
        if found.port + number > 1 << 16:
            raise ConfigError(f"{name} takes {number} ports from {found.port} on; ports are 1 to 65535")
        for port in range(found.port, found.port + number):
            if port in taken:
                raise ConfigError(
                    f"{name} and {taken[port]} both take port {port}: {name} takes {number} from {found.port} on; give "
                    "them ports further apart"
                )
            taken[port] = name
    bind = config.target.bind
    port = 0 if bind == NO_ADDRESS else parse_address(bind).port
    if port and most.target > 1:
        raise ConfigError(f"target.bind is {bind}; several verifiers need port *")
    if port in taken:
        raise ConfigError(f"target.bind and {taken[port]} both take port {port}; give them different ports")


def _check_keys(config: Config) -> None:
    """Raise ConfigError for a section without keys beside others with keys: the broker would not answer it."""
    most, keys = most_numbers(config), config.broker.keys
    for section, number in ((config.target, most.target), (config.draft, most.draft), (config.serve, most.gateway)):
        if number and bool(section.keys) != bool(keys):
            given, lacks = ("broker", section_name(type(section)))[:: 1 if keys else -1]
            raise ConfigError(f"{given}.keys is set and {lacks}.keys is not; give keys in both sections or in neither")


def plan(
    config: Config,
    nodes: Sequence[ClusterNode],
    numbers: Numbers,
    kept: Mapping[str, str] = {},
    only_at: str = "",
) -> PlacedProcesses:
    """Return what runs where. `kept`: the present node of each process. `only_at`: the machine of a local deployment.

    Raises ConfigError if an address may not be used (`check_bind`).
    """
    usable = [node for node in nodes if node.address == only_at or not only_at]
    needs = [_need(config, name, role, usable) for name, role in numbers.names()]
    places, waiting = place(needs, usable, kept)
    hosts = {node.node_id: node.address for node in usable}
    arguments = _Arguments(config, is_local=bool(only_at))
    fronts = tuple(
        arguments.listen(config.broker.bind, one.name, hosts[places[one.name]])[1]
        for one in needs
        if one.role == "broker" and one.name in places
    )
    found = tuple(
        arguments.spec(one, places[one.name], hosts[places[one.name]], fronts) for one in needs if one.name in places
    )
    return PlacedProcesses(found, waiting)


def _need(config: Config, name: str, role: str, nodes: Sequence[ClusterNode]) -> Need:
    if role == "target":
        gpus = target_gpus(config, has_gpus=any(node.gpus for node in nodes))
        there = [node.gpus for node in nodes] or [0.0]
        spans = config.target.engine == VLLM and max(there) < gpus <= sum(there)
        return Need(name, role, config.target.threads or 1, 0.0 if spans else gpus, spans)
    if role == "draft":
        gpus = config.ray.draft_gpus or float(config.draft.device.startswith("cuda"))
        return Need(name, role, config.draft.threads or 1, gpus)
    return Need(name, role, 1, 0)


def target_gpus(config: Config, *, has_gpus: bool) -> float:
    """Return the GPUs of a verifier: its tensor-parallel size, 0 on a CPU. `auto`: a GPU if the cluster has one."""
    device = config.target.device
    if device == "cpu" or (device == "auto" and not has_gpus):
        return 0.0
    size = options_of(config.target).get("tensor_parallel_size", 1)
    return float(max(size, 1)) if isinstance(size, int) else 1.0


# --- placing ----------------------------------------------------------------------------------------------------------


def place(
    needs: Sequence[Need], nodes: Sequence[ClusterNode], kept: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the node id of each process that has a place, and a reason for each other one.

    Verifiers choose before draft workers. Who has a place keeps it.
    """
    room = {node.node_id: [node.cpus, node.gpus] for node in nodes}
    places: dict[str, str] = {}
    roles = {need.name: need.role for need in needs}
    ordered = sorted(needs, key=lambda need: (kept.get(need.name) not in room, ROLES.index(need.role)))
    waiting: dict[str, str] = {}
    for need in ordered:
        fits = [one for one, (cpus, gpus) in room.items() if cpus >= need.cpus and gpus >= need.gpus]
        former = kept.get(need.name)
        if former in fits:
            places[need.name] = former
        elif fits:
            places[need.name] = min(fits, key=lambda one: _cost(need, one, places, roles, room))
        else:
            waiting[need.name] = _too_little(need, nodes)
            continue
        room[places[need.name]][0] -= need.cpus
        room[places[need.name]][1] -= need.gpus
    return places, waiting


def _cost(
    need: Need, node_id: str, places: Mapping[str, str], roles: Mapping[str, str], room: Mapping[str, list[float]]
) -> tuple[Any, ...]:
    """Return what to minimize when a process chooses a node."""
    there = [roles[name] for name, place in places.items() if place == node_id]
    cpus, gpus = room[node_id]
    if need.role in SPREAD:
        return there.count(need.role), gpus - need.gpus, -cpus
    verifiers = there.count("target")
    return not verifiers, there.count("draft") / max(verifiers, 1), gpus - need.gpus, -cpus


def _too_little(need: Need, nodes: Sequence[ClusterNode]) -> str:
    wanted = f"{need.cpus:g} CPUs" + (f" and {need.gpus:g} GPUs" if need.gpus else "")
    return f"{need.name} needs {wanted} on one node, and none of {len(nodes)} nodes has that free"


# --- arguments --------------------------------------------------------------------------------------------------------


class _Arguments:
    """The arguments of `specq` for each role."""

    def __init__(self, config: Config, *, is_local: bool) -> None:
        self.config, self.is_local = config, is_local

    def listen(self, bind: str, name: str, host: str) -> tuple[str, str]:
        """Return where a process listens on a node, and where others reach it.

        On the only machine, this is the configured address. A wildcard stays one.
        """
        asked, number = parse_address(bind), int(name.rpartition("-")[2])
        own = replace(asked, port=asked.port + number - 1) if asked.port else asked
        if asked.is_wildcard:
            return own.at(asked.host), own.at(host)
        found = own.at(asked.host if self.is_local else host)
        return found, connect_address(found)

    def spec(self, need: Need, node_id: str, host: str, brokers: tuple[str, ...]) -> ProcessSpec:
        arguments, address = getattr(self, f"_{need.role}")(need, host)
        known = brokers if need.role != "broker" else ()
        return ProcessSpec(need.name, need.role, node_id, tuple(arguments), need.cpus, need.gpus, address, known)

    def _broker(self, need: Need, host: str) -> tuple[list[str], str]:
        bind, address = self.listen(self.config.broker.bind, need.name, host)
        section = replace(self.config.broker, bind=bind, advertise=address if address != bind else "")
        return ["broker", *to_arguments(section)], address

    def _target(self, need: Need, host: str) -> tuple[list[str], str]:
        section = replace(self.config.target, name=need.name)
        if section.bind != "none" and not self.is_local:
            section = replace(section, bind=parse_address(section.bind).at(host), advertise="")
        if need.spans:
            section = replace(section, engine_options=(*section.engine_options, OVER_NODES))
        return ["worker", "--role", "target", *_without_broker(section)], ""

    def _draft(self, need: Need, host: str) -> tuple[list[str], str]:
        section = replace(draft_section(self.config), name=need.name)
        return ["worker", "--role", "draft", *_without_broker(section)], ""

    def _gateway(self, need: Need, host: str) -> tuple[list[str], str]:
        bind, address = self.listen(self.config.serve.bind, need.name, host)
        return ["serve", *_without_broker(replace(self.config.serve, bind=bind))], address


def _without_broker(section: Section) -> list[str]:
    """Return the options of a section; `ProcessSpec.brokers` has the brokers."""
    default = next(f.default for f in type(section).__dataclass_fields__.values() if f.name == "broker")
    return to_arguments(replace(section, broker=default))  # type: ignore[call-arg]


# --- steps ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Running:
    """A process that is there: its specification, and READY, STARTING or STOPPING."""

    spec: ProcessSpec
    state: str


def next_steps(wanted: Sequence[ProcessSpec], present: Mapping[str, Running]) -> list[tuple[str, str]]:
    """Return the next steps towards the plan, ("start" or "stop", name) each.

    What is missing starts at once, and what is too much stops at once. Of what differs, one process at a time is
    replaced, in the order of ROLES, while all others are ready. Workers need not be, if a broker's address changes.
    """
    names = {spec.name for spec in wanted}
    steps = [("start", spec.name) for spec in wanted if spec.name not in present]
    steps += [("stop", name) for name, one in present.items() if name not in names and one.state != STOPPING]
    if steps or any(present[name].state == STOPPING for name in names):
        return steps
    stale = [spec for spec in wanted if not spec.is_as(present[spec.name].spec)]
    fresh = [spec for spec in wanted if spec not in stale]
    moved = [spec for spec in stale if spec.role == "broker" and spec.address != present[spec.name].spec.address]
    if moved and all(present[spec.name].state == READY for spec in fresh if spec.role == "broker"):
        return [("stop", moved[0].name)]  # the workers wait for it at its new address
    if stale and all(present[spec.name].state == READY for spec in fresh):
        unready = [spec for spec in stale if present[spec.name].state != READY]  # these serve nobody
        chosen = (unready or sorted(stale, key=lambda spec: ROLES.index(spec.role)))[0]
        return [("stop", chosen.name)]
    return []
