"""Broker, verifiers and drafters together, under a virtual clock, with a toy model."""

import numpy as np
import pytest

from specq.protocol import NO_TAP, Cancel, SamplingParams, Submit
from specq.testing.toy import EOS, ToyEngine, toy_info, toy_text
from specq.testing.toy_drafters import ToyProposer
from specq.testing.world import World
from tests.each import each
from tests.end_to_end.pipeline import PROMPT, completed, completed_all, count, finished, started, toys


def test_a_job_without_a_drafter_is_plain_decoding() -> None:
    """The pipeline needs no drafter: one token a round."""
    job = completed(started(), 20)
    assert (job.finish, job.stats["rounds"], job.stats["draft_tokens"]) == ("length", 20, 0)


def test_a_perfect_drafter_makes_rounds_long() -> None:
    """With a drafter that knows the target, far fewer rounds give the same text."""
    job = completed(started(ToyProposer()), 60)
    assert count(job, "rounds") < 30
    assert job.stats["accepted_tokens"]


@each(("wrong_every", "blind"), [(wrong, blind) for wrong in (1, 2, 3, 7) for blind in (False, True)])
def test_any_drafter_gives_the_same_text(wrong_every: int, blind: bool) -> None:
    """Drafts change speed, never text; and they were in fact contradicted, and accepted where that is possible.

    (A blind drafter that is wrong at every other position is never in time: the plain step takes the right one.) Where
    a drafter's second choice is right, most rounds begin with live nodes.
    """
    job = completed(started(*toys(wrong_every, blind=blind)), 50)
    assert count(job, "stale") > 0
    assert bool(job.stats["accepted_tokens"]) == (not blind or wrong_every > 2)
    assert bool(job.stats["hits"]) == (not blind or wrong_every > 1)
    if wrong_every == 3 and not blind:
        assert count(job, "hits") > count(job, "misses") > 0


def test_a_useless_drafter_has_almost_no_cost() -> None:
    """Contradicted time and again, its nodes are not verified, and it learns to be silent."""
    plain, world = started(), started(*toys(1, blind=True))
    completed(plain, 500)
    job = completed(world, 500)
    assert world.now < plain.now * 1.05
    assert count(job, "draft_tokens") < 30
    assert 0 < count(job, "drafted") < 220
    assert count(job, "accepted_tokens") == 0


@pytest.mark.parametrize("seed", range(8))
def test_loss_and_doubling_change_no_text(seed: int) -> None:
    """With 5% of all messages lost and 5% doubled and reordered, all jobs end with the right text."""
    world = World(seed=seed, loss=0.05, double=0.05)
    world.add_verifier(b"v0")
    world.add_verifier(b"v1")
    for i, proposer in enumerate(toys(2, 3, 4)):
        world.add_drafter(f"d{i}".encode(), proposer)
    world.run(1.0)
    jobs = {i: world.submit(i, [i, i + 1], max_tokens=40, seed=i) for i in range(1, 9)}
    world.run_until(lambda: finished(world, *jobs))
    for i, job in jobs.items():
        assert job.token_ids == toy_text([i, i + 1], 40, seed=i)
        assert job.finish == "length"
    for kind in ("accepted_tokens", "hits", "stale"):
        assert any(count(job, kind) for job in jobs.values())
    drafted, accepted = (sum(count(job, name) for job in jobs.values()) for name in ("draft_tokens", "accepted_tokens"))
    assert drafted > accepted, "nothing was rejected"


def test_a_dead_verifier_costs_no_token() -> None:
    """Its sessions go on at another, from the transcript."""
    world = started(ToyProposer())
    jobs = {i: world.submit(i, [i], max_tokens=300) for i in (1, 2, 3)}
    world.run(0.3)
    world.add_verifier(b"v1")
    assert not finished(world, 1)
    world.kill(b"v0")
    world.run_until(lambda: finished(world, *jobs))
    assert [jobs[i].token_ids for i in jobs] == [toy_text([i], 300) for i in jobs]


