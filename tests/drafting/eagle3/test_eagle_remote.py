"""An EAGLE-3 head in a draft worker, for a real target, over frames and without sockets: the text is the target's
for any drafts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specq.drafting import Children, Expansion
from specq.drafting.eagle3.arrays import load_arrays
from specq.drafting.eagle3.host import HostEagle
from specq.drafting.eagle3.remote import EagleTrees
from specq.engines.torch.engine import TorchEngine
from specq.protocol import (
    BF16,
    INT8,
    NO_TAP,
    Activations,
    Float32Array,
    GetActivations,
    Open,
    SamplingParams,
    SessionStep,
    Speculation,
    StepOutput,
    Tap,
)
from specq.testing.checkpoints_eagle import eagle_shape_of, make_eagle
from specq.testing.world import ReceivedText, World
from specq.verifier import StepCurve, Verifier
from tests.drafting.medusa.test_medusa import tiny

__all__ = ["tiny"]  # a fixture

PROMPT = [5, 90, 1000, 44, 7, 300, 21, 8, 13]
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 0.8, "seed": 9, "top_k": 3, "speculation": Speculation(mode="sync")},
    {"speculation": Speculation(mode="sync", tree=((0, 0, 1), (1,), (2, 0)))},
)


@pytest.fixture(scope="module")
def random_eagle(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head that is sure of what it says, so that it is sent, and always wrong."""
    info = TorchEngine(tiny, device="cpu", kv_slots=64).info
    shape = eagle_shape_of(256, info.vocab_size, 300, num_tokens=info.num_tokens, tokenizer_hash=info.tokenizer_hash)
    return make_eagle(tmp_path_factory.mktemp("eagle"), shape, embedding=False)


class Engine(TorchEngine):
    """Takes time by a virtual clock, instead of measuring how long steps take."""

    busy_s = 0.0

    def step(self, steps: Sequence[SessionStep], tap: Tap = NO_TAP) -> StepOutput:
        self.busy_s += 0.005
        return super().step(steps, tap)

    def step_times(self, sizes: Sequence[int]) -> list[float]:
        return [0.005 + 0.0001 * size for size in sizes]


def made(tiny: str) -> Engine:
    return Engine(tiny, device="cpu", kv_slots=2048)


class Timed(EagleTrees):
    """Counts, and takes time by a virtual clock."""

    pass_s, busy_s = 0.001, 0.0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.num_children, self.rows = 0, list[tuple[int, int, int]]()  # (session, first, count)

    def expand(self, requests: Sequence[Expansion]) -> list[Children]:
        self.busy_s += self.pass_s
        found = super().expand(requests)
        self.num_children += sum(len(children.token_ids) for children in found)
        return found

    def observe(self, session_id: int, first: int, states: Float32Array) -> None:
        self.rows.append((session_id, first, len(states)))
        super().observe(session_id, first, states)


def make(tiny: str, heads: Path, engine: Engine, form: str = BF16, window: int = 512) -> Timed:
    return Timed(HostEagle(load_arrays(str(heads), tiny, engine.info)), engine.info, form=form, window=window)


def served(engine: Engine, **options: Any) -> World:
    world = World()
    world.add_verifier(engine=engine, sources=(), measures_drafts=False, **options)
    return world


def texts(world: World) -> list[ReceivedText]:
    """Run a job in each of the ways."""
    jobs = [world.submit(i, [*PROMPT, i + 1], max_tokens=24, ignore_eos=True, **way) for i, way in enumerate(WAYS, 1)]
    world.run_until(lambda: all(job.finish for job in jobs))
    return jobs


@pytest.mark.parametrize("form", [BF16, INT8])
def test_a_random_head_changes_no_text(tiny: str, random_eagle: Path, form: str) -> None:
    """Greedy and sampled, ahead of the verdicts and in rounds, several jobs at once: that of plain decoding, token for
    token."""
    plain = texts(served(made(tiny)))
    engine = made(tiny)
    world, trees = served(engine), make(tiny, random_eagle, engine, form)
    world.add_drafter(b"d0", trees)
    drafted = texts(world)
    assert [job.token_ids for job in drafted] == [job.token_ids for job in plain]
    assert trees.num_children > 100
    assert sum(int(str(job.stats["draft_tokens"])) for job in drafted) > 0


