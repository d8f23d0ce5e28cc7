"""A group of processes on this machine, started and stopped together: broker, verifiers, drafters, perhaps a gateway.

    with Group(members(config)) as group:
        group.wait_ready(timeout_s=60)

Rules:
- The processes do not share cores. Two processes that compute on one core slow each other many times over.
- No process outlives the group. On Linux this holds even if the group is killed.
- A worker that dies is reported and restarted after a delay, which doubles each time.
- The group stops after too many restarts, for wrong options or files of a worker, or if the broker dies.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import click

from specq import Client
from specq.config import (
    MTP,
    NO_ADDRESS,
    BrokerConfig,
    Config,
    Section,
    ServeConfig,
    connect_address,
    environment_of_children,
    to_arguments,
)
from specq.processes.deployment import (
    check_can_start,
    divide_cores,
    draft_section,
    drafts_itself,
    notes,
    placed,
    this_machine,
    with_helpers,
)
from specq.protocol import ConfigError, EngineError, JobError, parse_address
from specq.runtime import Readiness, Tell, available_cores, columns, reap
from specq.transport import Stop, directory_of, listener, listens, own_keys

POLL_S = 0.2
PATIENCE_S = 10.0  # time for a process to end before it is killed
MOST_RESTARTS, WINDOW_S = 5, 600.0  # restarts of one worker, within this many seconds
BACKOFF_S = 0.5  # delay of the first restart
WRONG_OPTIONS = 2  # exit status of a process that would fail again (see `specq.cli`)
PROGRAM = ("-m", "specq")
GATEWAY = "gateway"  # name of the HTTP process, which the broker does not know
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Member:
    """A process of the group: its name, `specq` arguments, cores and a description."""

    name: str
    arguments: tuple[str, ...]
    cores: tuple[int, ...]
    about: str


def members(config: Config, extra: Sequence[str] = ()) -> list[Member]:
    """Return the processes of a configuration, the broker first; each gets the `extra` arguments.

    Raises ConfigError for addresses that cannot serve several processes.
    """
    machine, address = this_machine(), _broker_address(config)
    here, asked, config = machine.cores, config, placed(config, machine)
    shares = divide_cores(len(here), config.up.targets, config.up.drafters)
    broker = replace(config.broker, cores=config.broker.cores or _ids(here, shares.broker))
    draft = replace(draft_section(config), broker=address)
    target = with_helpers(config, _ids(here, shares.broker)) if len(here) > 1 else config.target
    if drafts_itself(config, asked):
        target = replace(target, heads=MTP)  # the verifier starts even if it cannot load them
    return [
        Member("broker", ("broker", *to_arguments(broker), *extra), broker.cores, address),
        *_workers("target", replace(target, broker=address), [_ids(here, s) for s in shares.targets], extra),
        *_workers("draft", draft, [_ids(here, s) for s in shares.drafters], extra),
        *([_gateway(config, address, broker.cores, extra)] if config.up.serve else []),
    ]


def _gateway(config: Config, address: str, cores: tuple[int, ...], extra: Sequence[str]) -> Member:
    """Return the HTTP process. It shares the broker's core."""
    section = replace(config.serve, broker=address, cores=config.serve.cores or cores)
    if parse_address(section.bind).is_any_port:
        raise ConfigError(f"serve.bind is {section.bind}; specq up needs a fixed port")
    if connect_address(section.bind) == address:
        raise ConfigError(f"serve.bind and broker.bind are both at {address}; use different ports")
    return Member(GATEWAY, ("serve", *to_arguments(section), *extra), section.cores, section.bind)


def _ids(here: Sequence[int], share: Sequence[int]) -> tuple[int, ...]:
    return tuple(here[i] for i in share)


def _workers(role: str, section: Any, shares: Sequence[tuple[int, ...]], extra: Sequence[str]) -> list[Member]:
    found = []
    for number, share in enumerate(shares, 1):
        cores = section.cores or share
        name = f"{section.name or role}-{number}"
        own: Section = replace(section, name=name, cores=cores, threads=section.threads or len(cores))
        found.append(Member(name, ("worker", "--role", role, *to_arguments(own), *extra), cores, _about(section)))
    return found


