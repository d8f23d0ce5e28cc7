"""The verdicts of a step as one message do what they would do one by one, and go on as one message to each drafter and
client."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specq.broker import Send, Write
from specq.protocol.messages import Assign, Failed, Follow, Heartbeat, JobTokens, Submit, Tokens, Verdict, Verdicts
from specq.protocol.params import SamplingParams, Speculation
from specq.protocol.wire import decode, encode
from tests.broker.desk import ANN, BEN, VERIFIER, Desk, desk_with, token_ids

PROMPT_LEN = 2
ROOM = 12  # tokens of a job at most


def step_of(desk: Desk, *said: tuple[int, list[int]], **changes: Any) -> Verdicts:
    """Return a step that commits tokens to jobs, each from where it is unless `base_lens` say otherwise; every second
    token is an accepted draft of lane 0."""
    jobs = [desk.broker.state.jobs.active.get(job_id) for job_id, _ in said]
    sizes = [len(tokens) for _, tokens in said]
    num_nodes = [size // 2 for size in sizes]
    nodes = sum(num_nodes)
    fields: dict[str, Any] = {
        "session_ids": [job_id for job_id, _ in said],
        "epochs": [job.session.epoch if job else 0 for job in jobs],
        "base_lens": [job.transcript.length if job else PROMPT_LEN for job in jobs],
        "num_tokens": sizes,
        "num_nodes": num_nodes,
        "num_seen": [2] * len(said),
        "waited_us": [5] * len(said),
        "token_ids": [token for _, tokens in said for token in tokens],
        "origins": [4 if i % 2 else 2 for size in sizes for i in range(size)],
        "node_ids": list(range(nodes)),
        "mask": [i % 2 for i in range(nodes)],
        "node_lanes": [0] * nodes,
        "seen": [0, 3] * len(said),
    }
    arrays = {name: np.array(value, np.int64) for name, value in (fields | changes).items()}
    found = decode(encode(Verdicts(**arrays, min_accept_prob=300, step_us=7)))
    assert isinstance(found, Verdicts)
    return found


# --- as if each had come alone ----------------------------------------------------------------------------------------


def remembered(desk: Desk) -> dict[str, Any]:
    """Return what a broker knows and has said of jobs after some verdicts, but for how many messages that took."""
    state = desk.broker.state
    jobs = list(state.jobs.active.values())
    read: dict[tuple[bytes, int], list[tuple[int, list[int], bytes]]] = {}
    for to, message in desk.sent:
        for one in message.each() if isinstance(message, JobTokens | Verdicts) else [message]:
            if isinstance(one, Tokens):
                read.setdefault((to, one.job_id), []).append(
                    (one.base_len, one.token_ids.tolist(), one.origins.tobytes())
                )
            if isinstance(one, Verdict):
                said = one.base_len, one.token_ids.tolist(), (one.node_ids.tobytes(), one.mask.tobytes(), one.seen)
                read.setdefault((to, one.session_id), []).append(said)
    return {
        "jobs": {
            job.job_id: (job.transcript.token_ids, job.transcript.origins, job.stats.to_dict() | {"verdict_bytes": 0})
            for job in jobs
        },
        "rounds": {model: counts.to_dict() for model, counts in state.rounds.items()},
        "counts": dict(state.counts),
        "records": [write.record for write in desk.writes],
        "workers": {worker.name: (worker.num_tokens, worker.accepted_for) for worker in state.workers.all()},
        "read": read,
    }


def random_step(desk: Desk, rng: random.Random) -> Verdicts:
    """Return a partly wrong step: sessions that are unknown, repeated, of other epochs, or elsewhere."""
    of_all = [1, 2, 3, 4, 77]
    job_ids = rng.sample(of_all, 4) if rng.random() < 0.7 else rng.choices(of_all, k=5)
    said = [(job_id, [rng.randrange(9) for _ in range(rng.randrange(4))]) for job_id in job_ids]
    step = step_of(desk, *said)
    epochs, base_lens = step.epochs.copy(), step.base_lens.copy()
    for i in range(len(said)):
        epochs[i] += rng.random() < 0.1
        base_lens[i] = max(0, base_lens[i] + rng.choice([0, 0, 0, 0, -1, 1, -2]))
    return replace(step, epochs=epochs, base_lens=base_lens)


@pytest.mark.parametrize("has_journal", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_a_step_is_its_verdicts_one_by_one(seed: int, *, has_journal: bool) -> None:
    """Whatever is wrong with some of them: transcripts, origins, counts, records, what drafters and clients read."""
    rng, desks = random.Random(seed), [Desk(has_journal=has_journal) for _ in range(2)]
    for desk in desks:
        for job_id in (1, 2, 3):
            desk.submit(job_id, max_tokens=ROOM)
        desk.submit(4, max_tokens=ROOM, client=BEN)
        desk.add_drafter(b"d0")
    together, alone = desks
    for _ in range(12):
        step = random_step(together, rng)
        together.back(step)
        for verdict in step.each():
            alone.back(verdict)
        if has_journal:
            for desk in desks:
                desk.journaled()
    known = remembered(together)
    texts = {key: [token for _, ids, _ in said for token in ids] for key, said in known["read"].items()}
    one_by_one = remembered(alone)
    expected = {key: [token for _, ids, _ in said for token in ids] for key, said in one_by_one["read"].items()}
    assert texts == expected
    assert {name: known[name] for name in known if name != "read"} == {n: one_by_one[n] for n in known if n != "read"}
    assert known["counts"]["late_verdicts"] + known["counts"]["misfit_verdicts"] > 3
    assert sum(len(tokens) for tokens, _, _ in known["jobs"].values()) > 10


def test_a_step_message_has_no_log_probabilities() -> None:
    """So a job that requests them gets its own messages. The others use the step message."""
    desk = desk_with(1, 2)
    desk.job(1).transcript.logprobs.num_top = 0
    desk.back(step_of(desk, (1, [7]), (2, [8, 9])))
    assert [desk.job(i).transcript.token_ids for i in (1, 2)] == [[], [8, 9]]
    assert desk.broker.state.counts["misfit_verdicts"] == 1


def test_the_bytes_of_a_step_are_shared_out() -> None:
    """To each job those that are of it."""
    desk = desk_with(1, 2)
    step = step_of(desk, (1, [7]), (2, [8, 9, 3]))
    desk.back(step)
    arrays = sum(len(frame) for frame in encode(step)[2:])
    sizes = [desk.job(i).stats.verdict_bytes for i in (1, 2)]
    assert sum(sizes) == arrays
    assert sizes[1] > sizes[0]


# --- to clients -------------------------------------------------------------------------------------------------------


def test_each_client_receives_one_message() -> None:
    """With the jobs that it follows, and no others; one job alone comes as before."""
    desk = Desk()
    for job_id, client in ((1, ANN), (2, ANN), (3, BEN)):
        desk.submit(job_id, client=client)
    desk.front(BEN, Follow(job_id=1))
    desk.sent.clear()
    desk.back(step_of(desk, (1, [7]), (2, [8, 9]), (3, [4, 5, 6])))
    (to_ann,), (to_ben,) = desk.received(ANN), desk.received(BEN)
    assert isinstance(to_ann, JobTokens)
    assert isinstance(to_ben, JobTokens)
    assert [(one.job_id, one.base_len, one.token_ids.tolist(), one.origins.tolist()) for one in to_ann.each()] == [
        (1, 0, [7], [2]), (2, 0, [8, 9], [2, 4]),
    ]  # fmt: skip
    assert {one.job_id: one.token_ids.tolist() for one in to_ben.each()} == {1: [7], 3: [4, 5, 6]}
    desk.sent.clear()
    desk.back(step_of(desk, (2, [1]), (77, [1])))
    (alone,) = desk.received(ANN)
    assert isinstance(alone, Tokens)
    assert (alone.job_id, alone.base_len, alone.token_ids.tolist()) == (2, 2, [1])


def test_jobs_with_more_to_say_come_alone() -> None:
    """Those that are explained; the others of the step together."""
    desk = Desk()
    desk.submit(1, explain=True)
    desk.submit(2)
    desk.submit(3)
    desk.sent.clear()
    desk.back(step_of(desk, (1, [7]), (2, [8]), (3, [9])))
    assert [type(message) for message in desk.received(ANN)] == [Tokens, JobTokens]
    assert sorted(token_ids(desk.received(ANN))) == [7, 8, 9]


def test_tokens_are_sent_after_the_journal_write() -> None:
    """Then all steps of the group at once, in order; each token once."""
    desk = desk_with(1, 2, has_journal=True)
    desk.sent.clear()
    desk.back(step_of(desk, (1, [7]), (2, [8, 9])))
    middle = desk.writes[-1].sequence
    desk.back(step_of(desk, (1, [3]), (2, [4])))
    assert desk.received(ANN) == []
    first = desk.take(desk.broker.journaled(middle, desk.now), ANN)
    second = desk.take(desk.broker.journaled(desk.writes[-1].sequence, desk.now), ANN)
    assert [type(message) for message in first + second] == [JobTokens, JobTokens]
    assert [{one.job_id: one.token_ids.tolist() for one in message.each()} for message in first + second] == [
        {1: [7], 2: [8, 9]}, {1: [3], 2: [4]},
    ]  # fmt: skip
    assert [(one.job_id, one.base_len) for one in second[0].each()] == [(1, 1), (2, 2)]
    assert desk.take(desk.broker.journaled(desk.writes[-1].sequence, desk.now), ANN) == []


def test_what_a_client_did_not_take_is_sent_again() -> None:
    """Each job of the message from its position; nothing in between; a job of another message is not held up."""
    desk = desk_with(1, 2, 3)
    desk.sent.clear()
    desk.back(step_of(desk, (1, [7]), (2, [8, 9])))
    (missed,) = desk.received(ANN)
    desk.broker.undelivered(Send("front", ANN, encode(missed)))
    desk.sent.clear()
    desk.back(step_of(desk, (1, [3]), (2, [4]), (3, [5])))
    assert [message.token_ids.tolist() for message in desk.received(ANN)] == [[5]]
    again = desk.tick()
    assert {one.job_id: (one.base_len, one.token_ids.tolist()) for message in again for one in message.each()} == {
        1: (0, [7, 3]), 2: (0, [8, 9, 4]),
    }  # fmt: skip
    assert desk.tick() == []


def test_a_job_that_ends_beside_others() -> None:
    """Its end comes alone, with its counts; a job that fails, with the reason."""
    desk = desk_with(1, 2, 3, has_journal=True)
    desk.sent.clear()
    desk.back(step_of(desk, (1, [7]), (2, [8]), (3, [9])))
    desk.verdict(3, 4, finish="stop")
    found = desk.journaled()
    assert [type(message) for message in found] == [Tokens, JobTokens]
    assert (found[0].job_id, found[0].token_ids.tolist(), found[0].finish) == (3, [9, 4], "stop")
    assert not any(isinstance(message, Failed) for message in found)


# --- to drafters ------------------------------------------------------------------------------------------------------


def test_a_drafter_of_all_sessions_receives_the_step_as_it_came() -> None:
    """Byte for byte."""
    desk = desk_with(1, 2)
    desk.add_drafter(b"d0")
    assert sorted(assigned(desk)) == [1, 2]
    step = encode(step_of(desk, (1, [7]), (2, [8, 9])))
    sends = [
        effect
        for effect in desk.broker.from_back(VERIFIER, step, desk.now)
        if isinstance(effect, Send) and effect.to == b"d0"
    ]
    assert [send.frames for send in sends] == [step]


def test_a_drafter_receives_only_steps_of_its_own_sessions() -> None:
    """It receives no session of another drafter, no session without a drafter, and no verdict that did not fit."""
    desk = desk_with(1, 2, 3)
    desk.add_drafter(b"d0")
    desk.job(2).drafters.drop(b"d0")
    desk.broker.state.workers.get(b"d0").job_ids.discard(2)
    desk.sent.clear()
    desk.back(step_of(desk, (1, [7, 6]), (2, [8, 9]), (3, [5]), (1, [1])))
    received = [one for message in desk.received(b"d0", Verdicts) for one in message.each()]
    assert [(one.session_id, one.token_ids.tolist(), one.node_ids.tolist()) for one in received] == [
        (1, [7, 6], [0]), (3, [5], []),
    ]  # fmt: skip
    assert desk.broker.state.counts["misfit_verdicts"] == 1  # the second of job 1 speaks of a place that is taken


@pytest.mark.parametrize(("strategy", "seed"), [("deterministic", 5), ("probabilistic", 0)])
def test_a_drafter_does_not_learn_the_seed_that_judges_its_drafts(strategy: str, seed: int) -> None:
    desk = Desk()
    desk.add_drafter(b"d0")
    params = SamplingParams(max_tokens=9, seed=5, strategy=strategy)
    desk.front(ANN, Submit(job_id=1, params=params, prompt_ids=np.array([5, 6])))
    assert [message.params.seed for message in desk.received(b"d0", Assign)] == [seed]


@pytest.mark.parametrize("places", [[0], [2, 0], [1, 2], [], [0, 1, 2]], ids=str)
def test_a_part_of_a_step(places: list[int]) -> None:
    """Says of its sessions what the whole says."""
    desk = desk_with(1, 2, 3)
    step = step_of(desk, (1, [7, 6, 5, 4]), (2, []), (3, [5, 3]))
    assert step.take(places).each() == [step.each()[place] for place in places]


def test_a_busy_verifiers_step_is_held_back() -> None:
    """As verdicts that come alone are: several go as one, and nothing is left out."""
    desk = Desk()
    desk.submit(1, max_tokens=100)
    desk.submit(2, max_tokens=100)
    desk.add_drafter(b"d0")
    desk.sent.clear()
    for i in range(40):
        desk.back(replace(step_of(desk, (1, [i]), (2, [i + 1])), min_accept_prob=900))
    found = desk.received(b"d0")
    assert len(found) < 20
    assert all(isinstance(message, Verdict) for message in found)
    for job_id in (1, 2):
        own = [message for message in found if message.session_id == job_id]
        text = [token for message in own for token in message.token_ids.tolist()]
        assert text == desk.job(job_id).transcript.token_ids[: len(text)]


@pytest.mark.parametrize(("come_alone", "mode"), [(False, "sync"), (True, "sync"), (False, "jit")])
def test_jobs_of_a_verifier_that_asks_for_silence_have_no_drafters(come_alone: bool, mode: str) -> None:
    """Until it asks for drafts: then they are assigned with all of their text by then. Jobs that wait for drafts have
    theirs at once; so do those of a verifier that has said nothing yet."""
    desk = Desk()
    desk.add_drafter(b"d0")
    desk.submit(1, max_tokens=ROOM)
    assert assigned(desk) == [1]
    say_asking(desk, 9999, come_alone=come_alone)
    desk.submit(2, max_tokens=ROOM)
    desk.submit(3, max_tokens=ROOM, speculation=Speculation(mode=mode))
    assert assigned(desk) == [3]
    desk.back(replace(step_of(desk, (1, [8]), (2, [5, 6])), min_accept_prob=9999))
    assert assigned(desk) == [3]
    say_asking(desk, 300, come_alone=come_alone)
    (message,) = desk.received(b"d0", Assign)
    assert message.session_id == 2
    assert message.token_ids.tolist()[PROMPT_LEN:] == [5, 6]
    desk.submit(4, max_tokens=ROOM)
    assert assigned(desk) == [2, 4]


def assigned(desk: Desk) -> list[int]:
    """Return the jobs that the drafter was given since the last silence was asked for."""
    return [message.session_id for message in desk.received(b"d0", Assign)]


def say_asking(desk: Desk, min_accept_prob: int, *, come_alone: bool) -> None:
    """Let the verifier commit a token of job 1 and ask for such drafts; what was sent before is forgotten."""
    desk.sent.clear()
    step = replace(step_of(desk, (1, [7])), min_accept_prob=min_accept_prob)
    desk.back(step.each()[0] if come_alone else step)


# --- and all the rest -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"origins": [2]}, "origins has 1 elements, not 3"),
        ({"num_tokens": [1, 1]}, "token_ids has 3 elements, not 2"),
        ({"epochs": [1]}, "epochs has 1 elements, not 2"),
        ({"mask": [1, 1]}, "mask has 2 elements, not 1"),
        ({"num_seen": [2**31 - 1] * 2}, "seen has 4 elements, not 4294967294"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    """As a whole: no session of the message is harmed, and the next message is taken."""
    desk = desk_with(1, 2)
    wrong = step_of(desk, (1, [7]), (2, [8, 9]), **changes)
    with pytest.raises(Exception, match=f"the arrays of verdicts do not fit together: {reason}"):
        wrong.check()
    desk.sent.clear()
    desk.back(wrong)
    assert (desk.sent, desk.broker.state.counts["dropped_back"]) == ([], 1)
    desk.back(step_of(desk, (1, [7]), (2, [8, 9])))
    assert [desk.job(i).transcript.token_ids for i in (1, 2)] == [[7], [8, 9]]


def test_a_verifiers_heartbeat_is_acknowledged_as_far_as_the_journal_is() -> None:
    """After steps, too."""
    desk = desk_with(1, 2, has_journal=True)
    desk.back(step_of(desk, (1, [7]), (2, [8, 9])))
    desk.journaled()
    desk.back(step_of(desk, (1, [3]), (2, [4])))
    epochs = np.array([desk.job(i).session.epoch for i in (1, 2)])
    beat = Heartbeat(
        incarnation=1, state="ready", session_ids=np.array([1, 2]), epochs=epochs,
        lengths=np.array([PROMPT_LEN + 2, PROMPT_LEN + 3], np.int32),
    )  # fmt: skip
    assert {ack.session_id: ack.length for ack in desk.front(VERIFIER, beat)} == {
        1: PROMPT_LEN + 1, 2: PROMPT_LEN + 2,
    }  # fmt: skip


def test_each_verdict_of_a_step_is_one_record() -> None:
    """So a journal, and what is restored from it, is the same as before."""
    desk = Desk(has_journal=True)
    desk.submit(1)
    desk.submit(2)
    desk.writes.clear()
    effects = desk.broker.from_back(VERIFIER, encode(step_of(desk, (1, [7]), (2, [8, 9]))), desk.now)
    records = [effect.record for effect in effects if isinstance(effect, Write)]
    assert [(one.job_id, one.base_len, len(one.token_ids), one.num_nodes) for one in records] == [
        (1, 0, 4, 0),
        (2, 0, 8, 1),
    ]


def test_drafters_receive_verdicts_before_clients_do() -> None:
    """While more verdicts follow; then clients receive them as one, each token once, also of a job that has ended
    since."""
    desk = desk_with(1, 2, 3)
    desk.add_drafter(b"d0")
    desk.sent.clear()
    for verdict in step_of(desk, (1, [7]), (2, [8, 9]), (3, [4])).each():
        desk.take(list(desk.broker.from_back_lazily(VERIFIER, encode(verdict), desk.now)))
    assert [to for to, _ in desk.sent] == [b"d0"] * 3
    desk.sent.clear()
    ended = replace(step_of(desk, (3, [5])).each()[0], finish="stop")
    desk.take(list(desk.broker.from_back_lazily(VERIFIER, encode(ended), desk.now)))
    (end,) = desk.received(ANN)
    assert (end.token_ids.tolist(), end.finish) == ([4, 5], "stop")
    (others,) = desk.take(desk.broker.deliver(desk.now), ANN)
    assert {one.job_id: one.token_ids.tolist() for one in others.each()} == {1: [7], 2: [8, 9]}
    assert desk.take(desk.broker.deliver(desk.now)) == []


def test_drafters_receive_a_step_before_it_is_committed() -> None:
    """So they draft meanwhile. What does not fit, or might not, they receive after it, if at all."""
    desk = desk_with(1, 2, 3)
    params = SamplingParams(max_tokens=ROOM, logprobs=2)
    desk.front(ANN, Submit(job_id=4, params=params, prompt_ids=np.array([5, 6], np.int32)))
    desk.add_drafter(b"d0")
    step = step_of(desk, (1, [7]), (2, [8, 9]), (3, [4]), (4, [5]))
    base_lens = step.base_lens + np.array([0, 0, 5, 0], np.int32)  # a gap
    effects = desk.broker.from_back_lazily(VERIFIER, encode(replace(step, base_lens=base_lens)), desk.now)
    first = next(effects)
    assert isinstance(first, Send)
    assert first.to == b"d0"
    assert [one.session_id for one in decode(first.frames).each()] == [1, 2]
    assert [desk.job(i).transcript.num_tokens for i in (1, 2, 3)] == [0, 0, 0]
    assert [one for one in effects if isinstance(one, Send) and one.to == b"d0"] == []
    assert [desk.job(i).transcript.num_tokens for i in (1, 2, 3)] == [1, 2, 0]


def test_a_verdict_that_is_known_in_part_reaches_drafters_too() -> None:
    """And the second of a session in one step, after the first."""
    desk = desk_with(1)
    desk.back(step_of(desk, (1, [7, 8])))
    desk.add_drafter(b"d0")
    desk.sent.clear()
    again = replace(step_of(desk, (1, [8, 9])), base_lens=np.array([3], np.int32))
    desk.back(again)
    desk.back(step_of(desk, (1, [4]), (1, [5]), base_lens=[5, 6]))
    said = [message.token_ids.tolist() for message in desk.received(b"d0", Verdicts)]
    assert said == [[8, 9], [4], [5]]
    assert desk.job(1).transcript.token_ids == [7, 8, 9, 4, 5]
