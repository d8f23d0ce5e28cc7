"""`specq ray up|status|down`: connects to a cluster, checks it, starts and stops its controller.

Rule: nothing starts on a cluster that other machines can reach without Ray's token authentication. A program
that reaches Ray's ports can otherwise run any other program there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from specq import __version__
from specq.config import Config, ray_address
from specq.journal import kind_of
from specq.protocol import ConfigError, EngineError
from specq.ray.actors import NAMESPACE, PROGRAM
from specq.ray.controller import FAILED, NAME, ClusterController, ClusterStatus, living_nodes
from specq.ray.plan import ClusterNode, NodeCheck, check_config, check_node, one_address, plan, start_numbers
from specq.runtime import columns
from specq.transport import listens

ATTEMPTS = 10  # to reach a head; one takes at most a quarter of a second
ANSWER_S = 30.0  # for a node or the controller
DRAIN_S = 3600.0  # more than any process takes to stop
LOOK_S = 0.5
WHAT_NOW = "the other processes run on; correct this and repeat `specq ray up`, or stop all with `specq ray down`"
FAILED_S = 12.0  # two attempts; one may fail for a port that is not free yet
HOW_TO_START = (
    "start one: ray start --head (docs/guides/ray.md), or name it in RAY_ADDRESS. A cluster with a token does not "
    "answer without it: RAY_AUTH_MODE=token, and the head's ~/.ray/auth_token here"
)


@contextmanager
def connected() -> Iterator[None]:
    """Connect to the cluster of RAY_ADDRESS, or to this machine's. Raises ConfigError if there is none."""
    named = ray_address()
    if named and not any(listens(f"tcp://{named}") for _ in range(ATTEMPTS)):  # Ray would try for many minutes
        raise ConfigError(f"no Ray cluster can be reached (nothing listens at {named}); {HOW_TO_START}")
    try:
        ray.init(address="auto", namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RayError, RuntimeError, ValueError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(f"no Ray cluster can be reached ({said[0][:200]}); {HOW_TO_START}") from None
    try:
        yield
    finally:
        ray.shutdown()


def _check_here() -> NodeCheck:
    from ray._private.authentication.authentication_utils import is_token_auth_enabled

    return NodeCheck(__version__, is_token_auth_enabled())


def check_nodes(nodes: Sequence[ClusterNode]) -> None:
    """Ask all nodes. Raises ConfigError for one that cannot run specq, or must not (`check_node`)."""
    asked = [
        ray.remote(_check_here)
        .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False))
        .remote()
        for node in nodes
    ]
    for node, answer in zip(nodes, asked, strict=True):
        try:
            found: NodeCheck = ray.get(answer, timeout=ANSWER_S)
        except (RayError, ModuleNotFoundError) as error:
            said = str(error).strip().splitlines()[-1][:200]
            raise ConfigError(f"node {node.address} cannot run specq ({said}); install specq[ray] there") from None
        check_node(node, found)


def up(config: Config, tell: Callable[[str], object], program: Sequence[str] = PROGRAM, wait_s: float = 600.0) -> None:
    """Start the deployment, or change a running one to this configuration; return when all is ready.

    Raises ConfigError if it cannot start, EngineError if it is not ready after `wait_s` seconds.
    """
    check_config(config)
    for address in (config.broker.journal, config.serve.batches):
        check_database(address)
    nodes = living_nodes()
    check_nodes(nodes)
    only_at = one_address(nodes)
    planned = plan(config, nodes, start_numbers(config), only_at=only_at)
    for reason in planned.waiting.values():
        raise ConfigError(f"{reason}; add a node (ray start), or lower the numbers in section up or ray")
    _replace_controller(config, only_at, tuple(program))
    _wait_settled(tell, time.monotonic() + wait_s)


def check_database(address: str) -> None:
    """Raise ConfigError for a PostgreSQL address that has a password or is not valid."""
    if kind_of(address) == "postgresql":
        from specq.journal.postgres.address import parse

        parse(address)