def test_a_good_head_is_accepted_run_ahead_and_after_a_verifier_died(tiny: str, random_eagle: Path) -> None:
    """A head that agrees with the target where it has states, through two verifiers. The first one dies."""
    engine, prompt = made(tiny), PROMPT
    world, trees = served(engine), make(tiny, random_eagle, engine)
    plain = served(made(tiny))
    right = plain.submit(1, prompt, max_tokens=60, ignore_eos=True)
    plain.run_until(lambda: right.finish)
    text, expand = [*prompt, *right.token_ids, *[0] * 64], trees.expand

    def say_it(requests: Sequence[Expansion]) -> list[Children]:
        found = expand(requests)
        for i, (request, children) in enumerate(zip(requests, found, strict=True)):
            if len(children.token_ids):
                session = trees._sessions[request.session_id]
                token = text[session.child_position(request.node_id)]
                session.nodes[request.child_ids[0]].token_id = token
                found[i] = Children(np.array([token], np.int32), np.log(np.array([0.9], np.float32)))
        return found

    trees.expand = say_it  # type: ignore[method-assign]
    world.add_drafter(b"d0", trees)
    job = world.submit(1, prompt, max_tokens=60, ignore_eos=True)
    world.run_until(lambda: len(job.token_ids) > 20)
    world.add_verifier(b"v1", made(tiny), sources=(), measures_drafts=False)
    world.kill(b"v0")
    world.run_until(lambda: job.finish)
    assert job.token_ids == right.token_ids
    assert int(str(job.stats["accepted_tokens"])) > 5
    assert [first for _, first, _ in trees.rows].count(1) == 2  # of both verifiers


def test_what_the_engine_has_cached_comes_without_states(tiny: str, random_eagle: Path) -> None:
    """The head begins behind it."""
    engine = made(tiny)
    world, trees = served(engine), make(tiny, random_eagle, engine)
    world.add_drafter(b"d0", trees)
    prompt = np.random.default_rng(0).integers(0, 1000, 100).tolist()
    for job_id in (1, 2):
        job = world.submit(job_id, prompt, max_tokens=12, ignore_eos=True)
        world.run_until(lambda job=job: job.finish)  # type: ignore[misc]
        world.run(0.1)
    firsts = {session_id: first for session_id, first, _ in reversed(trees.rows)}
    assert firsts[1] == 1
    assert 33 <= firsts[2] <= 100
    assert world.received[1].token_ids == world.received[2].token_ids
    assert trees.num_children > 0


def test_probabilistic_takes_what_it_draws(tiny: str, random_eagle: Path) -> None:
    """With the distributions that they were drawn from, as of any draft worker."""
    engine = made(tiny)
    world, trees = served(engine), make(tiny, random_eagle, engine)
    world.add_drafter(b"d0", trees)
    way = {"temperature": 0.8, "seed": 3, "strategy": "probabilistic", "max_tokens": 24, "ignore_eos": True}
    job = world.submit(1, PROMPT, **way)
    world.run_until(lambda: job.finish)
    assert len(job.token_ids) == 24
    assert trees.num_children > 0


def test_rows_that_waited_on_the_device_are_the_same(tiny: str) -> None:
    """While drafters shall be silent they are not fetched; what is sent later is what would have been sent at once."""
    found = []
    for is_silent in (False, True):
        verifier = Verifier(made(tiny), StepCurve([1, 64], [0.005, 0.006]), incarnation=1, measures_drafts=False)
        params, token_ids = SamplingParams(max_tokens=20, ignore_eos=True), np.array(PROMPT, np.int32)
        job = Open(session_id=1, epoch=1, prompt_len=len(PROMPT), tokens_left=20, params=params, token_ids=token_ids)
        verifier.handle(job, 0.0)
        asked = GetActivations(session_id=1, epoch=1, lane=0, tap_layers=(1, 5, 8), tap_form=BF16, tap_window=100)
        verifier.handle(asked, 0.0)
        feeds, sent = verifier.sources.mailbox.feeds, list[Activations]()
        fresh = feeds.fresh
        feeds.fresh = lambda may_draft, fresh=fresh, is_silent=is_silent: fresh(may_draft and not is_silent)  # type: ignore[method-assign]
        for _ in range(12):
            sent += [one for one in verifier.step(lambda: 0.0).packed() if isinstance(one, Activations)]
        assert len(sent) == (0 if is_silent else 12)
        found.append(np.concatenate([one.rows() for one in (*sent, *fresh(may_draft=True))]))
    assert len(found[0]) == len(PROMPT) + 12 - 1
    np.testing.assert_array_equal(*found)