def _about(section: Any) -> str:
    """Return the models of a worker, with the draft models and heads in its process."""
    heads = f"the heads {section.heads}" if section.heads else ""
    heads = "its own MTP layer" if section.heads and section.heads in (MTP, section.model) else heads
    drafting = [one for one in (getattr(section, "draft_model", ""), heads) if one]
    return f"{section.model}, drafted for by {' and '.join(drafting)}" if drafting else str(section.model)


def _broker_address(config: Config) -> str:
    """Return the address where workers connect to the broker."""
    if parse_address(config.broker.bind).is_any_port:
        raise ConfigError(f"broker.bind is {config.broker.bind}; specq up needs a fixed port")
    own = config.target.bind
    if config.up.targets > 1 and own != NO_ADDRESS and not parse_address(own).is_any_port:
        raise ConfigError(f"target.bind is {config.target.bind}; several targets need port *")
    return connect_address(config.broker.bind)


class Group:
    """Processes that start and stop together. Start it in the main thread, whose end also ends the processes.

    keys     as of the broker
    stdout   file descriptor for their standard output; None: that of this process
    """

    def __init__(self, members: Sequence[Member], keys: str = "", stdout: int | None = None) -> None:
        self.members, self.keys, self._stdout = list(members), keys, stdout
        self.address = members[0].about
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._deaths: dict[str, list[float]] = {member.name: [] for member in members}  # times of recent deaths
        self._due: dict[str, float] = {}  # name -> time of the next restart

    def __enter__(self) -> Self:
        for member in self.members:
            self.processes[member.name] = _start(member, self._stdout)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def wait_ready(
        self, timeout_s: float = float("inf"), asked: Callable[[], object] = bool, tell: Tell = bool
    ) -> bool:
        """Wait until the broker reports all workers as ready; False if `asked` returns true before. Progress: `tell`.

        Raises EngineError if a process ends for good, or after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        readiness = Readiness([member.name for member in self.members], tell, time.monotonic())
        with Client(self.address, timeout_s=POLL_S, keys=self.keys) as client:
            while not asked():
                self.check()
                if readiness.note(self._ready(client), time.monotonic()):
                    return True
                if time.monotonic() > deadline:
                    raise EngineError(f"not all processes were ready within {timeout_s:g} s")
                time.sleep(POLL_S)
        return False

    def _ready(self, client: Client) -> set[str]:
        """Return the broker's name, once it replies, and the names of the ready workers."""
        try:
            workers = client.status()["workers"]
        except JobError:
            return set()
        ready = {self.members[0].name, *(worker["name"] for worker in workers if worker["state"] == "ready")}
        return ready | {
            member.name for member in self.members if member.name == GATEWAY and listens(connect_address(member.about))
        }

    def check(self) -> None:
        """Restart dead workers when due. Raises EngineError for an ended process that must not restart."""
        now = time.monotonic()
        for member in self.members:
            if self.processes[member.name].poll() is None:
                continue
            if member.name not in self._due:
                self._due[member.name] = now + self._delay(member, now)
            if now >= self._due[member.name]:
                del self._due[member.name]
                self.processes[member.name] = _start(member, self._stdout)

    def _delay(self, member: Member, now: float) -> float:
        """Return the delay in seconds before an ended process restarts. Raises EngineError if it must not restart."""
        process = self.processes[member.name]
        said = f"{member.name} (process {process.pid}) ended with {_status_text(process.returncode)}"
        recent = self._deaths[member.name] = [at for at in self._deaths[member.name] if at > now - WINDOW_S] + [now]
        if member is self.members[0] or process.returncode == WRONG_OPTIONS:
            raise EngineError(said)
        if len(recent) > MOST_RESTARTS:
            raise EngineError(f"{said}, {len(recent)} times within {WINDOW_S:g} s")
        delay = BACKOFF_S * 2 ** (len(recent) - 1)
        click.echo(f"specq: {said}; restarting it in {delay:g} s ({len(recent)} of {MOST_RESTARTS})", err=True)
        return float(delay)

    def stop(self, patience_s: float = PATIENCE_S) -> None:
        """Terminate all processes, the broker after the workers. Kill a process that does not end in time."""
        deadline = time.monotonic() + patience_s
        broker, workers = self.members[0].name, [member.name for member in self.members[1:]]
        for wave in (workers, [broker]):
            ending = [self.processes[name] for name in wave if name in self.processes]
            for process in ending:
                process.terminate()
            for process in ending:
                reap(process, max(1.0, deadline - time.monotonic()))


