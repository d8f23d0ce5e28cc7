"""A drafter's process with the toy proposer, which knows the toy target: starts at once.

python -m tests.chaos.toy_drafter BROKER [NAME]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from specq.config.sections import DraftConfig
from specq.drafting import Children, Expansion
from specq.drafting.worker.worker import DraftWorker
from specq.processes.draft import DrafterLoop
from specq.runtime import log
from specq.testing.tokenizer import tokenizer_json
from specq.testing.toy import ToyProposer, toy_info
from specq.text.codec import num_tokens, tokenizer_hash
from specq.transport.broker_link import new_incarnation
from specq.transport.sockets import Stop

PASS_S = 0.001


class SlowProposer(ToyProposer):
    """A toy proposer whose passes take time."""

    def expand(self, requests: Sequence[Expansion]) -> list[Children]:
        """Wait, and draft."""
        time.sleep(PASS_S)
        return super().expand(requests)


def main(broker: str, name: str = "toy-drafter") -> None:
    """Draft until SIGTERM."""
    log.configure("info")
    stop, size = Stop(), num_tokens(tokenizer_json())
    info = replace(
        toy_info(name),
        vocab_size=size,
        num_tokens=size,
        tokenizer_hash=tokenizer_hash(tokenizer_json()),
        fingerprint=name,
    )
    drafter = DraftWorker(SlowProposer(info, wrong_every=4), incarnation=new_incarnation(), width=4, max_ahead=8)
    loop = DrafterLoop(DraftConfig(broker=broker), drafter, name)
    while not stop:
        loop.turn()
    loop.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
