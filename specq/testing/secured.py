"""A broker and a verifier with a toy model and keys, their loops in threads.

The sockets are real, and start-up is fast.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from specq.config import BrokerConfig, TargetConfig, free_address
from specq.processes.broker import BrokerLoop
from specq.processes.target import VerifierLoop
from specq.protocol import ConfigError, ModelInfo
from specq.testing.tokenizer import tokenizer_files, tokenizer_json
from specq.testing.toy import ToyEngine, toy_info
from specq.text import num_tokens, tokenizer_hash
from specq.transport import make_keys
from specq.verifier import StepCurve, Verifier

ROLES = {"hub": "broker", "gpu": "target", "laptop": "draft", "alice": "client", "bob": "client"}
CLOSE_S = 10.0


def make_all(directory: Path) -> str:
    """Make a key for each role, and return the directory as an option."""
    for name, role in ROLES.items():
        make_keys(directory, name, (role,))
    return str(directory)


def model() -> ModelInfo:
    """Return the toy model with a tokenizer."""
    size = num_tokens(tokenizer_json())
    changes: dict[str, Any] = {"vocab_size": size, "num_tokens": size, "kv_slots": 100_000}
    return replace(toy_info(), tokenizer_hash=tokenizer_hash(tokenizer_json()), **changes)


class Secured:
    """The two loops. `refusals`: why the verifier ended, if the broker refused it for good."""

    def __init__(self, keys: str, journal: str = "none", target_keys: str = "") -> None:
        self.keys = keys
        self.refusals: list[str] = []
        section = BrokerConfig(bind=free_address(), keys=keys, journal=journal, heartbeat_ms=50, liveness_ms=2000)
        self.broker = BrokerLoop(section)
        self.address = self.broker.address
        curve = StepCurve([1, 64], [0.001, 0.002])
        self.verifier = Verifier(ToyEngine(model()), curve, incarnation=1, tokenizer_files=tokenizer_files())
        self.target = VerifierLoop(TargetConfig(broker=self.address, keys=target_keys or keys), self.verifier, "toy")


@contextmanager
def served(keys: str, journal: str = "none", target_keys: str = "") -> Iterator[Secured]:
    """Serve until the block ends."""
    one, stopped = Secured(keys, journal, target_keys), threading.Event()
    loops: tuple[VerifierLoop | BrokerLoop, ...] = one.target, one.broker
    threads = [threading.Thread(target=_run, args=(loop, stopped, one.refusals), daemon=True) for loop in loops]
    for thread in threads:
        thread.start()
    try:
        yield one
    finally:
        stopped.set()
        for thread in threads:
            thread.join(CLOSE_S)


def _run(loop: VerifierLoop | BrokerLoop, stopped: threading.Event, refusals: list[str]) -> None:
    try:
        while not stopped.is_set():
            loop.turn()
    except ConfigError as error:
        refusals.append(str(error))
    finally:
        loop.close()
