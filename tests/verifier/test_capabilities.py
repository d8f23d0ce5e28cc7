"""A verifier names grammars only where it can build them."""

from __future__ import annotations

import sys

import pytest

from specq.protocol import CAPABILITIES, GRAMMAR_CAPABILITIES, GRAMMAR_KINDS
from specq.testing.tokenizer import tokenizer_files
from specq.testing.toy_drafters import ToyProposer
from specq.testing.world import World
from specq.verifier.capabilities import capabilities_of, has_llguidance


def test_with_llguidance_and_a_tokenizer_all_kinds_are_named() -> None:
    """With the version of the masks."""
    assert capabilities_of(tokenizer_files()) == (*CAPABILITIES, *GRAMMAR_CAPABILITIES)
    assert set(GRAMMAR_CAPABILITIES) == {f"grammar/1/{kind}" for kind in GRAMMAR_KINDS}


def test_without_a_tokenizer_none_is() -> None:
    """Nor with the files of another kind of tokenizer."""
    for files in ({}, {"tokenizer_config.json": "{}"}):
        assert capabilities_of(files) == CAPABILITIES


def test_without_llguidance_none_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    has_llguidance.cache_clear()
    try:
        assert capabilities_of(tokenizer_files()) == CAPABILITIES
    finally:
        has_llguidance.cache_clear()


def test_workers_say_so_in_their_hello() -> None:
    """Draft workers name no grammar."""
    world = World()
    world.add_verifier(b"v0", tokenizer_files=tokenizer_files())
    world.add_verifier(b"v1")
    world.add_drafter(b"d0", ToyProposer())
    world.run(1.0)
    named = {worker.name: worker.hello.capabilities for worker in world.broker.state.workers.all()}
    assert named == {"v0": (*CAPABILITIES, *GRAMMAR_CAPABILITIES), "v1": CAPABILITIES, "d0": CAPABILITIES}
