"""The verifier's handling of messages, beyond what the pipeline tests show."""

from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from specq.client.events import NewTokens
from specq.client.result import PieceMaker, Result, completion_text
from specq.drafting.suffix.source import SuffixDecoder
from specq.protocol import REMOTE, SUFFIX
from specq.protocol.errors import EngineError, ProtocolError
from specq.protocol.messages import (
    Ack,
    Close,
    Draft,
    FetchTokenizer,
    Open,
    Release,
    SessionFailed,
    TokenizerChunk,
    Verdict,
)
from specq.protocol.origins import PLAIN
from specq.protocol.params import SamplingParams, Speculation
from specq.protocol.step_output import NO_TAP
from specq.testing.tokenizer import tokenizer_files
from specq.testing.toy import ToyEngine, toy_info, toy_text
from specq.text.codec import TextCodec
from specq.text.token_texts import CHUNK_BYTES, join_chunks
from specq.verifier.control.choices import Choice, Step
from specq.verifier.core import Verifier
from specq.verifier.models.step_curve import StepCurve
from specq.verifier.models.step_time import StepRows
from specq.verifier.sessions.session import SYNC_PATIENCE, Session
from specq.verifier.sources import Budget
from specq.verifier.trees import DraftTrees
from tests.verifier.sessions import commit
from tests.verifier.verifiers import PROMPT, chain, make_verifier, open_session, step


def test_a_draft_is_verified_with_its_mask() -> None:
    """Accepted nodes are marked, and the correction follows them."""
    verifier = make_verifier()
    open_session(verifier)
    text = toy_text(PROMPT, 4)
    verifier.handle(chain([text[0], text[1], 49]), 0.0)
    (verdict,) = step(verifier)
    assert verdict.token_ids.tolist() == text[:3]
    assert (verdict.node_ids.tolist(), verdict.mask.tolist()) == ([0, 1, 2], [1, 1, 0])


def test_what_is_asked_for_is_sent_again() -> None:
    """`Ack` with `resend` brings everything beyond its length, finish reason included."""
    verifier = make_verifier()
    open_session(verifier, tokens_left=3)
    for _ in range(3):
        step(verifier)
    assert not verifier.has_work
    (again,) = verifier.handle(Ack(session_id=7, epoch=1, length=4, resend=True), 0.0)
    assert (again.base_len, again.token_ids.tolist(), again.finish) == (4, toy_text(PROMPT, 3)[1:], "length")
    assert verifier.handle(Ack(session_id=7, epoch=1, length=6, resend=True), 0.0) == []


def test_a_session_far_ahead_of_the_journal_pauses() -> None:
    """It goes on as soon as the broker confirms."""
    verifier = make_verifier(max_uncommitted=5)
    open_session(verifier)
    for _ in range(20):
        step(verifier)
    assert verifier.sessions[7].length == 3 + 6
    verifier.handle(Ack(session_id=7, epoch=1, length=9), 0.0)
    assert verifier.has_work


def test_messages_of_an_older_epoch_are_ignored() -> None:
    """Open, Close and Draft of an epoch gone by are ignored; a newer Open starts anew."""
    verifier = make_verifier()
    open_session(verifier, epoch=5)
    step(verifier)
    open_session(verifier, epoch=4)
    verifier.handle(Close(session_id=7, epoch=4), 0.0)
    verifier.handle(chain([1], epoch=4), 0.0)
    assert (verifier.sessions[7].length, verifier.sessions[7].num_live) == (4, 0)
    open_session(verifier, epoch=6)
    assert verifier.sessions[7].length == 3


@pytest.mark.parametrize(
    ("draft", "reason"),
    [
        (chain([1, 2], scores=[-0.1]), "differ in length"),
        (chain([50]), "outside the vocabulary"),
        (chain([-1]), "outside the vocabulary"),
        (chain([1], scores=[0.5]), "not a log-probability"),
        (chain([1], scores=[float("nan")]), "not a log-probability"),
        (chain([1, 2], parent_ids=np.array([1, 0], np.int32)), "parent does not come before"),
        (Release(session_id=7, epoch=1), "does not accept release"),
    ],
)
def test_malformed_messages_are_refused(draft: Draft, reason: str) -> None:
    """The batch is dropped, the session goes on."""
    verifier = make_verifier()
    open_session(verifier)
    with pytest.raises(ProtocolError, match=reason):
        verifier.handle(draft, 0.0)
    (verdict,) = step(verifier)
    assert verdict.token_ids.tolist() == toy_text(PROMPT, 1)


