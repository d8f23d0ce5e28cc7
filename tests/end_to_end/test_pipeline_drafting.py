"""How the pipeline drafts for a job: modes and shapes, several drafters, none."""

from dataclasses import replace

import numpy as np

from specq.protocol import Judgement, SessionStep, Speculation
from specq.testing import ToyEngine, ToyProposer, World, toy_info, toy_text
from tests.each import each
from tests.end_to_end.pipeline import PROMPT, completed, count, finished, started, toys

# --- how a job is drafted for -------------------------------------------------------------------------------------

SHAPES = [
    {},
    {"mode": "plain"},
    {"mode": "sync"},
    {"mode": "sync", "num_candidates": 1, "max_depth": 4},
    {"mode": "sync", "max_nodes": 12},
    {"num_candidates": 3, "max_depth": 4},
    {"tree": [[0, 0, 0], [1, 0], [2]]},
    {"fan_out_hit": [2, 2, 1], "fan_out_miss": [3]},
    {"mode": "jit"},
    {"mode": "jit", "fan_out_hit": [2, 2, 1], "fan_out_miss": [3], "max_depth": 3},
    {"max_nodes": 4},
]


@each("speculation", SHAPES)
def test_all_modes_and_shapes_give_the_same_text(speculation: dict[str, object]) -> None:
    """They buy speed; and each of them, but plain, had nodes accepted and rejected."""
    job = completed(started(*toys(4)), 60, **speculation)
    drafted, accepted = count(job, "draft_tokens"), count(job, "accepted_tokens")
    if speculation.get("mode") == "plain":
        assert drafted == 0
    else:
        assert drafted > accepted > 0


def test_synchronous_rounds_wait_for_their_drafts() -> None:
    """Each round but the first two verifies a draft, though the drafter takes ten steps' time for it."""
    job = completed(started(ToyProposer(), pass_s=0.05), 41, mode="sync", num_candidates=1, max_depth=3)
    assert job.stats["rounds"] == 11  # the first is plain; ten make four tokens each
    assert job.stats["depths"] == job.stats["leaves"] * 3 == 30


def test_a_miss_waits_for_a_chain_just_in_time() -> None:
    """Each round but the first and the last verifies a draft, though the drafter takes ten steps' time for a pass and
    misses each second token."""
    job = completed(started(*toys(2), pass_s=0.05), 41, mode="jit", num_candidates=1, max_depth=4)
    assert job.stats["leaves"] == job.stats["rounds"] - 2 >= 10


@each("wrong_every", [2, 3, 5, 7, 9])
def test_a_chain_that_had_grown_before_it_was_owed_is_sent_at_once(wrong_every: int) -> None:
    """Without a wait for a heartbeat: 300 tokens take no longer than plain decoding, 1.56 s."""
    world = started(*toys(wrong_every), pass_s=0.001)
    began = world.now
    completed(world, 300, limit_s=60, mode="jit", fan_out_hit=[3, 3, 2, 2, 1], fan_out_miss=[4, 3, 2, 2, 1])
    assert world.now - began < 1.5


@each("mode", ["sync", "jit"])
def test_a_job_that_waits_and_has_no_drafter_goes_on_alone(mode: str) -> None:
    """It waits a moment for a drafter, then decodes plainly; and one that dies does not stop it."""
    world = started()
    completed(world, 30, limit_s=5, mode=mode)
    world.add_drafter()
    world.run(0.1)
    job = world.submit(2, PROMPT, speculation=Speculation(mode=mode), max_tokens=300)
    world.run_until(lambda: len(job.token_ids) > 50)
    world.kill(b"d0")
    world.run_until(lambda: finished(world, 2), limit_s=10)
    assert job.token_ids == toy_text(PROMPT, 300)


def test_the_shape_follows_acceptance_both_ways() -> None:
    """Once drafts are rejected, hardly any node is verified; when they are good again, trees grow again."""
    proposer = ToyProposer(blind=True)
    world = started(proposer)
    job = world.submit(1, PROMPT, max_tokens=900)

    def counts() -> tuple[int, int]:
        stats = world.verifiers[b"v0"].sessions[1].stats
        return sum(verified for verified, _ in stats.positions), stats.hits + stats.misses

    def verified_until(length: int) -> float:
        """Return the nodes verified in a round until the text has this length."""
        world.run_until(lambda: len(job.token_ids) > 0)
        nodes, rounds = counts()
        world.run_until(lambda: len(job.token_ids) >= length)
        return (counts()[0] - nodes) / (counts()[1] - rounds)

    verified_until(50)
    before = verified_until(200)
    proposer.wrong_every = 1
    verified_until(250)
    poor = verified_until(400)
    proposer.wrong_every = 0
    verified_until(600)
    after = verified_until(800)
    assert poor < 0.1 * before
    assert after > 0.8 * before


