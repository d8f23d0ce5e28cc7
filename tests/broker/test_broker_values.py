"""Bad values of a peer do not affect others, and its own jobs end with a reason."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import orjson
import pytest

from specq.broker import Broker
from specq.journal import JobEnded, StoredJob
from specq.protocol.messages import (
    Accepted,
    Failed,
    FetchTokenizer,
    Follow,
    Hello,
    Message,
    Refused,
    Submit,
    TokenizerChunk,
)
from specq.protocol.params import SamplingParams
from specq.protocol.wire import decode, encode
from specq.testing.toy import toy_info
from tests.broker.desk import ANN, BEN, Desk

EVIL = b"evil"
PROMPT = np.array([5, 6, 7], np.int32)


def raw(message: Message, **header: object) -> list[bytes]:
    """Return a message's frames with other values in its header."""
    key, old, *arrays = encode(message)
    return [key, orjson.dumps(orjson.loads(old) | header), *arrays]


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"top_k": 2**63}, "top_k is 9223372036854775808, but must be 0 (off) or a number of tokens below 2**31"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty is 1e-40, but must be in [0.01, 100]"),
        ({"tree": 5}, "unknown sampling parameter 'tree'"),
    ],
)
def test_a_client_receives_the_error_for_out_of_bounds_values(params: dict[str, object], reason: str) -> None:
    """Also for a raw message. Without an answer, the client would ask for ever. The broker keeps no state of it."""
    desk = Desk()
    submit = Submit(job_id=7, params=SamplingParams(), prompt_ids=PROMPT)
    (failed,) = desk.take(desk.broker.from_front(ANN, raw(submit, params=params), desk.now), ANN)
    assert isinstance(failed, Failed)
    assert (failed.job_id, failed.code, reason in failed.reason) == (7, "invalid", True)
    assert not desk.broker.state.jobs.active
    assert desk.broker.state.counts["dropped_front"] == 1


@pytest.mark.parametrize("fewer", ["vocab_size", "num_tokens"])
def test_a_prompt_with_a_token_that_there_is_not_is_refused(fewer: str) -> None:
    """Neither of the tokenizer nor of the model, whichever has fewer: a client may not look itself."""
    desk = Desk()
    desk.hello(b"small", name="small", **{fewer: 6})
    submit = Submit(job_id=7, model="small", params=SamplingParams(), prompt_ids=PROMPT)
    (failed,) = desk.front(ANN, submit)
    assert isinstance(failed, Failed)
    assert failed.reason == "the prompt has token ids outside the vocabulary of small (0 to 5)"
    assert isinstance(desk.front(ANN, replace(submit, job_id=8, prompt_ids=PROMPT[:1]))[0], Accepted)


def test_a_worker_receives_the_error_for_out_of_bounds_values() -> None:
    """It then stops sending Hello."""
    hello = Hello(role="target", name="v", incarnation=1, model=toy_info(), endpoint="x")
    desk = Desk()
    (refused,) = desk.take(desk.broker.from_front(EVIL, raw(hello, max_sessions=-1), desk.now), EVIL)
    assert isinstance(refused, Refused)
    assert "hello.max_sessions is -1, but must be a whole number from 0" in refused.reason


def stored(misfit: str) -> StoredJob:
    submit = Submit(job_id=3, params=SamplingParams(max_tokens=9), model="toy", prompt_ids=PROMPT)
    tokens = np.array([8, 9], "<i4").tobytes()
    return StoredJob(submit, "me", 1.0, weights="toy int", token_ids=tokens, origins=bytes(2), misfit=misfit)


def test_a_stored_job_out_of_bounds_fails_and_the_broker_continues() -> None:
    """Its end is journaled, with what it had; a client that follows it receives the reason."""
    broker = Broker(incarnation=2, has_journal=True)
    broker.restore(
        [stored("top_k is 9223372036854775808"), replace(stored(""), submit=replace(stored("").submit, job_id=4))], 0.0
    )
    assert list(broker.state.jobs.active) == [4]
    (write,) = broker.tick(0.0)
    assert isinstance(write.record, JobEnded)
    assert (write.record.job_id, write.record.finish, write.record.code) == (3, "error", "invalid")
    assert "top_k is 9223372036854775808" in write.record.reason
    assert len(write.record.token_ids) == 8
    broker.journaled(write.sequence, 0.0)
    received = [decode(e.frames) for e in broker.from_front(ANN, encode(Follow(job_id=3)), 0.0)]
    assert "top_k is 9223372036854775808" in next(one.reason for one in received if isinstance(one, Failed))


@pytest.mark.parametrize(
    ("tokens", "changes"),
    [
        ([9], {"logprobs": np.ones(2)}),
        ([9], {"logprobs": np.ones(1), "top_ids": np.ones(3), "top_logprobs": np.ones(2)}),
        (range(10), {}),
    ],
    ids=["too many", "too many likeliest", "more tokens than asked for"],
)
def test_a_verdict_that_does_not_fit_its_job_is_dropped(tokens: list[int], changes: dict[str, object]) -> None:
    """What could not be journaled, or not be opened again elsewhere, is counted and dropped."""
    desk = Desk()
    params = SamplingParams(max_tokens=5, logprobs=2)
    assert desk.front(ANN, Submit(job_id=1, params=params, prompt_ids=PROMPT)) == [Accepted(job_id=1)]
    assert desk.verdict(1, *tokens, **changes) == []
    assert desk.broker.state.counts["misfit_verdicts"] == 1
    assert desk.job(1).transcript.token_ids == []
    good = {"logprobs": np.ones(1), "top_ids": np.ones(2), "top_logprobs": np.ones(2)}
    assert len(desk.verdict(1, 9, **good)) == 1


def test_a_verifier_cannot_count_for_the_broker() -> None:
    """Its statistics take no name of the broker's own, whose values it could choose then."""
    desk = Desk()
    desk.front(ANN, Submit(job_id=1, params=SamplingParams(), prompt_ids=PROMPT))
    assert desk.verdict(1, 9, finish="stop", stats={"rounds": 2**62}) == []
    (tokens,) = desk.verdict(1, 9, finish="stop", stats={"hits": 1})
    assert (tokens.stats["rounds"], tokens.stats["hits"]) == (1, 1)


def test_a_verifier_hands_out_no_tokenizer_but_its_own() -> None:
    """A tokenizer of another model, or an unrequested one, would reach later clients or stay for ever."""
    desk = Desk()
    evil = replace(toy_info("other"), tokenizer_hash="others")
    desk.hello(EVIL, name="other", tokenizer_hash="others")
    assert desk.front(ANN, FetchTokenizer(model="toy")) == []
    for model in (toy_info(), evil, replace(evil, tokenizer_hash="any")):
        chunk = TokenizerChunk(model=model, index=0, count=1, data=np.ones(3))
        assert desk.back(chunk, EVIL) == []
    assert desk.front(BEN, FetchTokenizer(model="other")) == [], "what nobody had asked for is not kept"
    chunk = TokenizerChunk(model=toy_info(), index=0, count=1, data=np.ones(3))
    assert desk.back(chunk) == [chunk]
    assert desk.front(BEN, FetchTokenizer(model="toy")) == [chunk]
