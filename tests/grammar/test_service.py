"""Sessions with grammars at a verifier: any drafts give plain decoding's text, which is the naive one, with all other
parameters; and what fails harms no other session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest

from specq.drafting.draft_model.chain_sessions import without_leads
from specq.drafting.grammar.leads import leads_of
from specq.drafting.suffix.source import SuffixDecoder
from specq.grammar import SessionGrammar, StepMasks
from specq.grammar.limits import GrammarLimits
from specq.protocol import GRAMMAR, ORIGIN_CODES, SamplingParams
from specq.testing import oracle
from specq.verifier import StepCurve
from specq.verifier.sessions import grammars as session_grammars
from specq.verifier.sources import Budget, DraftBatch
from specq.verifier.step import plan
from tests.each import each
from tests.grammar.naive import EOS, GRAMMARS, Naive, small
from tests.grammar.serving import PROMPT, GrammarService, LateLogitEngine, Said, rows_of

NAMES = ["json_schema", "regex", "choice", "lark", "required", "after", "within", "special"]
LENGTH = 30
BUDGET = Budget(StepCurve([1, 64], [0.005, 0.006]), 0.0, has_forced=True)


def naive_text(grammar: dict[str, Any] | None, most: int = LENGTH, **params: Any) -> tuple[list[int], str]:
    """Return what plain decoding says, one token at a time, and why it ends."""
    own = SamplingParams(**params)
    ends = (*own.stop_token_ids, *(() if own.ignore_eos else (EOS, 0)))
    naive, text = Naive(small(), grammar, ends) if grammar else None, list[int]()
    while len(text) < most:
        row = rows_of([[*PROMPT, *text]])[0].numpy()
        if naive is not None:
            _, has_ended, following = naive.follow(text)
            if has_ended:
                return text, "stop"
            if not following:
                return text, "failed"
            row[[token for token in range(len(row)) if token not in following]] = -np.inf
        text.append(oracle.own_token(row, own, len(PROMPT) + len(text)))
        if text[-1] in ends:
            return text, "stop"
    return text, "stop" if naive is not None and naive.follow(text)[1] else "length"


def serve(
    jobs: dict[int, tuple[dict[str, Any] | None, dict[str, Any]]], *, mode: str = "async", **service: Any
) -> dict[int, Said]:
    """Serve jobs (grammar, parameters) together."""
    served = GrammarService(**service)
    for session_id, (grammar, params) in jobs.items():
        served.open(session_id, grammar, tokens_left=LENGTH, mode=mode, **params)
    return served.run()


def check_texts(params: dict[str, Any], overlaps: bool, names: Sequence[str] = NAMES) -> dict[int, Said]:
    """Serve sessions with grammars, and one without, and compare their texts with the naive ones."""
    jobs = {i: (GRAMMARS[name], {"seed": i, **params}) for i, name in enumerate(names)} | {99: (None, params)}
    expected = {i: naive_text(grammar, **own) for i, (grammar, own) in jobs.items()}
    found = serve(jobs, overlaps=overlaps, guesses=lambda i: expected[i][0])
    for i, (text, finish) in expected.items():
        if finish == "failed":
            assert "the grammar allows no token there, and no end" in found[i].failed
        else:
            assert (found[i].token_ids, found[i].finish) == (text, finish)
    return found


@each(
    ("params", "overlaps"),
    [({}, False), ({"temperature": 0.8}, True), ({"temperature": 1.2, "ignore_eos": True}, False)],
)
def test_any_drafts_give_the_naive_text(params: dict[str, Any], overlaps: bool) -> None:
    check_texts(params, overlaps)


@pytest.mark.slow
@each(("seed", "overlaps"), product(range(6), [False, True]))
def test_so_they_do_with_many_seeds(seed: int, overlaps: bool) -> None:
    stops = {"stop_token_ids": (67,)} if seed % 3 == 0 else {"ignore_eos": seed % 3 == 1}
    names = sorted(NAMES, key=lambda name: Random(name + str(seed)).random())
    check_texts({"temperature": 0.7 + seed / 10, **stops}, overlaps, names)


def test_sessions_with_grammars_take_tokens_of_the_step_in_flight() -> None:
    """If the engine judges late: masks follow from tokens that were not known at the launch."""
    served = GrammarService(overlaps=True)
    for i, name in enumerate(NAMES):
        served.open(i, GRAMMARS[name], tokens_left=LENGTH, mode="plain", seed=i, temperature=0.8)
    found = served.run()
    assert isinstance(served.engine, LateLogitEngine)
    assert served.engine.most == 2
    for i, name in enumerate(NAMES):
        expected = naive_text(GRAMMARS[name], seed=i, temperature=0.8)
        assert (found[i].token_ids, found[i].finish) == expected


def test_forced_tokens_are_a_part_of_the_texts() -> None:
    """Also without other drafts."""
    found = serve({1: (GRAMMARS["json_schema"], {})})
    assert ORIGIN_CODES[GRAMMAR] in found[1].origins


@each("strategy", ["probabilistic", "threshold", "greedy"])
def test_texts_of_other_strategies_are_valid(strategy: str) -> None:
    """None has a token that its grammar forbids; what ends by itself is complete."""
    jobs = {i: (GRAMMARS[name], {"seed": i, "temperature": 0.9, "strategy": strategy}) for i, name in enumerate(NAMES)}
    guesses = {i: naive_text(grammar, seed=i, temperature=0.9)[0] for i, (grammar, _) in jobs.items()}
    for i, said in serve(jobs, guesses=lambda i: guesses[i]).items():
        is_allowed, has_ended, _ = Naive(small(), GRAMMARS[NAMES[i]], (EOS, 0)).follow(said.token_ids)
        assert not said.failed
        assert is_allowed
        assert has_ended == (said.finish == "stop")


# --- with other parameters --------------------------------------------------------------------------------------------

OTHERS: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    "bad words": {"bad_token_ids": ((68,), (69, 70), (71,))},
    "bias": {"logit_bias": ((67, 4.0), (EOS, -100.0))},
    "stop strings": {"stop": ("a", "5")},
    "log-probabilities": {"logprobs": 3, "temperature": 0.8},
    "all": {"repetition_penalty": 1.2, "logit_bias": ((70, 1.0),), "logprobs": 0, "bad_token_ids": ((69,),)},
}


@each(("kind", "overlaps"), zip(OTHERS, [False, True] * 3, strict=True))
def test_with_other_parameters_drafts_change_nothing(kind: str, overlaps: bool) -> None:
    """Neither texts nor ends, nor log-probabilities."""
    jobs = {i: (GRAMMARS[name], {"seed": i, **OTHERS[kind]}) for i, name in enumerate(NAMES)}
    plain = serve(jobs, mode="plain")
    drafted = serve(jobs, overlaps=overlaps, guesses=lambda i: plain[i].token_ids)
    assert sum(not said.failed for said in plain.values()) > 4
    for i, said in drafted.items():
        assert (said.finish, said.failed) == (plain[i].finish, plain[i].failed)
        if said.failed:  # what was accepted in the last step is not said
            assert said.token_ids == plain[i].token_ids[: len(said.token_ids)]
            continue
        assert said.token_ids == plain[i].token_ids
        assert said.logprobs == pytest.approx(plain[i].logprobs, abs=1e-5)
        assert len(said.logprobs) == (len(said.token_ids) if "logprobs" in OTHERS[kind] else 0)


def test_logprobs_are_those_of_the_masked_distribution() -> None:
    (said,) = serve({1: (GRAMMARS["json_schema"], {"logprobs": 0})}).values()
    naive = Naive(small(), GRAMMARS["json_schema"], (EOS, 0))
    for place, (token, found) in enumerate(zip(said.token_ids, said.logprobs, strict=True)):
        row = rows_of([[*PROMPT, *said.token_ids[:place]]])[0].double().numpy()
        allowed = sorted(naive.follow(said.token_ids[:place])[2])
        assert found == pytest.approx(row[token] - np.log(np.exp(row[allowed]).sum()), abs=1e-4)


def test_a_text_ends_by_its_grammar_whatever_min_tokens_says() -> None:
    """Nothing may follow. Where it may end by an end token, it goes on."""
    jobs = {
        1: ({"choice": ["ab"]}, {"min_tokens": 9}),
        2: ({"regex": "[a-z]*"}, {"min_tokens": 9, "logit_bias": ((EOS, 50.0),)}),
        3: ({"choice": ["ab"]}, {"min_tokens": 9, "ignore_eos": True, "strategy": "probabilistic", "temperature": 0.8}),
    }
    for mode in ("plain", "async"):
        found = serve(jobs, mode=mode, guesses=lambda _: small().ids("ab"))
        assert small().inner.decode_str(found[1].token_ids) == small().inner.decode_str(found[3].token_ids) == "ab"
        assert {said.finish for said in found.values()} == {"stop"}
        assert len(found[2].token_ids) == 10
        assert found[2].token_ids[-1] == EOS


# --- what fails ------------------------------------------------------------------------------------------------------


def check_failure(bad: tuple[dict[str, Any], dict[str, Any]], reason: str, *, overlaps: bool, **service: Any) -> Said:
    """Serve a session that fails beside others, and see that these say what they say alone."""
    others: dict[int, Any] = {
        1: (GRAMMARS["json_schema"], {"temperature": 0.8}),
        2: (None, {"presence_penalty": 0.1}),
        3: (GRAMMARS["regex"], {"logprobs": 1}),
    }
    alone = serve(others, overlaps=overlaps)
    found = serve(
        {1: others[1], 7: bad, 2: others[2], 3: others[3]},
        overlaps=overlaps,
        guesses=lambda i: alone[i].token_ids if i in alone else small().ids("a" * LENGTH),
        **service,
    )
    assert reason in found[7].failed
    for i, said in alone.items():
        assert (found[i].token_ids, found[i].finish, found[i].failed) == (said.token_ids, said.finish, "")
        assert found[i].logprobs == pytest.approx(said.logprobs, abs=1e-5)
    return found[7]


AB = small().ids("ab")
FAILING: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "bad tokens": (
        {"choice": ["a", "b"]},
        {"bad_token_ids": tuple((i,) for i in range(3, 350))},
        "the grammar allows only tokens",
    ),
    "a stop token": (
        {"regex": "1a+2"},
        {"stop_token_ids": (small().ids("2")[0],), "bad_token_ids": ((AB[0],),)},
        "grammar",
    ),
    "an empty text": ({"regex": ""}, {"ignore_eos": True}, "the grammar allows no token there, and no end; position 3"),
    "min_tokens": ({"regex": ""}, {"min_tokens": 2}, "the grammar allows only tokens"),
}


@each(("kind", "overlaps"), zip(FAILING, [False, True] * 2, strict=True))
def test_where_nothing_is_allowed_the_job_fails_and_no_other(kind: str, overlaps: bool) -> None:
    grammar, params, reason = FAILING[kind]
    check_failure((grammar, params), reason, overlaps=overlaps)


@each("overlaps", [False, True])
def test_a_matcher_that_runs_into_a_limit_fails_its_session_alone(overlaps: bool) -> None:
    """In the middle of its text, with llguidance's reason."""
    bad = {"regex": "(a|b)*c(a|b){12}d"}, {"logit_bias": ((small().ids("c")[0], 2.0),)}
    said = check_failure(
        bad, "too complex here", overlaps=overlaps, limits={7: replace(GrammarLimits(), lexer_states=24)}
    )
    assert "too many states" in said.failed
    assert said.token_ids


