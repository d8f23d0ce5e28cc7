"""Broker, verifiers and drafters together, under a virtual clock, with a toy model."""

from dataclasses import replace

import numpy as np
import pytest

from specq.protocol.errors import EngineError
from specq.protocol.messages import Cancel, Draft, GetStatus, Submit
from specq.protocol.params import SamplingParams, Speculation
from specq.protocol.types import Judgement, SessionStep
from specq.protocol.wire import encode
from specq.testing.toy import EOS, ToyEngine, ToyProposer, toy_info, toy_text
from specq.testing.world import CLIENT, World

PROMPT = [5, 6, 7]


def finished(world: World, *jobs: int) -> bool:
    return all(world.received[job].finish or world.received[job].failed for job in jobs)


def test_a_job_without_a_drafter_is_plain_decoding() -> None:
    """The pipeline needs no drafter: one token a round."""
    world = World()
    world.add_verifier()
    world.run(0.1)
    job = world.submit(1, PROMPT, max_tokens=20)
    world.run_until(lambda: finished(world, 1))
    assert job.token_ids == toy_text(PROMPT, 20)
    assert (job.finish, job.stats["rounds"], job.stats["draft_tokens"]) == ("length", 20, 0)


def test_a_perfect_drafter_makes_rounds_long() -> None:
    """With a drafter that knows the target, far fewer rounds give the same text."""
    world = World()
    world.add_verifier()
    world.add_drafter()
    world.run(0.1)
    job = world.submit(1, PROMPT, max_tokens=60)
    world.run_until(lambda: finished(world, 1))
    assert job.token_ids == toy_text(PROMPT, 60)
    assert int(job.stats["rounds"]) < 30  # type: ignore[call-overload]
    assert job.stats["accepted_tokens"]


@pytest.mark.parametrize("wrong_every", [1, 2, 3, 7])
@pytest.mark.parametrize("blind", [False, True])
def test_any_drafter_gives_the_same_text(wrong_every: int, blind: bool) -> None:
    """Drafts change speed, never text; and they were in fact contradicted, and accepted where that is possible.

    (A blind drafter that is wrong at every other position is never in time: the plain step takes the right one.)
    """
    world = World()
    world.add_verifier()
    world.add_drafter(proposer=ToyProposer(wrong_every=wrong_every, blind=blind))
    world.run(0.1)
    job = world.submit(1, PROMPT, max_tokens=50)
    world.run_until(lambda: finished(world, 1))
    assert job.token_ids == toy_text(PROMPT, 50)
    assert int(job.stats["stale"]) > 0  # type: ignore[call-overload]
    assert bool(job.stats["accepted_tokens"]) == (not blind or wrong_every > 2)
    assert bool(job.stats["hits"]) == (not blind or wrong_every > 1)


def test_predrafted_outcomes_are_hits() -> None:
    """Where the drafter's second choice is right, most rounds begin with live nodes."""
    world = World()
    world.add_verifier()
    world.add_drafter(proposer=ToyProposer(wrong_every=3))
    world.run(0.1)
    job = world.submit(1, PROMPT, max_tokens=50)
    world.run_until(lambda: finished(world, 1))
    assert int(job.stats["hits"]) > int(job.stats["misses"]) > 0  # type: ignore[call-overload]


def test_a_useless_drafter_costs_next_to_nothing() -> None:
    """Contradicted time and again, its nodes are not verified, and it learns to be silent."""
    plain, world = World(), World()
    for w in (plain, world):
        w.add_verifier()
    world.add_drafter(proposer=ToyProposer(wrong_every=1, blind=True))
    for w in (plain, world):
        w.run(0.1)
        w.submit(1, PROMPT, max_tokens=500)
        w.run_until(lambda w=w: finished(w, 1))  # type: ignore[misc]
    assert world.received[1].token_ids == plain.received[1].token_ids
    assert world.now < plain.now * 1.05
    assert int(world.received[1].stats["draft_tokens"]) < 30  # type: ignore[call-overload]
    assert 0 < int(world.received[1].stats["drafted"]) < 200  # type: ignore[call-overload]
    assert int(world.received[1].stats["accepted_tokens"]) == 0  # type: ignore[call-overload]


