"""What the tests of the whole pipeline have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specq.drafting import Proposer
from specq.engines import Engine
from specq.protocol import Speculation
from specq.testing.toy import toy_text
from specq.testing.toy_drafters import ToyProposer
from specq.testing.world import ReceivedText, World

PROMPT = [5, 6, 7]


def started(*proposers: Proposer, engine: Engine | None = None, **options: Any) -> World:
    """Return a world with a verifier and a drafter for each proposer, in which all have registered."""
    world = World(**options)
    world.add_verifier(engine=engine)
    for number, proposer in enumerate(proposers):
        world.add_drafter(b"d%d" % number, proposer)
    world.run(0.1)
    return world


def finished(world: World, *jobs: int) -> bool:
    return all(world.received[job].finish or world.received[job].failed for job in jobs)


def completed(world: World, max_tokens: int, limit_s: float = 300.0, **drafting: Any) -> ReceivedText:
    """Run a job of PROMPT to its end, drafted for in some way. The text is always the toy's."""
    job = world.submit(1, PROMPT, max_tokens=max_tokens, speculation=Speculation.from_dict(drafting))
    world.run_until(lambda: finished(world, 1), limit_s)
    assert job.token_ids == toy_text(PROMPT, max_tokens)
    return job


def completed_all(world: World, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
    """Run a job of each prompt, all at a time; each says the toy's text."""
    jobs = [world.submit(i, prompt, max_tokens=max_tokens) for i, prompt in enumerate(prompts, 1)]
    world.run_until(lambda: finished(world, *range(1, len(jobs) + 1)))
    assert [job.token_ids for job in jobs] == [toy_text(prompt, max_tokens) for prompt in prompts]


def count(job: ReceivedText, name: str) -> int:
    """Return a number of a job's statistics."""
    found = job.stats[name]
    assert isinstance(found, int)
    return found


def toys(*wrong_every: int, blind: bool = False) -> list[ToyProposer]:
    """Return toy proposers. Each is wrong once in a number of tokens; 0: never."""
    return [ToyProposer(wrong_every=number, blind=blind) for number in wrong_every]