def _check_free(members: Sequence[Member]) -> None:
    """Raise ConfigError if another process listens on one of our addresses.

    Otherwise its workers or its gateway would count as ours.
    """
    _check_no_broker(members[0].about)
    for address in (member.about for member in members if member.name == GATEWAY):
        _check_no_server(address)


def _check_no_server(address: str) -> None:
    """Raise ConfigError if the gateway cannot listen on the address."""
    listener(address, backlog=1).close()


def _check_no_broker(address: str) -> None:
    """Raise ConfigError if a process already listens on the broker's address."""
    if parse_address(address).is_tcp and listens(address):
        raise ConfigError(
            f"another process listens on {address}; if it is a broker, use `specq status` or `specq chat`. "
            "Stop it, or use another address (--broker)"
        )


def keys_of_broker(config: BrokerConfig) -> str:
    """Return the option `keys` of a client that uses the broker's own key; "" without keys."""
    return str(directory_of(config.keys) / own_keys(config.keys, "broker").name) if config.keys else ""


def _status_text(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    cause = " (was a mapped model or cache file cut?)" if -status == signal.SIGBUS else ""
    return signal.Signals(-status).name + cause


def _start(member: Member, stdout: int | None) -> subprocess.Popen[bytes]:
    """Start a process in its own session. Ctrl-C reaches only the group, which then stops all in order."""
    return subprocess.Popen(
        [sys.executable, *PROGRAM, *member.arguments],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        env=environment_of_children(),
        start_new_session=True,
        preexec_fn=first_in_child(os.getpid()),  # noqa: PLW1509 - the child runs only system calls
    )


def first_in_child(parent: int, death_signal: int = signal.SIGTERM) -> Callable[[], None]:
    """Return the first function of a child, which uses all cores.

    When the thread of `parent` that started it ends, the child receives `death_signal` (where prctl exists).
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    cores = available_cores()

    def begin() -> None:
        if hasattr(os, "sched_setaffinity"):  # some OpenMP libraries leave a forked child with one core
            os.sched_setaffinity(0, cores)
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, death_signal)
        if os.getppid() != parent:
            os._exit(1)

    return begin


def run(config: Config, extra: Sequence[str] = ()) -> int:
    """Run the group until SIGTERM or SIGINT. Return the exit status: 1 if a process ended for good."""
    stop = Stop()
    group_members = members(telling(config), extra)
    check_can_start(config)
    _check_free(group_members)
    with Group(group_members, keys_of_broker(config.broker)) as group:
        for line in (*notes(config), table(group)):
            click.echo(line)
        started = time.monotonic()
        try:
            if group.wait_ready(asked=lambda: stop.asked, tell=click.echo):
                click.echo(f"ready after {time.monotonic() - started:.1f} s at {group.address}; Ctrl-C stops all")
                for page in pages(group.members, config.serve):
                    click.echo(f"HTTP API and page: {page}")
            while not stop:
                group.check()
                time.sleep(POLL_S)
        except EngineError as error:
            click.echo(f"specq: {error}; stopping the others", err=True)
            return 1
    click.echo("stopped")
    return 0


def telling(config: Config) -> Config:
    """Return the configuration of workers that print their progress until they are ready."""
    return replace(config, target=replace(config.target, progress=True), draft=replace(config.draft, progress=True))


def pages(members: Sequence[Member], serve: ServeConfig) -> list[str]:
    """Return the gateway's URL for a browser on this machine, or [] without a gateway."""
    scheme = "https" if serve.tls_cert else "http"
    found = [connect_address(member.about) for member in members if member.name == GATEWAY]
    return [f"{scheme}://{address.removeprefix('tcp://')}/" for address in found]


def table(group: Group) -> str:
    """Return one line per process: its name, process id, cores and models."""
    rows = [
        (m.name, f"process {group.processes[m.name].pid}", f"core {','.join(map(str, m.cores))}", m.about)
        for m in group.members
    ]
    return columns(rows)
