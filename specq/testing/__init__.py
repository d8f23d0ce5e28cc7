"""Toys for tests, of specq itself and of packages that extend it.

- `toy`: a target whose next token is a hash.
- `toy_drafters`: drafters that know this target.
- `world`: a broker, verifiers and drafters in memory under a virtual clock, and one client.
- `tokenizer`: a tiny byte-level tokenizer.
- `checkpoints`: tiny random models of each architecture, and the results of transformers.
- `fake_journal`: a journal in memory that refuses records which a broker must never write; records for a journal.
- `conformance`: suites that every engine, drafter, journal and strategy must pass.
- `reference`: speculative decoding in 80 lines, in textbook order.
- `integer_reference`: the forward pass in integer arithmetic, in plain NumPy.
- `oracle`: naive judges.
- `random_steps`: steps to judge, and a comparison with naive judges.
- `exact`: the output distribution of a strategy, by enumeration of all drafts and draws.
- `fake_broker`: a broker for tests of clients: a socket, and a function that answers.
- `secured`: a broker and a verifier with keys, their loops in threads.
- `waiting`: waits for other processes and threads.

An example:

    world = World()
    world.add_verifier()
    job = world.submit(1, [5, 6, 7], max_tokens=40)
    world.run_until(lambda: job.finish)
    assert job.token_ids == toy_text([5, 6, 7], 40)

Names are imported at their first use, since only some need torch, pytest or hypothesis.

Rule: only this package and the tests import it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specq.testing.checkpoints import load_reference, make_checkpoint, reference_text
    from specq.testing.conformance.drafters import DrafterConformance, ProposerConformance
    from specq.testing.conformance.engines import EngineConformance, ReferenceConformance
    from specq.testing.conformance.journals import JournalConformance, OneBrokerConformance
    from specq.testing.conformance.strategies import ExactConformance, StrategyConformance
    from specq.testing.fake_broker import FakeBroker
    from specq.testing.fake_journal import FakeJournal
    from specq.testing.random_steps import check_against_naive
    from specq.testing.tokenizer import tokenizer_files, tokenizer_json
    from specq.testing.toy import ToyEngine, next_token, toy_info, toy_text
    from specq.testing.toy_drafters import ToyChains, ToyHeads, ToyProposer, ToyTrees
    from specq.testing.waiting import wait_until
    from specq.testing.world import World

_MODULES = {
    "checkpoints": ("load_reference", "make_checkpoint", "reference_text"),
    "conformance.drafters": ("DrafterConformance", "ProposerConformance"),
    "conformance.engines": ("EngineConformance", "ReferenceConformance"),
    "conformance.journals": ("JournalConformance", "OneBrokerConformance"),
    "conformance.strategies": ("ExactConformance", "StrategyConformance"),
    "fake_broker": ("FakeBroker",),
    "fake_journal": ("FakeJournal",),
    "random_steps": ("check_against_naive",),
    "tokenizer": ("tokenizer_files", "tokenizer_json"),
    "toy": ("ToyEngine", "next_token", "toy_info", "toy_text"),
    "toy_drafters": ("ToyChains", "ToyHeads", "ToyProposer", "ToyTrees"),
    "waiting": ("wait_until",),
    "world": ("World",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "DrafterConformance",
    "EngineConformance",
    "ExactConformance",
    "FakeBroker",
    "FakeJournal",
    "JournalConformance",
    "OneBrokerConformance",
    "ProposerConformance",
    "ReferenceConformance",
    "StrategyConformance",
    "ToyChains",
    "ToyEngine",
    "ToyHeads",
    "ToyProposer",
    "ToyTrees",
    "World",
    "check_against_naive",
    "load_reference",
    "make_checkpoint",
    "next_token",
    "reference_text",
    "tokenizer_files",
    "tokenizer_json",
    "toy_info",
    "toy_text",
    "wait_until",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specq.testing' has no attribute {name!r}")
    return getattr(import_module(f"specq.testing.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