@pytest.mark.parametrize("seed", range(8))
def test_loss_and_doubling_change_no_text(seed: int) -> None:
    """With 5% of all messages lost and 5% doubled and reordered, all jobs end with the right text."""
    world = World(seed=seed, loss=0.05, double=0.05)
    world.add_verifier(b"v0")
    world.add_verifier(b"v1")
    for i in range(3):
        world.add_drafter(f"d{i}".encode(), ToyProposer(wrong_every=i + 2))
    world.run(1.0)
    jobs = {i: world.submit(i, [i, i + 1], max_tokens=40, seed=i) for i in range(1, 9)}
    world.run_until(lambda: finished(world, *jobs))
    for i, job in jobs.items():
        assert job.token_ids == toy_text([i, i + 1], 40, seed=i)
        assert job.finish == "length"
    for kind in ("accepted_tokens", "hits", "stale"):
        assert any(int(job.stats[kind]) for job in jobs.values())  # type: ignore[call-overload]
    sums = [sum(int(job.stats[name]) for job in jobs.values()) for name in ("draft_tokens", "accepted_tokens")]  # type: ignore[call-overload]
    assert sums[0] > sums[1], "nothing was rejected"


def test_a_dead_verifier_costs_no_token() -> None:
    """Its sessions go on at another, from the transcript."""
    world = World()
    world.add_verifier(b"v0")
    world.add_drafter()
    world.run(0.1)
    jobs = {i: world.submit(i, [i], max_tokens=300) for i in (1, 2, 3)}
    world.run(0.3)
    world.add_verifier(b"v1")
    assert not finished(world, 1)
    world.kill(b"v0")
    world.run_until(lambda: finished(world, *jobs))
    assert [jobs[i].token_ids for i in jobs] == [toy_text([i], 300) for i in jobs]


def test_a_dead_drafter_is_replaced() -> None:
    """The session goes on alone, then with another drafter, in a new lane."""
    world = World()
    world.add_verifier()
    world.add_drafter(b"d0")
    world.run(0.1)
    job = world.submit(1, PROMPT, max_tokens=1500)
    world.run(0.2)
    world.kill(b"d0")
    world.add_drafter(b"d1")
    world.run_until(lambda: finished(world, 1))
    assert job.token_ids == toy_text(PROMPT, 1500)
    assert world.drafters[b"d1"].num_passes > 10


def test_sixteen_sessions_share_steps() -> None:
    """One step serves many sessions."""
    world = World()
    verifier = world.add_verifier()
    world.add_drafter()
    world.run(0.1)
    jobs = [world.submit(i, [i], max_tokens=30) for i in range(1, 17)]
    world.run_until(lambda: finished(world, *range(1, 17)))
    assert [job.token_ids for job in jobs] == [toy_text([i], 30) for i in range(1, 17)]
    assert verifier.num_steps < 60


def test_a_small_pool_evicts_and_goes_on() -> None:
    """Sessions that find no KV room wait, or are evicted and prefilled again; all end with the right text."""
    world = World()
    world.add_verifier(engine=ToyEngine(toy_info(kv_slots=120)))
    world.add_drafter()
    world.run(0.1)
    jobs = [world.submit(i, [*range(1, 30), i], max_tokens=60) for i in range(1, 6)]
    world.run_until(lambda: finished(world, *range(1, 6)))
    assert [job.token_ids for job in jobs] == [toy_text([*range(1, 30), i], 60) for i in range(1, 6)]


def test_more_jobs_than_sessions_wait_their_turn() -> None:
    """A verifier takes no more sessions than it said; the rest wait at the broker."""
    world = World()
    verifier = world.add_verifier(max_sessions=2)
    world.run(0.1)
    jobs = [world.submit(i, [i], max_tokens=10) for i in range(1, 8)]
    world.run(0.02)
    assert len(verifier.sessions) == 2
    world.run_until(lambda: finished(world, *range(1, 8)))
    assert [job.token_ids for job in jobs] == [toy_text([i], 10) for i in range(1, 8)]


