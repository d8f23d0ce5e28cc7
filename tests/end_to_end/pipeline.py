"""What the tests of the whole pipeline have in common."""

from specq.testing.world import World

PROMPT = [5, 6, 7]


def finished(world: World, *jobs: int) -> bool:
    return all(world.received[job].finish or world.received[job].failed for job in jobs)
