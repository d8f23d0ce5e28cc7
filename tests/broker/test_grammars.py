"""Jobs with a grammar: which workers get them, what is said where none can, what the journal and the memory hold."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from specq.broker.jobs import intake
from specq.broker.jobs.reports import status_report
from specq.broker.state import table
from specq.broker.state.rights import REQUESTS_BURST
from specq.protocol import (
    BROKER_CAPABILITIES,
    CAPABILITIES,
    GRAMMAR_CAPABILITIES,
    GRAMMAR_KINDS,
    OWNERS,
    Assign,
    Failed,
    Hello,
    JobError,
    JobInfo,
    Open,
    ProtocolError,
    SamplingParams,
    Submit,
    Tokens,
    decode,
    encode,
    grammar_capability,
    has_grammar_kind,
)
from specq.protocol import params as params_module
from specq.protocol.grammars import grammar_text
from specq.testing.toy import toy_info
from tests.broker.desk import ANN, VERIFIER, Desk
from tests.broker.grammar_jobs import IDS, MASKING, SCHEMA, opened, wait
from tests.each import each

REGEX = grammar_text({"regex": "[0-9]+"})


OLDER: list[tuple[str, ...]] = [(), (OWNERS,), CAPABILITIES]  # protocol 5, 6 without grammars, no llguidance there


def submit(desk: Desk, job_id: int, grammar: str = SCHEMA, *, max_tokens: int = 100, **fields: object) -> list[Failed]:
    """Submit a job; return why it is refused, if it is."""
    params = SamplingParams(max_tokens=max_tokens, grammar=grammar)
    received = desk.front(ANN, Submit(job_id=job_id, params=params, prompt_ids=IDS, **fields))
    return [message for message in received if isinstance(message, Failed)]


# --- where they go ----------------------------------------------------------------------------------------------------


@each("older", OLDER)
def test_only_a_verifier_that_masks_gets_a_grammar(older: tuple[str, ...]) -> None:
    """Also where another has less to do. The verifier gets the grammar as it was given."""
    desk = Desk(capabilities=older)
    desk.hello(b"new", capabilities=MASKING)
    for job_id in range(1, 5):
        submit(desk, job_id)
    assert opened(desk) == [(b"new", job_id) for job_id in range(1, 5)]
    assert {message.params.grammar for message in desk.received(b"new", Open)} == {SCHEMA}


@each("kind", GRAMMAR_KINDS)
def test_a_verifier_may_know_some_kinds_only(kind: str) -> None:
    desk = Desk(capabilities=(*CAPABILITIES, grammar_capability(kind)))
    assert [bool(submit(desk, n, g)) for n, g in ((1, SCHEMA), (2, REGEX))] == [
        kind != "json_schema",
        kind != "regex",
    ]


def test_masks_of_another_version_do_not_count() -> None:
    """They may allow other tokens."""
    desk = Desk(capabilities=tuple(name.replace("/1/", "/2/") for name in MASKING))
    assert submit(desk, 1)


@each("older", OLDER)
@each("how", ["leaving", "failed", "draining", "silent", "given back"])
def test_no_fail_over_to_a_verifier_that_does_not_mask(how: str, older: tuple[str, ...]) -> None:
    """However its verifier goes, the job waits for one that masks, and continues there."""
    desk = Desk(capabilities=MASKING)
    submit(desk, 1)
    desk.verdict(1, 7)
    desk.hello(b"older", capabilities=older)
    if how == "silent":
        for _ in range(200):
            desk.now += 0.25
            desk.beat(b"older")
            desk.take(desk.broker.tick(desk.now))
    elif how == "given back":
        desk.leave()
        desk.hello(VERIFIER, capabilities=older)
    else:
        desk.leave(state=how)
    wait(desk, 3)
    assert opened(desk) == [(VERIFIER, 1)]
    if how == "draining":
        desk.leave()
    desk.hello(b"new", capabilities=MASKING)
    assert opened(desk) == [(VERIFIER, 1), (b"new", 1)]
    (message,) = desk.received(b"new", Open)
    assert (message.params.grammar, message.token_ids.tolist()) == (SCHEMA, [5, 6, 7])


@each("newer", [MASKING, CAPABILITIES, (OWNERS,)])
def test_rebalancing_moves_them_between_verifiers_that_mask_only(newer: tuple[str, ...]) -> None:
    desk = Desk(capabilities=MASKING)
    for job_id in range(1, 7):
        submit(desk, job_id, max_tokens=1000)
    desk.submit(7, max_tokens=1000)
    desk.hello(b"newer", capabilities=newer)
    wait(desk, 4)
    moved = {job_id for to, job_id in opened(desk) if to == b"newer"}
    assert bool(moved - {7}) == (newer == MASKING)
    assert moved


def test_quarantine_frees_only_a_verifier_that_masks() -> None:
    """A job that may crash verifiers runs alone. It does not push others from a verifier where it cannot run."""
    desk = Desk(capabilities=MASKING)
    submit(desk, 1)
    for name in (b"second", b"third"):
        worker = desk.job(1).session.verifier
        desk.leave(worker, state="failed")
        desk.hello(name, capabilities=MASKING)
    assert desk.job(1).is_quarantined
    desk.leave(b"third")
    desk.hello(b"older", capabilities=CAPABILITIES)
    desk.submit(2)
    wait(desk, 2)
    assert desk.job(2).session.verifier == b"older"
    assert desk.job(1).session.verifier == b""


EVENTS = ("hello", "hello", "leaving", "failed", "draining", "submit", "submit", "submit", "verdict", "tick", "tick")


ABLE = [(), (OWNERS,), CAPABILITIES, MASKING, MASKING, (*CAPABILITIES, grammar_capability("regex"))]


def random_life(seed: int) -> tuple[int, int]:
    """Let workers of all kinds come and go while jobs run; return how many jobs ran, and how often they were opened.

    The broker checks after each message that each job is where it can be served (`specq.broker.validation`).
    """
    random, desk = Random(seed), Desk(capabilities=MASKING, max_sessions=4)
    for number in range(2, 70):
        registered = [worker.identity for worker in desk.broker.state.workers.all()]
        running = [job for job in desk.broker.state.jobs.active.values() if job.session.verifier]
        what = random.choice(EVENTS)
        if what == "hello":
            desk.hello(b"%d" % number, max_sessions=4, capabilities=random.choice(ABLE))
        elif what == "submit":
            submit(desk, number, random.choice(["", SCHEMA, REGEX]), cache_salt=random.choice(["", "", "s"]))
        elif what == "verdict" and running:
            desk.verdict(random.choice(running).job_id, number, finish=random.choice(["", "", "stop"]))
        elif what == "tick":
            wait(desk, 1)
        elif len(registered) > 1:
            desk.leave(random.choice(registered), state=what)
    return desk.broker.state.counts["jobs"], len(opened(desk))


def test_no_order_of_events_brings_a_job_where_it_cannot_be_served() -> None:
    """Jobs do run, and are opened again elsewhere."""
    lives = [random_life(seed) for seed in range(12)]
    num_jobs, num_opened = map(sum, zip(*lives, strict=True))
    assert num_jobs > 100
    assert num_opened > 1.2 * num_jobs


# --- where none can ---------------------------------------------------------------------------------------------------


@each(
    ("older", "why"),
    [((), "older version"), ((OWNERS,), "older version"), (CAPABILITIES, "llguidance is not installed there")],
)
def test_where_no_verifier_can_a_job_is_refused_at_once(older: tuple[str, ...], why: str) -> None:
    """As one with a salt. The reason names the kind and what is missing."""
    desk = Desk(capabilities=older)
    (failed,) = submit(desk, 1)
    assert failed.code == "no_verifier"
    assert "no verifier of toy here builds grammars of the kind json_schema" in failed.reason
    assert why in failed.reason
    assert not desk.broker.state.jobs.active


def test_what_one_verifier_can_do_and_another_can_is_not_both() -> None:
    desk = Desk(capabilities=GRAMMAR_CAPABILITIES)
    desk.hello(b"other", capabilities=CAPABILITIES)
    (failed,) = submit(desk, 1, cache_salt="s")
    assert "builds grammars of the kind json_schema and supports cache_salt" in failed.reason
    assert submit(desk, 2) == []
    desk.submit(3, cache_salt="s")
    assert opened(desk) == [(VERIFIER, 2), (b"other", 3)]


@each("model", ["toy", ""])
def test_of_other_models_no_verifier_counts(model: str) -> None:
    desk = Desk(capabilities=CAPABILITIES)
    desk.hello(b"other", name="other", capabilities=MASKING)
    (failed,) = submit(desk, 1, model=model)
    assert "no verifier of toy here" in failed.reason


def test_a_job_whose_verifiers_that_mask_are_gone_fails_after_a_while() -> None:
    desk = Desk(capabilities=MASKING, weights_wait_s=5.0)
    submit(desk, 1)
    desk.hello(b"older", capabilities=CAPABILITIES)
    desk.leave()
    wait(desk, 4)
    assert desk.job(1).session.verifier == b""
    wait(desk, 2)
    (failed,) = desk.received(ANN, Failed)
    assert failed.code == "engine"
    assert "of the model toy that builds grammars of the kind json_schema was available for 5 s" in failed.reason


# --- drafters ---------------------------------------------------------------------------------------------------------


def test_drafters_get_no_grammar_unless_they_mask_and_older_ones_no_such_job() -> None:
    """An older drafter would refuse verdicts with the origin of forced tokens, also those of its other jobs."""
    desk = Desk(capabilities=MASKING, drafters_per_job=3)
    known = {b"old": (OWNERS,), b"new": CAPABILITIES, b"masks": MASKING}
    for name, capabilities in known.items():
        desk.add_drafter(name, capabilities=capabilities)
    submit(desk, 1)
    desk.submit(2)
    assigned = {(to, m.session_id): m.params.grammar for to, m in desk.sent if isinstance(m, Assign)}
    assert assigned == {(b"new", 1): "", (b"masks", 1): SCHEMA} | {(name, 2): "" for name in known}


# --- older readers ----------------------------------------------------------------------------------------------------


@each(
    "message",
    [
        Submit(job_id=1, params=SamplingParams(grammar=SCHEMA), prompt_ids=IDS),
        Open(session_id=1, epoch=1, prompt_len=2, tokens_left=5, params=SamplingParams(grammar=SCHEMA), token_ids=IDS),
        JobInfo(job_id=1, params=SamplingParams(grammar=SCHEMA), prompt_ids=IDS),
    ],
)
def test_a_reader_of_before_refuses_a_grammar_as_a_whole(message: Submit, monkeypatch: pytest.MonkeyPatch) -> None:
    """It never reads the rest of the parameters. A broker of before says why, and its client names the grammar."""
    frames = encode(message)
    monkeypatch.setitem(params_module._FIELDS, SamplingParams, params_before())
    with pytest.raises(ProtocolError, match="unknown sampling parameter 'grammar'"):
        decode(frames)
    assert decode(encode(replace(message, params=SamplingParams())))
    if isinstance(message, Submit):
        desk = Desk()
        (failed,) = desk.take(desk.broker.from_front(ANN, frames, desk.now), ANN)
        assert isinstance(failed, Failed)
        assert (failed.code, "unknown sampling parameter 'grammar'" in failed.reason) == ("invalid", True)
        assert not desk.broker.state.jobs.active


def params_before() -> dict[str, object]:
    return {name: field for name, field in params_module._fields(SamplingParams).items() if name != "grammar"}


def test_the_broker_names_the_kinds_that_it_passes_on() -> None:
    desk = Desk()
    named = status_report(desk.broker.state)["capabilities"]
    assert named == list(BROKER_CAPABILITIES)
    assert all(has_grammar_kind(named, kind) for kind in GRAMMAR_KINDS)
    assert has_grammar_kind(["grammar/7/regex"], "regex")
    assert not any(has_grammar_kind(CAPABILITIES, kind) for kind in GRAMMAR_KINDS)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_grammars_count_as_tokens_of_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four characters as one, so that the bound of the queue's memory holds. Ended jobs give that back."""
    monkeypatch.setattr(intake, "MAX_TOKENS", 20_000)
    monkeypatch.setattr(table, "KEEP_TOKENS", 20_000)
    long = grammar_text({"regex": "a" * 50_000})
    desk = Desk(capabilities=MASKING)
    assert [len(submit(desk, job_id, long)) for job_id in (1, 2)] == [0, 0]
    (failed,) = submit(desk, 3, long)
    assert (failed.code, "the queue is full (20000 tokens" in failed.reason) == ("busy", True)
    for job_id in (1, 2):
        desk.verdict(job_id, 7, finish="stop")
    assert list(desk.broker.state.jobs.finished) == [2]
    assert (desk.broker.state.jobs.num_tokens, len(submit(desk, 4, long))) == (0, 0)