def test_stop_tokens_end_a_job() -> None:
    """The stop token is the last; what was accepted beyond it is cut."""
    world = World()
    world.add_verifier()
    world.add_drafter()
    world.run(0.1)
    text = toy_text(PROMPT, 40)
    stop = text[10]
    job = world.submit(1, PROMPT, max_tokens=40, stop_token_ids=(stop,))
    world.run_until(lambda: finished(world, 1))
    assert job.token_ids == text[: text.index(stop) + 1]
    assert job.finish == "stop"


def test_a_cancelled_job_ends() -> None:
    """What is committed stays, and the workers are free again."""
    world = World()
    verifier = world.add_verifier()
    drafter = world.add_drafter()
    world.run(0.1)
    job = world.submit(1, PROMPT, max_tokens=1000)
    world.run(0.2)
    world.send(Cancel(job_id=1))
    world.run(0.1)
    assert job.finish == "cancelled"
    assert 0 < len(job.token_ids) < 1000
    assert (verifier.sessions, drafter.sessions) == ({}, {})


def test_submitting_twice_is_harmless() -> None:
    """The same id with the same content attaches; with other content it is refused."""
    world = World()
    world.add_verifier()
    world.run(0.1)
    job = world.submit(1, PROMPT, max_tokens=10)
    world.submit(1, PROMPT, max_tokens=10)
    world.run_until(lambda: finished(world, 1))
    assert job.token_ids == toy_text(PROMPT, 10)
    world.submit(1, PROMPT, max_tokens=11)
    world.run(0.1)
    assert job.failed is not None
    assert "other content" in job.failed.reason


def test_a_failed_job_tells_its_reason_again() -> None:
    """A client that lost the reason and submits again hears it, and what was committed."""

    class Broken(ToyEngine):
        def step(self, steps):  # type: ignore[no-untyped-def]
            raise EngineError("out of order")

    world = World()
    world.add_verifier(engine=Broken())
    world.run(0.1)
    job = world.submit(1, PROMPT, max_tokens=10)
    world.run_until(lambda: finished(world, 1))
    first, job.failed = job.failed, None
    world.submit(1, PROMPT, max_tokens=10)
    world.run(0.1)
    assert first is not None
    assert "out of order" in first.reason
    assert job.failed == first


@pytest.mark.parametrize(
    ("prompt", "params", "code", "reason"),
    [
        ([], {}, "invalid", "empty"),
        ([500], {}, "invalid", "outside the vocabulary"),
        ([1], {"max_tokens": 5000}, "invalid", "exceed the 2000"),
        ([1], {"strategy": "wishful"}, "invalid", "known are deterministic"),
    ],
)
def test_bad_jobs_are_refused(prompt: list[int], params: dict[str, int], code: str, reason: str) -> None:
    """A refusal says why, and harms nobody else."""
    world = World()
    world.add_verifier()
    world.run(0.1)
    good = world.submit(2, PROMPT, max_tokens=5)
    bad = world.submit(1, prompt, **params)
    world.run_until(lambda: finished(world, 1, 2))
    assert bad.failed is not None
    assert (bad.failed.code, reason in bad.failed.reason) == (code, True)
    assert good.token_ids == toy_text(PROMPT, 5)


def test_without_a_verifier_jobs_are_refused() -> None:
    """The reason says what to start."""
    world = World()
    job = world.submit(1, PROMPT)
    world.run(0.1)
    assert job.failed is not None
    assert (job.failed.code, "specq worker --role target" in job.failed.reason) == ("no_verifier", True)


@pytest.mark.parametrize("drafter_first", [True, False])
def test_a_drafter_of_another_tokenizer_is_refused(drafter_first: bool) -> None:
    """Whichever comes first, the refusal names both models."""
    world = World()
    alien = ToyProposer(toy_info("alien", tokenizer="another"))
    if drafter_first:
        world.add_drafter(b"d0", alien)
        world.run(0.1)
    world.add_verifier()
    world.run(0.1)
    if not drafter_first:
        world.add_drafter(b"d0", alien)
        world.run(0.1)
    assert "alien" in world.refused[b"d0"]
    assert "toy" in world.refused[b"d0"]


