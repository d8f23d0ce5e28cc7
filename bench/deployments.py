"""specq's own processes for a suite: a deployment, and several of them that run while they are needed.

Rule: they start one by one, because a verifier measures its steps when it starts, and drafters their passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from bench.scenario import MADE_OF, draft_model
from specq.config import Config
from specq.processes.servers import READY_S, Servers, pair_config

Starter = Callable[[], AbstractContextManager[Servers]]


def deployment(
    target: str, draft: str = "", drafters: int = 0, *, keys: str = "", has_journal: bool = False, **verifier: Any
) -> Config:
    """Return a broker, a verifier with further options, and draft workers."""
    made = pair_config(target, draft, drafters, keys)
    made = replace(made, target=replace(made.target, **verifier))
    return made if has_journal else replace(made, broker=replace(made.broker, journal="none"))


def starter(made: Callable[[str], Config], draft: str = "", made_of: str = MADE_OF) -> Starter:
    """Return a function that starts the deployment that `made` returns for a draft model.

    The draft model may be created temporarily: see `draft_model`.
    """

    @contextmanager
    def start() -> Iterator[Servers]:
        with draft_model(draft, made_of) as model, Servers(made(model)) as servers:
            yield servers

    return start


class Deployments:
    """The running deployments, by a name for their content."""

    def __init__(self, ready_s: float = READY_S) -> None:
        """Start empty. `ready_s`: time within which each must be ready."""
        self._ready_s = ready_s
        self._running: dict[str, tuple[Servers, ExitStack]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop_all_but(())

    def serve(self, wanted: Mapping[str, Starter]) -> dict[str, Servers]:
        """Stop the groups that are not wanted, start missing ones, and return all by name, ready."""
        self._stop_all_but(wanted)
        for name, start in wanted.items():
            if name not in self._running:
                self._start(name, start)
        return {name: self._running[name][0] for name in wanted}

    def _start(self, name: str, start: Starter) -> None:
        with ExitStack() as stack:
            servers = stack.enter_context(start())
            servers.wait_ready(self._ready_s)
            self._running[name] = servers, stack.pop_all()

    def _stop_all_but(self, wanted: Mapping[str, Starter] | tuple[()]) -> None:
        with ExitStack() as stack:
            for name in [name for name in self._running if name not in wanted]:
                stack.push(self._running.pop(name)[1])