def test_sessions_that_can_never_run_fail_at_once() -> None:
    """Too long for the model or the pool, no tokenizer for stop strings, ids outside the vocabulary."""
    verifier = make_verifier(ToyEngine(toy_info(kv_slots=40)))
    assert "KV slots" in open_session(verifier, tokens_left=50)[0].reason
    assert "takes 2000" in open_session(verifier, tokens_left=5000)[0].reason
    assert "tokenizer" in open_session(verifier, tokens_left=5, stop=("x",))[0].reason
    assert "no tokens left" in open_session(verifier, tokens_left=0)[0].reason
    assert verifier.sessions == {}


def test_an_engine_error_gives_the_sessions_back() -> None:
    """The broker is notified that another verifier may try."""

    class Broken(ToyEngine):
        def step(self, steps, tap=NO_TAP):  # type: ignore[no-untyped-def]
            raise EngineError("out of order")

    verifier = make_verifier(Broken())
    open_session(verifier)
    (failed,) = step(verifier)
    assert isinstance(failed, SessionFailed)
    assert (failed.retry, failed.reason, verifier.sessions) == (True, "out of order", {})


def test_verdicts_carry_the_minimum_acceptance_probability() -> None:
    """Where rows are dear, it is 1: no node pays. Where they are cheap, unlikely nodes pay."""
    min_accept_probs = []
    for seconds in ([0.001, 0.064], [0.005, 0.01]):
        verifier = Verifier(ToyEngine(), StepCurve([1, 64], seconds), incarnation=1)
        open_session(verifier)
        step(verifier)  # the prefill, which has more rows
        min_accept_probs.append(step(verifier)[0].min_accept_prob)
    assert min_accept_probs[0] == pytest.approx(1000, abs=2)
    assert min_accept_probs[1] == pytest.approx(1000 * (0.005 / 63) / 0.005, abs=2)


@pytest.mark.parametrize(
    "allowed", [frozenset(), frozenset({REMOTE}), frozenset({SUFFIX}), frozenset({REMOTE, SUFFIX})]
)
def test_sources_that_do_not_pay_are_not_used(allowed: frozenset[str]) -> None:
    """Drafters receive a minimum above any node's probability, and no lookup runs."""
    verifier = make_verifier(sources=(SuffixDecoder(),), measures_drafts=False)
    prompt = np.array(PROMPT * 3, np.int32)
    params = SamplingParams()
    verifier.handle(Open(session_id=7, epoch=1, prompt_len=9, tokens_left=50, params=params, token_ids=prompt), 0.0)
    verifier.policy.forecast.hear({REMOTE: 1})
    verifier.policy.used = Choice(allowed)
    (first,) = step(verifier)
    assert (first.min_accept_prob > 1000) == (REMOTE not in allowed)
    session = verifier.sessions[7]
    commit(session, PROMPT * 2)  # text that repeats itself
    session.kv_len = session.length - 1
    verifier.sources.collect(verifier._decoding(), allowed, verifier._budget(), lambda: 0.0)
    assert bool(verifier.sources.num_sent[SUFFIX]) == (SUFFIX in allowed)


def test_a_draft_before_the_first_round_measures_no_round_trip() -> None:
    """No verdict was answered by it. A later one says how long it took."""
    verifier, told = make_verifier(measures_drafts=False), list[float]()
    verifier.policy.forecast.learn_round_trip = told.append  # type: ignore[method-assign]
    open_session(verifier)
    verifier.handle(chain(toy_text(PROMPT, 1)), 1000.0)
    assert told == []
    verifier.step(lambda: 1000.0)
    verifier.handle(chain([1], base_len=verifier.sessions[7].length, first_id=1), 1000.5)
    assert told == [0.5]


def test_what_a_node_costs_to_take_in_must_be_earned() -> None:
    """Time spent on receiving and grafting raises the minimum acceptance probability that drafters are told; not that
    of what the verifier looks up, which nobody sends."""
    verifier = make_verifier()
    verifier.policy.learn = lambda _: None  # type: ignore[method-assign]
    open_session(verifier)
    step(verifier)
    before, of_texts = step(verifier)[0].min_accept_prob, verifier.planner.min_accept_prob
    budget = Budget(verifier.curve, 0.0)
    for number in range(500):
        passed = chain([8, 9], base_len=0, first_id=2 * number)
        verifier.handle(passed, 0.0)
        verifier.sources.account(0.004)
        verifier.sources.collect((), frozenset(), budget, lambda: 0.0)
    after = step(verifier)[0].min_accept_prob
    assert after == pytest.approx(before + 1000 * 0.002 / 0.005, abs=3)
    assert verifier.planner.min_accept_prob == of_texts
    verifier.sources.account(1.0)
    assert step(verifier)[0].min_accept_prob == after