def test_a_text_from_elsewhere_goes_on_where_it_stands() -> None:
    """Another verifier had said a part of it."""
    expected, finish = naive_text(GRAMMARS["json_schema"])
    for so_far in range(1, len(expected) - 1, 5):
        served = GrammarService()
        served.open(1, GRAMMARS["json_schema"], tokens_left=LENGTH - so_far, so_far=expected[:so_far])
        assert (served.run()[1].token_ids, served.said[1].finish) == (expected, finish)


def test_a_text_from_elsewhere_that_the_grammar_does_not_allow_fails() -> None:
    served = GrammarService()
    served.open(1, {"choice": ["ab"]}, so_far=[70])
    assert "does not allow token 70" in served.run()[1].failed


# --- planted bugs: each must be seen ---------------------------------------------------------------------------------


def not_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matcher stays where a look ahead has led it."""

    class Stuck:
        def __init__(self, matcher: Any) -> None:
            self.own = matcher

        def __getattr__(self, name: str) -> Any:
            return getattr(self.own, name)

        def rollback(self, count: int) -> bool:
            return bool(self.own.rollback(count - 1)) if count > 1 else True

    init = SessionGrammar.__init__
    monkeypatch.setattr(
        SessionGrammar, "__init__", lambda self, matcher, *rest, **more: init(self, Stuck(matcher), *rest, **more)
    )


def commit_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Now and then the grammar does not follow the text."""
    commit, random = SessionGrammar.commit, Random(0)

    def forgets(self: SessionGrammar, token_ids: list[int]) -> int:
        return commit(self, token_ids) if random.random() < 0.9 else len(token_ids)

    monkeypatch.setattr(SessionGrammar, "commit", forgets)


