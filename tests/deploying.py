"""A broker, verifiers and draft workers of `tiny` as processes, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from specq import Client
from specq.config import free_address, load
from specq.processes.up import Group, members

READY_S = 120
QUESTION = [{"role": "user", "content": "Tom has 3 boxes with 12 pencils each. How many pencils are there?"}]


def group_of(log_level: str = "error", **sections: dict[str, Any]) -> Group:
    """Return the processes of a configuration that has these values in these sections; the rest is the default.
    Draft workers keep their priority: otherwise few drafts would come on a busy machine.
    """
    values: dict[str, dict[str, Any]] = {
        "up": {},
        "broker": {"bind": free_address()},
        "target": {"model": "tiny"},
        "draft": {"nice": 0},
        "serve": {},
    }
    config = load()
    changed = {name: replace(getattr(config, name), **usual | sections.pop(name, {})) for name, usual in values.items()}
    assert not sections, f"there is no section {', '.join(sections)}"
    return Group(members(replace(config, **changed), ["--log-level", log_level]))


@contextmanager
def ready(group: Group) -> Iterator[Group]:
    """Run a group; yield it when all of its processes are ready."""
    with group:
        group.wait_ready(READY_S)
        yield group


@contextmanager
def connected(group: Group) -> Iterator[Client]:
    """Run a group; yield a client of it when all of its processes are ready."""
    with ready(group), Client(group.address) as client:
        yield client
