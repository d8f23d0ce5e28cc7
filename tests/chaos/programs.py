"""The processes of the chaos suite that `specq` does not have: python -m tests.chaos.programs NAME ARGUMENTS...

broker OPTIONS...        `specq broker` that checks after each message what must hold of its memory, and stops where
                         that does not
drafter BROKER NAME [KEYS]
                         a drafter with the toy proposer, which knows the toy target: starts at once
client BROKER            a client with one long toy job, to be killed: it says when its first tokens are there
target ARGUMENTS...      `tests.journal.toy_target`, whose sessions each say a text of their own if the job has a seed
planted BUG OPTIONS...   `broker` with one of the bugs of `tests.chaos.mutants.SHARED`
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from specq import Client
from specq.broker import Broker
from specq.cli import main as specq
from specq.config.sections import DraftConfig
from specq.drafting import Children, Expansion
from specq.drafting.worker.worker import DraftWorker
from specq.processes.draft import DrafterLoop
from specq.protocol import Int32Array, Judgement, SessionStep
from specq.runtime import log
from specq.testing.toy_drafters import ToyProposer
from specq.transport import Stop, new_incarnation
from tests.chaos import mutants
from tests.chaos.stubs import MOOD, MOODS
from tests.journal import toy_target
from tests.journal.toy_target import info_with_tokenizer

PASS_S = 0.001
ROW_S = float(os.environ.get("TOY_ROW_MS", "0")) / 1000  # of each node that a pass expands
WRONG_EVERY = int(os.environ.get("TOY_WRONG_EVERY", "4"))


def check_broker(*options: str) -> None:
    """Run a broker."""
    Broker.validates = True
    specq(["broker", *options])


def check_planted(bug: str, *options: str) -> None:
    """Run a broker with a bug. It does not check itself: what clients see must show the bug."""
    {mutant.__name__: mutant for mutant in mutants.SHARED}[bug](pytest.MonkeyPatch())
    specq(["broker", *options])


class MoodyEngine(toy_target.SlowEngine):
    """Each session of a job with a seed says a text of its own, as under `probabilistic`.

    So a text that two brokers continue, or that a broker forgets in part, is never the same by chance.
    """

    def open(self, session_id: int, token_ids: Int32Array, owner: str = "") -> int:
        """Start a session in a mood."""
        self.moods = {**getattr(self, "moods", {}), session_id: random.randrange(MOODS)}
        return super().open(session_id, token_ids, owner)

    def _run(self, step: SessionStep) -> Judgement | None:
        seed = step.params.seed and step.params.seed + MOOD * self.moods[step.session_id]
        return super()._run(replace(step, params=replace(step.params, seed=seed)))


def judge(*arguments: str) -> None:
    """Run a verifier."""
    toy_target.SlowEngine = MoodyEngine  # type: ignore[misc]
    toy_target.main(*arguments)


class SlowProposer(ToyProposer):
    """A toy proposer whose passes take time, and more for more nodes."""

    def expand(self, requests: Sequence[Expansion]) -> list[Children]:
        """Wait, and draft."""
        time.sleep(PASS_S + ROW_S * len(requests))
        return super().expand(requests)


def draft(broker: str, name: str, keys: str = "") -> None:
    """Draft until SIGTERM."""
    log.configure("info")
    stop, info = Stop(), info_with_tokenizer(name, fingerprint=name)
    drafter = DraftWorker(
        SlowProposer(info, wrong_every=WRONG_EVERY), incarnation=new_incarnation(), width=4, max_ahead=8
    )
    loop = DrafterLoop(DraftConfig(broker=broker, keys=keys), drafter, name)
    while not stop:
        loop.turn()
    loop.close()


def ask(broker: str) -> None:
    """Stream a job."""
    with Client(broker, timeout_s=60.0) as client:
        for number, _ in enumerate(client.stream(token_ids=[5, 6, 7], max_tokens=300)):
            if number == 0:
                sys.stdout.write("begun\n")
                sys.stdout.flush()


if __name__ == "__main__":
    programs = {"broker": check_broker, "planted": check_planted, "target": judge, "drafter": draft, "client": ask}
    programs[sys.argv[1]](*sys.argv[2:])