def test_a_forged_draft_is_dropped() -> None:
    """Only the drafter of a lane may draft in it."""
    world = World()
    verifier = world.add_verifier()
    world.run(0.1)
    world.submit(1, PROMPT, max_tokens=1000)
    world.run(0.1)
    epoch = verifier.sessions[1].epoch
    forged = Draft(
        session_id=1, epoch=epoch, lane=0, base_len=3, first_id=0,
        token_ids=np.array([1]), parent_ids=np.array([-1]), scores=np.array([0.0]),
    )  # fmt: skip
    world.send(forged)
    world.run(0.1)
    assert verifier.sessions[1].stats.drafted == 0
    assert world.broker.state.counts["dropped_front"] == 1


def test_garbage_is_counted_and_dropped() -> None:
    """The broker goes on, and says how much it dropped."""
    world = World()
    world.add_verifier()
    for frames in ([], [b""], [b"x" * 8, b"{}"], [bytes(8), b"\xff"], encode(GetStatus())[:1]):
        world.broker.from_front(CLIENT, frames, world.now)
    world.run(0.1)
    world.send(GetStatus())
    world.run(0.1)
    assert world.status()["counts"] == {"dropped_front": 5}


def test_a_client_that_comes_back_gets_what_it_lacks() -> None:
    """Submitting again with `have` brings the rest, also of a finished job."""
    world = World()
    world.add_verifier()
    world.run(0.1)
    job = world.submit(1, PROMPT, max_tokens=10)
    world.run_until(lambda: finished(world, 1))
    whole = list(job.token_ids)
    del job.token_ids[4:]
    params = SamplingParams(max_tokens=10)
    world.send(Submit(job_id=1, params=params, have=4, prompt_ids=np.array(PROMPT, np.int32)))
    world.run(0.1)
    assert job.token_ids == whole


def test_eos_ends_a_job_unless_ignored() -> None:
    """The end-of-sequence token ends the text, and does not with ignore_eos."""

    class Ender(ToyEngine):
        def step(self, steps):  # type: ignore[no-untyped-def]
            found = super().step(steps)
            for judgement in found:
                if len(self.contexts[judgement.session_id]) >= 12:
                    judgement.token_ids[-1] = EOS
            return found

    world = World()
    world.add_verifier(engine=Ender())
    world.run(0.1)
    ended = world.submit(1, PROMPT, max_tokens=40)
    going = world.submit(2, PROMPT, max_tokens=40, ignore_eos=True)
    world.run_until(lambda: finished(world, 1, 2))
    assert (ended.finish, len(ended.token_ids), ended.token_ids[-1]) == ("stop", 10, EOS)
    assert (going.finish, len(going.token_ids)) == ("length", 40)


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
    {"max_nodes": 4},
]


@pytest.mark.parametrize("speculation", SHAPES, ids=str)
def test_all_modes_and_shapes_give_the_same_text(speculation: dict[str, object]) -> None:
    """They buy speed; and each of them, but plain, had nodes accepted and rejected."""
    world = World()
    world.add_verifier()
    world.add_drafter(proposer=ToyProposer(wrong_every=4))
    world.run(0.1)
    job = world.submit(1, PROMPT, speculation=Speculation.from_dict(speculation), max_tokens=60)
    world.run_until(lambda: finished(world, 1))
    assert job.token_ids == toy_text(PROMPT, 60)
    drafted, accepted = int(job.stats["draft_tokens"]), int(job.stats["accepted_tokens"])  # type: ignore[call-overload]
    if speculation.get("mode") == "plain":
        assert drafted == 0
    else:
        assert drafted > accepted > 0


def test_synchronous_rounds_wait_for_their_drafts() -> None:
    """Each round but the first two verifies a draft, though the drafter takes ten steps' time for it."""
    world = World(pass_s=0.05)
    world.add_verifier()
    world.add_drafter()
    world.run(0.1)
    job = world.submit(1, PROMPT, speculation=Speculation(mode="sync", num_candidates=1, max_depth=3), max_tokens=41)
    world.run_until(lambda: finished(world, 1))
    assert job.token_ids == toy_text(PROMPT, 41)
    assert job.stats["rounds"] == 11  # the first is plain; ten make four tokens each
    assert job.stats["depths"] == job.stats["leaves"] * 3 == 30


