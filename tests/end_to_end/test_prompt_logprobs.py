"""Log-probabilities of prompts, from the verifier's steps to the client, under a virtual clock with a toy model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from specq.broker.state.job import BrokerJob, JobRequest
from specq.broker.state.ledger import added_record, ended_record, restored, taken_record
from specq.broker.state.transcript import Commit
from specq.client.result import prompt_logprobs
from specq.protocol.logprobs import MAX_PROMPT_ROWS, prompt_rows, reason_against_prompt_rows
from specq.protocol.messages import Open, Submit
from specq.protocol.params import SamplingParams, Speculation
from specq.protocol.types import Logprobs, ScoredRows
from specq.testing.fake_journal import FakeJournal
from specq.testing.late import LateEngine
from specq.testing.toy import ToyEngine, toy_info, toy_scores, toy_text
from specq.testing.toy_drafters import ToyProposer
from specq.testing.world import ReceivedText, World
from specq.verifier.sessions.admission import reason_to_refuse
from specq.verifier.sessions.session import Session
from tests.end_to_end.pipeline import finished, started

PROMPT = [1 + i * 7 % 40 for i in range(37)]
NUM_TOP = 2


def expected(prompt: Sequence[int], num_top: int = NUM_TOP) -> list:
    values = toy_scores(0, ScoredRows(np.array(prompt[1:], np.int32), num_top))
    tops = zip(values.top_ids.tolist(), values.top.tolist(), strict=True)
    return [
        None,
        *(
            {"token_id": token, "logprob": own, "top": [list(pair) for pair in zip(ids, top, strict=True)]}
            for token, own, (ids, top) in zip(prompt[1:], values.tokens.tolist(), tops, strict=True)
        ),
    ]


def check(job: ReceivedText, prompt: Sequence[int], num_tokens: int, num_top: int = NUM_TOP) -> None:
    assert job.token_ids == toy_text(prompt, num_tokens)
    assert prompt_logprobs(job.prompt_rows, prompt, num_top) == expected(prompt, num_top)


def submit(world: World, job_id: int, prompt: Sequence[int] = PROMPT, num_top: int = NUM_TOP, **params) -> ReceivedText:
    return world.submit(job_id, prompt, **{"max_tokens": 20, "prompt_logprobs": num_top} | params)


@pytest.mark.parametrize("num_top", [0, 2])
@pytest.mark.parametrize("max_step_rows", [8, 512])
@pytest.mark.parametrize("engine", [ToyEngine, LateEngine])
def test_the_client_receives_them_with_the_first_tokens(num_top: int, max_step_rows: int, engine) -> None:
    """Beside drafts, with chunks of prompts, for prompts of one token and more; other jobs receive none.

    Also where steps overlap.
    """
    world = World()
    world.add_verifier(engine=engine(), max_step_rows=max_step_rows)
    world.add_drafter(b"d0", ToyProposer())
    world.run(0.1)
    jobs = [submit(world, 1, num_top=num_top), submit(world, 2, PROMPT[:1], num_top), submit(world, 3, PROMPT[:2], 1)]
    plain = world.submit(4, PROMPT, max_tokens=20)
    both = submit(world, 5, num_top=num_top, logprobs=-1)
    world.run_until(lambda: finished(world, 1, 2, 3, 4, 5))
    for job, prompt, top in zip(jobs, (PROMPT, PROMPT[:1], PROMPT[:2]), (num_top, num_top, 1), strict=True):
        check(job, prompt, 20, top)
    check(both, PROMPT, 20, num_top)
    assert plain.prompt_rows == b""
    assert plain.token_ids == toy_text(PROMPT, 20)


class SharingToy(ToyEngine):
    """A toy that shares the KV of closed sessions with later ones of the same owner."""

    def __init__(self, kv_slots: int = 10_000) -> None:
        super().__init__(toy_info(kv_slots=kv_slots))
        self.owners: dict[int, str] = {}
        self.kept: list[tuple[str, list[int]]] = []
        self.num_shared: dict[int, int] = {}

    def open(self, session_id, token_ids, owner=""):
        super().open(session_id, token_ids, owner)
        self.owners[session_id] = owner
        prefixes = [common_prefix(kept, token_ids[:-1].tolist()) for own, kept in self.kept if own == owner]
        shared = max(prefixes, key=len, default=[])
        self.num_shared[session_id] = self.num_shared.get(session_id, 0) + len(shared)
        self.contexts[session_id] = shared
        return len(shared)

    def close(self, session_id):
        if session_id in self.contexts:
            self.kept.append((self.owners[session_id], self.contexts[session_id]))
        super().close(session_id)


def common_prefix(one: list[int], other: list[int]) -> list[int]:
    count = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:count]


def test_shared_prefixes_hide_no_row() -> None:
    engine = SharingToy()
    world = started(engine=engine)
    jobs = {}
    for i in range(1, 5):
        jobs[i] = submit(world, i, num_top=NUM_TOP if i % 2 else -1)
        world.run_until(lambda: finished(world, *jobs))
    assert [engine.num_shared[i] for i in jobs] == [0, 0, 0, 36]
    check(jobs[1], PROMPT, 20)
    check(jobs[3], PROMPT, 20)


def test_evictions_hide_no_row() -> None:
    """A session that is opened again may share its own KV, whose rows it has."""
    engine = SharingToy(kv_slots=80)
    world = World()
    world.add_verifier(engine=engine, max_step_rows=12)
    world.run(0.1)
    jobs = {i: submit(world, i, [i, *PROMPT], max_tokens=30) for i in range(1, 6)}
    world.run_until(lambda: finished(world, *jobs))
    assert any(engine.num_shared.values())
    for i, job in jobs.items():
        check(job, [i, *PROMPT], 30)


@pytest.mark.parametrize("seed", range(3))
def test_crashes_and_losses_lose_no_row(seed: int) -> None:
    """Verifiers die in the middle of prompts and texts; another computes the rows, or they were sent before."""
    world = World(seed=seed, loss=0.03, double=0.05)
    for i in range(5):
        world.add_verifier(f"v{i}".encode(), max_step_rows=8)
    world.run(1.0)
    jobs = {i: submit(world, i, [i, *PROMPT], max_tokens=60) for i in range(1, 6)}
    for i in range(4):
        world.run(0.03 + 0.02 * seed)
        world.kill(f"v{i}".encode())
    world.run_until(lambda: finished(world, *jobs))
    for i, job in jobs.items():
        check(job, [i, *PROMPT], 60)


def test_a_step_has_a_limit_of_scored_rows(monkeypatch) -> None:
    monkeypatch.setattr("specq.verifier.step.planner.SCORED_LOGITS", 10 * 50)
    engine = ToyEngine()
    world = started(engine=engine)
    jobs = {i: submit(world, i, [i, *PROMPT]) for i in (1, 2)}
    world.run_until(lambda: finished(world, *jobs))
    assert max(engine.num_rows) <= 11
    for i, job in jobs.items():
        check(job, [i, *PROMPT], 20)


def test_only_verifiers_whose_engine_returns_them_receive_the_job() -> None:
    engine = ToyEngine()
    engine.scores_rows = False
    world = started(engine=engine)
    job = submit(world, 1)
    assert job.failed is None
    world.run(0.1)
    assert job.failed is not None
    reason = "no verifier of toy here supports prompt_logprobs: its engine, toy, does not return them"
    assert job.failed.reason == reason
    world.add_verifier(b"v1")
    world.run(0.1)
    jobs = {i: submit(world, i, [i, *PROMPT]) for i in range(2, 8)}
    world.run_until(lambda: finished(world, *jobs))
    for i, job in jobs.items():
        check(job, [i, *PROMPT], 20)
    assert not engine.num_rows


def test_an_engine_that_cannot_refuses_the_session() -> None:
    opened = Open(
        session_id=1,
        epoch=1,
        prompt_len=3,
        tokens_left=5,
        params=SamplingParams(prompt_logprobs=0),
        token_ids=np.arange(3, dtype=np.int32),
    )
    assert reason_to_refuse(opened, toy_info(), has_codec=True) == ""
    reason = reason_to_refuse(opened, toy_info(), has_codec=True, scores_prompts=False)
    assert reason == "prompt_logprobs is not supported by the toy engine, which serves toy"


@pytest.mark.parametrize("logprobs", [-1, 1])
def test_the_journal_holds_them(logprobs: int) -> None:
    params = SamplingParams(prompt_logprobs=NUM_TOP, logprobs=logprobs)
    submitted = Submit(job_id=1, params=params, speculation=Speculation(), prompt_ids=np.array(PROMPT, np.int32))
    job, journal = BrokerJob(JobRequest(submitted)), FakeJournal()
    rows = prompt_rows(toy_scores(0, ScoredRows(job.request.prompt_ids[1:], NUM_TOP))).tobytes()
    transcript = job.transcript
    transcript.token_ids, transcript.origins, transcript.prompt_rows = [7, 8], bytearray(2), rows
    if logprobs >= 0:
        values = np.array([[-1], [-2]], np.float32)
        transcript.logprobs.add(Logprobs(values[:, 0], np.array([[7], [9]], np.int32), values), 2)
    raw = np.array([7, 8], "<i4").tobytes()
    commit = Commit(1, 0, len(PROMPT), "", 0, (), {}, 0, [7, 8], raw, bytes(2), 0, 0, 0)
    journal.write([taken_record(job), added_record(job, commit, 0)])
    for finish in ("", "stop"):
        if finish:
            transcript.finish = finish
            journal.write([ended_record(job)])
        again = restored(journal.find(1)).transcript
        assert (again.token_ids, again.prompt_rows, again.finish) == ([7, 8], rows, finish)
        assert again.logprobs.arrays(0).keys() == transcript.logprobs.arrays(0).keys()
        assert again.logprobs.to_list([7, 8]) == transcript.logprobs.to_list([7, 8])
    assert restored(journal.find(1)).delta(0).prompt_rows.tobytes() == rows
    assert restored(journal.find(1)).delta(1).prompt_rows.tobytes() == b""


def test_a_session_that_goes_on_computes_none() -> None:
    """The journal has them with the first tokens; such a session shares KV as any other."""
    params = SamplingParams(prompt_logprobs=1)
    fields = {"session_id": 1, "epoch": 2, "prompt_len": 3, "tokens_left": 5, "params": params, "owner": "ann"}
    fresh, later = (Session(Open(**fields, token_ids=np.arange(n, dtype=np.int32))) for n in (3, 4))
    assert (fresh.prompt_scores is None, later.prompt_scores is None) == (False, True)
    assert (fresh.owner == "ann", later.owner == "ann") == (False, True)


def test_a_prompt_whose_rows_fit_no_message_is_refused() -> None:
    longest = MAX_PROMPT_ROWS // (4 * 41) + 1
    assert reason_against_prompt_rows(longest, SamplingParams(prompt_logprobs=20)) == ""
    assert "for a prompt of" in reason_against_prompt_rows(longest + 1, SamplingParams(prompt_logprobs=20))
    assert reason_against_prompt_rows(10**9, SamplingParams()) == ""