def masks_of_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has the masks of an earlier one where these have as many rows."""
    masks, kept = plan._masks, dict[Any, Any]()

    def stale(chunks: Any) -> Any:
        return kept.setdefault(tuple(chunks.places.tolist()), masks(chunks)) if masks(chunks) else None

    monkeypatch.setattr(plan, "_masks", stale)


def ends_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The masks let a text end where its grammar is not complete."""
    of = StepMasks.of

    def opened(self: StepMasks, judged: Any) -> Any:
        found = of(self, judged)
        found.words[:, 0] |= 1 << EOS
        return found

    monkeypatch.setattr(StepMasks, "of", opened)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "not rolled back": not_rolled_back,
    "commit missed": commit_missed,
    "masks of the step before": masks_of_the_step_before,
    "ends anywhere": ends_anywhere,
}


@each("overlaps", [False, True])
def test_masks_that_cannot_begin_are_computed_when_they_are_needed(
    overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Any, *, waits: bool) -> None:
        raise MemoryError

    monkeypatch.setattr(session_grammars, "begin_masks", fails)
    check_texts({"temperature": 1.2}, overlaps=overlaps)


def test_other_sources_draft_behind_what_is_forced() -> None:
    """If forced tokens are drafted. Sessions without a grammar, with a choice or with sampled nodes have no lead."""
    service, grammars = GrammarService(), [{"regex": "hello[xy]"}, {"regex": "[ab]c{5}"}, None, {"regex": "hello[xy]"}]
    for session_id, grammar in enumerate(grammars):
        own = {"strategy": "probabilistic", "temperature": 1.0} if session_id == 3 else {}
        service.open(session_id, grammar, **own)
    sessions = [service.verifier.sessions[session_id] for session_id in range(4)]
    leads = leads_of(sessions, BUDGET)
    assert [small().inner.decode_str(leads.of(session)) for session in sessions] == ["hello", "", "", ""]
    assert not leads_of(sessions, BUDGET._replace(has_forced=False))
    drafts = DraftBatch(
        sessions[:2], 5, [3, 3], -1, [2, 1], np.array([1, 2, 3], np.int32), np.array([-1, 0, -1], np.int32), np.zeros(3)
    )
    moved, forced = leads.before(drafts), leads.of(sessions[0])
    assert moved.token_ids.tolist() == [*forced, 1, 2, 3]
    assert moved.parent_ids.tolist() == [*range(-1, len(forced) + 1), -1]
    assert list(moved.sizes) == [len(forced) + 2, 1]
    assert leads.batches()[0].token_ids.tolist() == forced