def test_the_tokenizer_travels_in_pieces() -> None:
    """A large tokenizer is cut into pieces of bounded size that join to the same files."""
    files = {"tokenizer.json": '{"model": "' + "x" * (2 * CHUNK_BYTES) + '"}'}
    verifier = make_verifier()
    verifier.inbox.tokenizer_files = files
    chunks = verifier.handle(FetchTokenizer(), 0.0)
    assert len(chunks) == 3
    assert all(isinstance(chunk, TokenizerChunk) and len(chunk.data) <= CHUNK_BYTES for chunk in chunks)
    assert join_chunks(list(reversed(chunks))) == files
    with pytest.raises(ProtocolError, match="missing"):
        join_chunks(chunks[:2])


@pytest.mark.parametrize("num_there", [0, 1, 6], ids=["fresh", "moved within min_tokens", "moved later"])
def test_a_stop_string_before_min_tokens_is_ignored_by_verifier_and_client(num_there: int) -> None:
    """Also where the session is opened again; and the client, who has tokens only, cuts the text where they end."""
    codec, text = TextCodec(tokenizer_files()), toy_text(PROMPT, 120)
    stop = codec.decode(text[2:3])
    params = SamplingParams(stop=(stop,), min_tokens=5, max_tokens=120)
    assert stop in codec.decode(text[:5])
    verifier = make_verifier(tokenizer_files=tokenizer_files())
    context = np.array(PROMPT + text[:num_there], np.int32)
    opening = {"epoch": 1, "prompt_len": 3, "tokens_left": 120 - num_there, "params": params}
    verifier.handle(Open(session_id=7, token_ids=context, **opening), 0.0)
    while verifier.has_work:
        step(verifier)
    session = verifier.sessions[7]
    tokens = session.token_ids[3:]
    assert (tokens, session.finish) == (text[: 1 + text.index(text[2], 5)], "stop")
    expected = codec.decode(tokens)[: -len(stop)]
    assert completion_text(codec, tokens, params)[0] == expected
    maker = PieceMaker(codec, params)
    shown = [maker.piece(NewTokens(7, (token,), (PLAIN,))).text for token in tokens]
    assert "".join(shown) + maker.last(Result(1, None)).text == expected


def test_verifier_and_client_find_the_same_stop_strings() -> None:
    """Also of special tokens, parts of characters, U+FFFD at the limit, and where the session moved."""
    codec = TextCodec(tokenizer_files())
    a, b, end, *smile = (*codec.encode("ab"), 2, *codec.encode("🙃🦄"))
    for stop, prompt, answer, finish, expected in (
        ("🦄", [a, *smile[:-1]], [smile[-1], b], "stop", ""),
        ("<|im_end|>", PROMPT, [a, b, end, a], "stop", "ab"),
        ("b<|im_end|>", PROMPT, [a, b, end, a], "stop", "a"),
        ("🦄", PROMPT, [a, *smile, b], "stop", "a🙃"),
        ("\ufffd", PROMPT, [a, *smile[:-1]], "stop", "a🙃"),
        ("🦄", PROMPT, [a, *smile[:-1]], "length", "a🙃\ufffd"),
    ):
        params = SamplingParams(stop=(stop,), max_tokens=len(answer))
        for num_there in range(min(3, len(answer))):
            message = Open(
                session_id=7, epoch=1, prompt_len=len(prompt), tokens_left=len(answer) - num_there, params=params,
                token_ids=np.array(prompt + answer[:num_there], np.int32),
            )  # fmt: skip
            session = Session.of(message, replace(toy_info(), eos_ids=()), DraftTrees(), codec)
            num_kept, found = session.up_to_end(answer[num_there:])
            tokens = answer[: num_there + num_kept]
            assert (stop, found) == (stop, finish)
            assert completion_text(codec, tokens, params, prompt)[0] == expected


def test_heartbeats_carry_positions() -> None:
    """Each session's epoch and committed length, and a counter of steps."""
    verifier = make_verifier()
    open_session(verifier, epoch=3)
    step(verifier)
    beat = verifier.heartbeat()
    assert (beat.session_ids.tolist(), beat.epochs.tolist(), beat.lengths.tolist()) == ([7], [3], [4])
    assert (beat.steps, beat.load) == (1, 1)


def test_a_verdict_counts_what_it_verified() -> None:
    """The last verdict carries the verifier's own counts."""
    verifier = make_verifier()
    open_session(verifier, tokens_left=4)
    text = toy_text(PROMPT, 4)
    verifier.handle(chain(text[:3]), 0.0)
    (verdict,) = step(verifier)
    assert isinstance(verdict, Verdict)
    assert verdict.finish == "length"
    assert verdict.stats["positions"] == [[1, 1], [1, 1], [1, 1]]


