"""A verifier names grammars only where it builds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specq.protocol import CAPABILITIES, GRAMMAR_CAPABILITIES, GRAMMAR_KINDS, PROMPT_LOGPROBS
from specq.testing.toy_drafters import ToyProposer
from specq.testing.world import World


class NoBuilder:
    """Stands for what builds grammars, where no job has one."""

    tokenizer: Any = None
    on_ready: Callable[[], None] | None = None

    def begin(self, key: int, grammar: str, owner: str = "") -> None:
        raise AssertionError("no job has a grammar")

    def ready(self) -> list[Any]:
        return []

    def cancel(self, key: int) -> None:
        pass

    def close(self) -> None:
        pass


def test_workers_say_so_in_their_hello() -> None:
    """All kinds, with the version of the masks. Draft workers name none."""
    world = World()
    world.add_verifier(b"v0", grammar_builder=NoBuilder())
    world.add_verifier(b"v1")
    world.add_drafter(b"d0", ToyProposer())
    world.run(1.0)
    named = {worker.name: worker.hello.capabilities for worker in world.broker.state.workers.all()}
    target = (*CAPABILITIES, PROMPT_LOGPROBS)  # the toy engine returns them
    assert named == {"v0": (*target, *GRAMMAR_CAPABILITIES), "v1": target, "d0": CAPABILITIES}
    assert set(GRAMMAR_CAPABILITIES) == {f"grammar/1/{kind}" for kind in GRAMMAR_KINDS}