def test_a_draft_model_does_not_draft_beside_what_is_forced() -> None:
    """Unless it drafts behind it, which it does not where children are drawn."""
    service, grammars = GrammarService(), [{"regex": "hello[xy]"}, {"regex": "[ab]c{5}"}, None, {"regex": "hello[xy]"}]
    for session_id, grammar in enumerate(grammars):
        own = {"strategy": "probabilistic", "temperature": 1.0} if session_id == 3 else {}
        service.open(session_id, grammar, **own)
    sessions = [service.verifier.sessions[session_id] for session_id in range(4)]
    with_choice = sessions[1:3]
    for enough, has_forced, is_behind, expected in (
        (0.0, True, False, with_choice),
        (3.0, True, False, with_choice),
        (3.5, True, False, sessions),
        (0.5, False, False, sessions),
        (0.5, True, True, sessions[:3]),
    ):
        assert without_leads(sessions, enough, has_forced=has_forced, is_behind=is_behind) == expected


def test_a_text_drafts_what_followed_the_forced_tokens_before() -> None:
    """The text before has them. While forced tokens are not drafted, such a text waits for them to be committed."""
    service = GrammarService()
    so_far = small().ids("x" + "hello" + "dog" + "y")
    service.open(1, {"regex": "xhellodogyhello[0-9]*"}, so_far=so_far)
    session, source = service.verifier.sessions[1], SuffixDecoder(0)
    batches = source.collect([session], BUDGET, lambda: 0.0)
    lead, own = (batch.token_ids.tolist() for batch in batches)
    assert small().inner.decode_str(lead) == "hello"
    assert small().inner.decode_str(own).startswith("hellodog")
    assert source.collect([session], BUDGET._replace(has_forced=False), lambda: 0.0) == ()


@each("mutant", MUTANTS)
def test_mutants_are_seen(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[mutant](monkeypatch)
    with pytest.raises(AssertionError):  # wrong texts, or sessions that never end
        check_texts({"temperature": 1.2}, overlaps=False)
