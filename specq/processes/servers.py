"""specq's processes for a demo, a chat or a benchmark, on a free port. They are always stopped."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Self

from specq.client import Client
from specq.config import Config, free_address, load
from specq.processes.deployment import placed
from specq.processes.up import Group, Member, members, table
from specq.runtime import Tell
from specq.transport import own_keys

READY_S = 180.0
ANY_PORT = "tcp://127.0.0.1:*"


def pair_config(model: str, draft_model: str, drafters: int, keys: str = "") -> Config:
    """Return the configuration of a broker on a free port, one target and some drafters; `keys`: as of `specq up`."""
    config = on_free_port(load())
    return replace(
        config,
        up=replace(config.up, targets=1, drafters=drafters),
        broker=replace(config.broker, keys=keys),
        target=replace(config.target, model=model, keys=keys),
        draft=replace(config.draft, model=draft_model, keys=keys),
    )


def on_free_port(config: Config) -> Config:
    """Return the configuration for private processes: on a free port, without HTTP."""
    broker, target = replace(config.broker, bind=free_address()), replace(config.target, bind=ANY_PORT, advertise="")
    return replace(config, broker=broker, target=target, up=replace(config.up, serve=False))


class Servers:
    """A broker, its workers and a client. The broker's journal, if any, is temporary.

    Raises ConfigError if a process has no key although keys are set.
    """

    def __init__(self, config: Config, drafters_at: str = "", stdout: int | None = None) -> None:
        """`drafters_at`: broker address for the drafters, if different; `stdout`: as in `Group`."""
        self.config, self.keys, self.drafters = config, config.broker.keys, placed(config).up.drafters
        self.address, self._drafters_at, self._stdout = config.broker.bind, drafters_at, stdout
        check_keys(self.keys, "broker", "target", *(["draft"] if self.drafters else []), "client")

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            folder = stack.enter_context(TemporaryDirectory())
            self._group = stack.enter_context(Group(self._members(folder), self.keys, self._stdout))
            self.client = stack.enter_context(Client(self.address, timeout_s=60.0, keys=self.keys))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def _members(self, folder: str) -> list[Member]:
        broker = self.config.broker
        journal = broker.journal if broker.journal == "none" else f"{folder}/journal"
        found = members(replace(self.config, broker=replace(broker, journal=journal)), ["--log-level", "warning"])
        return [self._moved(member) if self._drafters_at else member for member in found]

    def _moved(self, member: Member) -> Member:
        """Return a drafter with the other broker address; other members unchanged."""
        if member.arguments[:3] != ("worker", "--role", "draft"):
            return member
        arguments = (self._drafters_at if part == self.address else part for part in member.arguments)
        return replace(member, arguments=tuple(arguments))

    def process_id(self, name: str) -> int:
        """Return the process id of a member of the group."""
        return self._group.processes[name].pid

    def table(self) -> str:
        """Return one line per process: its name, process id, cores and models."""
        return table(self._group)

    def pids(self) -> dict[str, int]:
        """Return the id of each process by its name."""
        return {name: process.pid for name, process in self._group.processes.items()}

    def wait_ready(self, timeout_s: float = READY_S, tell: Tell = bool) -> None:
        """Wait until all workers are ready; `tell`: as in `Group`.

        Raises EngineError, which names the process, if one ends or is late.
        """
        self._group.wait_ready(timeout_s, tell=tell)

    def tend(self) -> None:
        """Restart dead workers. Raises EngineError, which names the process, after too many restarts."""
        self._group.check()


def check_keys(keys: str, *roles: str) -> None:
    """Raise ConfigError if `keys` is set and lacks the key of a role."""
    for role in roles if keys else ():
        own_keys(keys, role)


def keys_option(keys: str) -> list[str]:
    """Return the command-line option for these keys."""
    return ["--keys", keys] if keys else []