def test_a_dead_drafter_is_replaced() -> None:
    """The session goes on alone, then with another drafter, in a new lane."""
    world = started(ToyProposer())
    job = world.submit(1, PROMPT, max_tokens=1500)
    world.run(0.2)
    world.kill(b"d0")
    world.add_drafter(b"d1")
    world.run_until(lambda: finished(world, 1))
    assert job.token_ids == toy_text(PROMPT, 1500)
    assert world.drafters[b"d1"].num_passes > 10


def test_sixteen_sessions_share_steps() -> None:
    """One step serves many sessions."""
    world = started(ToyProposer())
    completed_all(world, [[i] for i in range(1, 17)], 30)
    assert world.verifiers[b"v0"].num_steps < 60


def test_a_small_pool_evicts_and_goes_on() -> None:
    """Sessions that find no KV room wait, or are evicted and prefilled again; all end with the right text."""
    world = started(ToyProposer(), engine=ToyEngine(toy_info(kv_slots=120)))
    completed_all(world, [[*range(1, 30), i] for i in range(1, 6)], 60)


def test_more_jobs_than_sessions_wait_their_turn() -> None:
    """A verifier takes no more sessions than it said; the rest wait at the broker."""
    world = World()
    verifier = world.add_verifier(max_sessions=2)
    world.run(0.1)
    world.at(0.02, lambda: sizes.append(len(verifier.sessions)))
    sizes = list[int]()
    completed_all(world, [[i] for i in range(1, 8)], 10)
    assert sizes == [2]


def test_stop_tokens_end_a_job() -> None:
    """The stop token is the last; what was accepted beyond it is cut."""
    world, text = started(ToyProposer()), toy_text(PROMPT, 40)
    stop = text[10]
    job = world.submit(1, PROMPT, max_tokens=40, stop_token_ids=(stop,))
    world.run_until(lambda: finished(world, 1))
    assert job.token_ids == text[: text.index(stop) + 1]
    assert job.finish == "stop"


def test_a_cancelled_job_ends() -> None:
    """What is committed stays, and the workers are free again."""
    world = started(ToyProposer())
    job = world.submit(1, PROMPT, max_tokens=1000)
    world.run(0.2)
    world.send(Cancel(job_id=1))
    world.run(0.1)
    assert job.finish == "cancelled"
    assert 0 < len(job.token_ids) < 1000
    assert (world.verifiers[b"v0"].sessions, world.drafters[b"d0"].sessions) == ({}, {})


def test_submitting_twice_is_harmless() -> None:
    """The same id with the same content attaches; with other content it is refused."""
    world = started()
    world.submit(1, PROMPT, max_tokens=10)
    job = completed(world, 10)
    world.submit(1, PROMPT, max_tokens=11)
    world.run(0.1)
    assert job.failed is not None
    assert "other content" in job.failed.reason


def test_a_client_that_comes_back_gets_what_it_lacks() -> None:
    """Submitting again with `have` brings the rest, also of a finished job."""
    world = started()
    job = completed(world, 10)
    whole = list(job.token_ids)
    del job.token_ids[4:]
    params = SamplingParams(max_tokens=10)
    world.send(Submit(job_id=1, params=params, have=4, prompt_ids=np.array(PROMPT, np.int32)))
    world.run(0.1)
    assert job.token_ids == whole


def test_eos_ends_a_job_unless_ignored() -> None:
    """The end-of-sequence token ends the text, and does not with ignore_eos."""

    class Ender(ToyEngine):
        def step(self, steps, tap=NO_TAP):  # type: ignore[no-untyped-def]
            found = super().step(steps, tap)
            for judgement in found.judgements:
                if len(self.contexts[judgement.session_id]) >= 12:
                    judgement.token_ids[-1] = EOS
            return found

    world = started(engine=Ender())
    ended = world.submit(1, PROMPT, max_tokens=40)
    going = world.submit(2, PROMPT, max_tokens=40, ignore_eos=True)
    world.run_until(lambda: finished(world, 1, 2))
    assert (ended.finish, len(ended.token_ids), ended.token_ids[-1]) == ("stop", 10, EOS)
    assert (going.finish, len(going.token_ids)) == ("length", 40)