def test_drafters_of_probabilistic_jobs_never_learn_the_seed() -> None:
    """The seed reveals the draws of the verifier."""
    world = started(ToyProposer())
    drafter = world.drafters[b"d0"]
    world.submit(1, PROMPT, strategy="probabilistic", temperature=1.0, seed=77, max_tokens=50)
    world.submit(2, PROMPT, temperature=1.0, seed=78, max_tokens=50)
    world.run_until(lambda: len(drafter.sessions) == 2)
    assert {i: session.params.seed for i, session in drafter.sessions.items()} == {1: 0, 2: 78}


# --- several drafters, and none -----------------------------------------------------------------------------------


def test_drafters_of_different_models_share_a_job() -> None:
    """Each in a lane of its own; one that would draft the same as another is not added."""
    world = World()
    world.add_verifier(sources=())
    other = ToyProposer(replace(toy_info("other"), fingerprint="other"), wrong_every=4)
    for identity, proposer in ((b"d0", *toys(3)), (b"d1", other), (b"d2", *toys(3))):
        world.add_drafter(identity, proposer)
    world.run(0.1)
    job = world.submit(1, PROMPT, max_tokens=100)
    world.run_until(lambda: sum(len(drafter.sessions) for drafter in world.drafters.values()) == 2)
    assert len(world.drafters[b"d1"].sessions) == 1
    assert {
        lane for session in world.verifiers[b"v0"].sessions.values() for lane in session.trees.lanes(session.place)
    } <= {0, 1}
    world.run_until(lambda: finished(world, 1))
    assert job.token_ids == toy_text(PROMPT, 100)
    assert job.stats["accepted_tokens"]


def test_a_drafter_that_comes_late_joins_and_one_that_goes_is_not_missed() -> None:
    """The text is the same, and the job goes on at every moment."""
    world = started(*toys(3))
    job = world.submit(1, PROMPT, max_tokens=400)
    world.run_until(lambda: len(job.token_ids) > 50)
    late = world.add_drafter(b"d1", ToyProposer(replace(toy_info("other"), fingerprint="other")))
    world.run_until(lambda: bool(late.sessions))
    world.run_until(lambda: len(job.token_ids) > 150)
    world.kill(b"d0")
    world.run_until(lambda: finished(world, 1), limit_s=5)
    assert job.token_ids == toy_text(PROMPT, 400)


def test_without_drafters_the_verifier_drafts_from_the_text_itself() -> None:
    """A text that repeats is made in fewer rounds; in mode plain it is not."""

    class Loop(ToyEngine):
        def _walk(self, step: SessionStep, context: list[int]) -> list[int]:
            path: list[int] = []
            while (
                len(path) < step.tree.num_nodes and step.tree.token_ids[len(path)] == 1 + (len(context) + len(path)) % 6
            ):
                path.append(len(path))
            return path

        def _run(self, step: SessionStep) -> Judgement | None:
            context = self.contexts[step.session_id]
            context.extend(step.token_ids.tolist())
            if not step.judged:
                return None
            path = self._walk(step, context)
            context.extend(step.tree.token_ids[path].tolist())
            tokens = [*step.tree.token_ids[path].tolist(), 1 + len(context) % 6]
            return Judgement(step.session_id, tuple(path), np.array(tokens, np.int32))

    world = started(engine=Loop())
    job = world.submit(1, PROMPT, max_tokens=120)
    plain = world.submit(2, PROMPT, speculation=Speculation(mode="plain"), max_tokens=120)
    world.run_until(lambda: finished(world, 1, 2))
    assert job.token_ids == plain.token_ids == [1 + i % 6 for i in range(3, 123)]
    assert plain.stats["rounds"] == 120
    assert count(job, "rounds") < 60


def test_lookups_that_fail_are_given_up() -> None:
    """In a text that hardly repeats, the verifier's own guesses cost a row now and then, and change nothing."""
    assert 0 < count(completed(started(), 600), "draft_tokens") < 100