def _replace_controller(config: Config, only_at: str, program: tuple[str, ...]) -> None:
    """Start a controller, instead of the present one. Its processes go on."""
    former = find_controller()
    if former is not None:
        ray.kill(former, no_restart=True)
    until = time.monotonic() + ANSWER_S
    while True:
        try:
            made = ray.remote(ClusterController).options(
                name=NAME,
                namespace=NAMESPACE,
                lifetime="detached",
                max_restarts=-1,
                max_task_retries=-1,
                max_concurrency=4,
                num_cpus=0,
            )
            made.remote(config, only_at, program)
        except ValueError:  # its predecessor still has the name
            if time.monotonic() > until:
                raise EngineError("the former controller does not end; try again") from None
            time.sleep(LOOK_S)
        else:
            return


def find_controller() -> Any:
    """Return the controller's handle, or None."""
    try:
        return ray.get_actor(NAME, NAMESPACE)
    except ValueError:
        return None


def status() -> ClusterStatus:
    """Return the controller's status. Raises ConfigError if there is no deployment."""
    controller = find_controller()
    if controller is None:
        raise ConfigError("no specq deployment runs on this Ray cluster; start one: specq ray up CONFIG")
    try:
        found: ClusterStatus = ray.get(controller.status.remote(), timeout=ANSWER_S)
    except RayError as error:
        raise _no_answer(error) from None
    return found


def _no_answer(error: RayError) -> EngineError:
    """Return what a failed call of the controller means. Ray restarts one that was not ended on purpose."""
    if isinstance(error, ActorDiedError):
        return EngineError("another `specq ray up` or `specq ray down` ended the controller; see `specq ray status`")
    return EngineError(f"the controller does not answer: {type(error).__name__}")


def down() -> None:
    """Stop the deployment, gateways first and brokers last. Unfinished jobs stay in the journal."""
    status()
    controller = find_controller()
    try:
        ray.get(controller.end.remote(), timeout=DRAIN_S)
    except RayError as error:
        raise _no_answer(error) from None
    ray.kill(controller, no_restart=True)


def _wait_settled(tell: Callable[[str], object], deadline: float) -> None:
    known: dict[str, str] = {}
    failed: dict[str, float] = {}
    while True:
        found = status()
        for row in found.rows:
            if known.get(row.name) != row.state:
                tell(f"{row.name}: {row.state}")
                known[row.name] = row.state
            now = time.monotonic()
            if row.state.startswith(FAILED) and now > failed.setdefault(row.name, now) + FAILED_S:
                said = row.reason or "its last lines: ray logs actor --id ID (ray list actors), or Ray's dashboard"
                raise EngineError(f"{row.name} {row.state}: {said}\n{WHAT_NOW}")
        if found.is_settled:
            return
        if time.monotonic() > deadline:
            late = [row.name for row in found.rows if row.state != "ready"] or list(found.waiting) or ["the controller"]
            raise EngineError(f"not ready yet: {', '.join(late)}; `specq ray status` shows them")
        time.sleep(LOOK_S)


def table(found: ClusterStatus) -> str:
    """Return the status as text."""
    rows = [("NAME", "STATE", "NODE", "PROCESS", "SECONDS", "ADDRESS")]
    rows += [
        (row.name, row.state, row.address, str(row.pid or ""), f"{row.age_s:.0f}", row.listens_at) for row in found.rows
    ]
    reasons = [f"{row.name}: {row.reason}" for row in found.rows if row.reason]
    lines = [columns(rows), *reasons, *found.waiting.values()]
    gains = ", ".join(f"{number}: {one:.2f}" for number, one in sorted(found.gains.items()))
    lines.append(f"{found.num_nodes} nodes; {'all ready' if found.is_settled else 'not all ready'}")
    return "\n".join([*lines, f"gain by number of draft workers: {gains}"] if gains else lines)