def test_a_grammar_costs_a_client_fewer_requests_than_a_header_of_numbers() -> None:
    """Reading it takes the broker a fraction of the time. A small one gives no credit."""
    spent = {}
    for name, params in {
        "none": SamplingParams(),
        "small": SamplingParams(grammar=grammar_text({"regex": "a" * 900})),
        "schema": SamplingParams(grammar=grammar_text({"regex": "a" * 16_000})),
        "numbers": SamplingParams(stop_token_ids=(10,) * 5333),
    }.items():
        desk = Desk(capabilities=MASKING)
        desk.front(ANN, Submit(job_id=1, params=params, prompt_ids=IDS))
        spent[name] = REQUESTS_BURST - desk.broker.state.limits._peers[ANN.hex()]._level
    assert spent["none"] <= spent["small"] < spent["none"] + 1
    assert 10 < spent["schema"] < 20
    assert spent["numbers"] > 50


def test_a_grammar_that_leaves_no_room_for_the_messages_that_repeat_it_is_refused() -> None:
    """A header has 64 KiB. The quotes of a schema count twice there."""
    desk = Desk(capabilities=MASKING)
    long = grammar_text({"choice": ['"' * 20_000]})
    params = SamplingParams(grammar=long)
    desk.front(ANN, Submit(job_id=1, params=params, prompt_ids=IDS))
    received = desk.received(ANN, Failed, Tokens)
    assert not any(isinstance(message, Tokens) for message in received)
    assert not desk.broker.state.jobs.active
    with pytest.raises(JobError, match="at most 65536"):
        grammar_text({"regex": "a" * 70_000})


def test_the_kind_is_found_once_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Placing, moving and looking for unserved jobs ask for it often."""
    desk = Desk(capabilities=MASKING)
    submit(desk, 1)
    monkeypatch.setattr("specq.broker.state.job.grammar_kind", None)
    assert desk.job(1).requirements.capabilities == {grammar_capability("json_schema")}
    wait(desk, 1)
    assert desk.job(1).session.verifier == VERIFIER


def test_hello_may_list_all_of_them() -> None:
    hello = Hello(role="target", name="v", incarnation=1, model=toy_info(), capabilities=MASKING)
    assert decode(encode(hello)) == hello
