"""A drafter with one session, verdicts for it, and passes of it, for tests."""

import numpy as np

from specq.drafting.worker.worker import DraftWorker
from specq.protocol.messages import Assign, Draft, Verdict
from specq.protocol.params import SamplingParams, Speculation
from specq.testing.toy_drafters import ToyProposer

PROMPT = [5, 6, 7]


def make_drafter(
    max_tokens: int = 100, *, speculation: Speculation | None = None, strategy: str = "deterministic", **options: int
) -> DraftWorker:
    """Return a drafter with one session of three context tokens."""
    drafter = DraftWorker(ToyProposer(), incarnation=1, **options)
    warm = {"strategy": strategy, "temperature": 1.0} if strategy == "probabilistic" else {}
    drafter.handle(
        Assign(
            session_id=7, epoch=1, lane=0, prompt_len=3, params=SamplingParams(max_tokens=max_tokens, **warm),
            speculation=speculation or Speculation(), token_ids=np.array(PROMPT, np.int32),
        )
    )  # fmt: skip
    return drafter


def verdict(
    base_len: int, tokens: list[int], *, min_accept_prob: int = 0, used: int = 0, first_used: int = 0, epoch: int = 1
) -> Verdict:
    """Return a verdict that commits tokens; `used`: how many nodes it verified."""
    return Verdict(
        session_id=7, epoch=epoch, base_len=base_len, min_accept_prob=min_accept_prob, token_ids=np.array(tokens,
        np.int32),
        node_ids=np.arange(used, dtype=np.int32) + first_used, mask=np.zeros(used, np.uint8),
    )  # fmt: skip


def passes(drafter: DraftWorker, count: int) -> list[Draft]:
    """Run `count` passes; return what was sent."""
    return [draft for _ in range(count) for draft in drafter.step()]