@pytest.mark.parametrize("mode", ["sync", "jit"])
@pytest.mark.parametrize("prompt_len", [1, 2])
def test_no_prompt_waits_for_a_drafter(mode: str, prompt_len: int) -> None:
    """However short it is; behind it the session waits."""
    verifier = make_verifier()
    message = Open(
        session_id=7, epoch=1, prompt_len=prompt_len, tokens_left=50, params=SamplingParams(),
        speculation=Speculation(mode=mode), token_ids=np.array(PROMPT[:prompt_len], np.int32),
    )  # fmt: skip
    verifier.handle(message, 0.0)
    assert verifier.has_work
    step(verifier)
    assert verifier.sessions[7].length == prompt_len + 1
    assert not verifier.has_work


def test_a_session_that_wants_drafts_just_in_time_waits_only_where_it_has_none() -> None:
    verifier = make_verifier()
    open_session(verifier, mode="jit")
    step(verifier)
    text = toy_text(PROMPT, 20)
    assert not verifier.has_work, "nothing is drafted"
    verifier.handle(chain([*text[1:5], 0], base_len=4, scores=[-0.1, -0.1, -9, -0.1, -0.1]), 0.0)
    for length in (7, 9):
        assert verifier.has_work
        step(verifier)
        assert verifier.sessions[7].length == length, "some of what was drafted is left"
    assert not verifier.has_work, "what was left did not fit"
    verifier.handle(chain([], base_len=9, first_id=20), 0.0)
    assert verifier.has_work, "the drafter has answered, although it has nothing"
    step(verifier)
    assert not verifier.has_work
    for _ in range(SYNC_PATIENCE):
        verifier.heartbeat()
    while verifier.has_work:
        step(verifier)
    assert verifier.sessions[7].token_ids == PROMPT + toy_text(PROMPT, 50)


@pytest.mark.parametrize(("prompt", "num_nodes"), [(3, 0), (64, 0), (64, 16)])
def test_a_step_says_of_its_prompts_how_many_rows_they_had(prompt, num_nodes) -> None:
    """And to how many tokens these attend, so that what they take is told from what drafts take. Of the tokens, the
    first one of the prompt's session does not count, nor does that session among those that decode."""
    verifier, learned, ticks = make_verifier(max_step_rows=128, max_prefill_slowdown=0.0), list[Step](), count()
    verifier.policy.learn = learned.append  # type: ignore[method-assign]
    open_session(verifier)
    for _ in range(3):  # its prompt, with nothing before; two tokens
        verifier.step(lambda: 0.1 * next(ticks))
    verifier.control.learn()
    assert [(one.rows, one.num_sessions, one.num_tokens) for one in learned] == [(StepRows(1), 1, 1)] * 2
    message = Open(
        session_id=8, epoch=1, prompt_len=prompt, tokens_left=50, params=SamplingParams(),
        token_ids=np.array([5] * prompt, np.int32),
    )  # fmt: skip
    verifier.handle(message, 0.0)
    if num_nodes:
        drafted = toy_text(verifier.sessions[7].token_ids, num_nodes)
        verifier.handle(chain(drafted, base_len=verifier.sessions[7].length), 0.0)
    verifier.step(lambda: 0.1 * next(ticks))
    verifier.control.learn()
    (mixed,) = learned[2:]
    attended = prompt * (prompt + 1) // 2
    nodes = mixed.rows.nodes
    assert mixed.rows == StepRows(1 + nodes + prompt, nodes, prompt, attended)
    assert 0 < nodes <= num_nodes if num_nodes else nodes == 0
    assert (mixed.num_sessions, mixed.num_tokens) == (1, 1 + nodes)


def test_prompts_may_take_more_rows_than_drafts() -> None:
    """A step that computes prompts has up to `max_prefill_rows`; one that does not, `max_step_rows`."""
    engine = ToyEngine()
    verifier = make_verifier(engine, max_step_rows=8, max_prefill_rows=30)
    for i in range(2):
        message = Open(
            session_id=i, epoch=1, prompt_len=20, tokens_left=40, params=SamplingParams(),
            token_ids=np.arange(20 * i, 20 * i + 20, dtype=np.int32),
        )  # fmt: skip
        verifier.handle(message, 0.0)
    for _ in range(2):
        step(verifier)
    for i in range(2):
        verifier.handle(chain([1] * 9, session_id=i, base_len=verifier.sessions[i].length), 0.0)
    step(verifier)
    assert engine.num_rows == [30, 11, 8]