def test_a_synchronous_job_without_a_drafter_goes_on_alone() -> None:
    """It waits a moment for a drafter, then decodes plainly; and one that dies does not stop it."""
    world = World()
    world.add_verifier()
    world.run(0.1)
    job = world.submit(1, PROMPT, speculation=Speculation(mode="sync"), max_tokens=30)
    world.run_until(lambda: finished(world, 1), limit_s=5)
    assert job.token_ids == toy_text(PROMPT, 30)
    world.add_drafter()
    world.run(0.1)
    job = world.submit(2, PROMPT, speculation=Speculation(mode="sync"), max_tokens=300)
    world.run_until(lambda: len(job.token_ids) > 50)
    world.kill(b"d0")
    world.run_until(lambda: finished(world, 2), limit_s=10)
    assert job.token_ids == toy_text(PROMPT, 300)


def test_the_shape_follows_acceptance_both_ways() -> None:
    """Once drafts are rejected, hardly any node is verified; when they are good again, trees grow again."""
    world = World()
    world.add_verifier()
    proposer = ToyProposer(blind=True)
    world.add_drafter(proposer=proposer)
    world.run(0.1)
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
    """Whoever knows it knows what the verifier will draw."""
    world = World()
    world.add_verifier()
    drafter = world.add_drafter()
    world.run(0.1)
    world.submit(1, PROMPT, strategy="probabilistic", temperature=1.0, seed=77, max_tokens=50)
    world.submit(2, PROMPT, temperature=1.0, seed=78, max_tokens=50)
    world.run_until(lambda: len(drafter.sessions) == 2)
    assert {i: session.params.seed for i, session in drafter.sessions.items()} == {1: 0, 2: 78}


# --- several drafters, and none -----------------------------------------------------------------------------------


def test_drafters_of_different_models_share_a_job() -> None:
    """Each in a lane of its own; one that would draft the same as another is not added."""
    world = World()
    world.add_verifier(prompt_lookup=False)
    world.add_drafter(b"d0", ToyProposer(wrong_every=3))
    world.add_drafter(b"d1", ToyProposer(replace(toy_info("other"), fingerprint="other"), wrong_every=4))
    world.add_drafter(b"d2", ToyProposer(wrong_every=3))
    world.run(0.1)
    job = world.submit(1, PROMPT, max_tokens=100)
    world.run_until(lambda: sum(len(drafter.sessions) for drafter in world.drafters.values()) == 2)
    assert len(world.drafters[b"d1"].sessions) == 1
    assert {lane for session in world.verifiers[b"v0"].sessions.values() for lane in session.lanes} <= {0, 1}
    world.run_until(lambda: finished(world, 1))
    assert job.token_ids == toy_text(PROMPT, 100)
    assert job.stats["accepted_tokens"]


def test_a_drafter_that_comes_late_joins_and_one_that_goes_is_not_missed() -> None:
    """The text is the same, and the job goes on at every moment."""
    world = World()
    world.add_verifier()
    world.add_drafter(b"d0", ToyProposer(wrong_every=3))
    world.run(0.1)
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

    world = World()
    world.add_verifier(engine=Loop())
    world.run(0.1)
    job = world.submit(1, PROMPT, max_tokens=120)
    plain = world.submit(2, PROMPT, speculation=Speculation(mode="plain"), max_tokens=120)
    world.run_until(lambda: finished(world, 1, 2))
    assert job.token_ids == plain.token_ids == [1 + i % 6 for i in range(3, 123)]
    assert plain.stats["rounds"] == 120
    assert int(job.stats["rounds"]) < 60  # type: ignore[call-overload]


def test_lookups_that_fail_are_given_up() -> None:
    """In a text that hardly repeats, the verifier's own guesses cost a row now and then, and change nothing."""
    world = World()
    world.add_verifier()
    world.run(0.1)
    job = world.submit(1, PROMPT, max_tokens=600)
    world.run_until(lambda: finished(world, 1))
    assert job.token_ids == toy_text(PROMPT, 600)
    assert 0 < int(job.stats["draft_tokens"]) < 100  # type: ignore[call-overload]
