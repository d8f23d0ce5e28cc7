"""A session's grammar against matchers that are new for each question."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest

from specq.grammar import SessionGrammar, StepMasks
from specq.grammar.limits import GrammarLimits
from specq.grammar.tokenizer import build_tokenizer
from specq.protocol import ConfigError, EngineError, SamplingParams, SessionStep
from specq.testing.tokenizer import tokenizer_files
from specq.verification import StepBatch
from tests.each import each
from tests.grammar.naive import (
    EOS,
    GRAMMARS,
    SMALL,
    Naive,
    matcher_of,
    path_to,
    random_tree,
    session_grammar,
    small,
    tiny,
    tokens_of,
)
from tests.verification.steps import tree_of

LETTER_A = small().ids("a")[0]
ENDS: dict[str, tuple[int, ...]] = {
    "the model's": (EOS, 0),
    "ignored": (),
    "a stop token that is text": (LETTER_A, EOS),
    "beyond the vocabulary": (EOS, 10**6),
}


def step_of(session_id: int, tokens: list[int], parents: list[int]) -> SessionStep:
    """Return a session's part in a step, with a tree."""
    params = SamplingParams(grammar='{"regex":"."}')
    return SessionStep(session_id, 0, np.zeros(1, np.int32), params, tree_of(tokens, parents))


def masks_of(grammar: SessionGrammar, tokens: list[int], parents: list[int]) -> list[set[int]]:
    """Return the tokens that each row of a tree may have, the row before the tree first."""
    batch = StepBatch.of([step_of(7, tokens, parents)])
    ((_, words),) = StepMasks({7: grammar}).of(batch).each()
    return [tokens_of(row) for row in words]


def check_tree(grammar: SessionGrammar, naive: Naive, text: list[int], tokens: list[int], parents: list[int]) -> None:
    """Compare the masks of a tree and what is allowed in it, and see that nothing has changed."""
    before = masks_of(grammar, [], [])
    followed = [naive.follow([*text, *path_to(tokens, parents, node)]) for node in range(-1, len(tokens))]
    assert grammar.allowed(tokens, parents).tolist() == [is_allowed for is_allowed, _, _ in followed[1:]]
    for found, (is_allowed, has_ended, expected) in zip(masks_of(grammar, tokens, parents), followed, strict=True):
        if is_allowed and not has_ended:
            assert found == expected
        else:
            assert len(found) > 9, "a row behind the end must have some token, whatever is banned beside"
    assert masks_of(grammar, [], []) == before


def check_forced(grammar: SessionGrammar, naive: Naive, text: list[int], path: list[int]) -> None:
    """What is forced behind a path may follow it, up to an end, and asking leaves no trace."""
    before = masks_of(grammar, [], [])
    forced = grammar.forced(path)
    assert masks_of(grammar, [], []) == before
    is_allowed, has_ended, following = naive.follow([*text, *path])
    if not is_allowed or has_ended:
        assert not forced
    elif forced and forced[0] not in (EOS, 0, LETTER_A):
        assert forced[0] in following
        assert naive.follow([*text, *path, *forced[:-1]])[0] or {*forced} & {EOS, 0, LETTER_A}


def serve(grammar_name: str, ends: str, entropy: int, tokenizer: Any, num_turns: int = 4) -> int:
    """Let a session follow a random text with random trees. Return how many tokens it has at the end."""
    random, end_ids, vocab = Random(entropy), ENDS[ends], tokenizer.inner.vocab_size
    naive = Naive(tokenizer, GRAMMARS[grammar_name], end_ids)
    grammar = session_grammar(tokenizer, GRAMMARS[grammar_name], end_ids)
    text: list[int] = []
    for _ in range(num_turns):
        tokens, parents = random_tree(naive, text, random, vocab)
        check_tree(grammar, naive, text, tokens, parents)
        check_forced(grammar, naive, text, path_to(tokens, parents, random.randrange(-1, len(tokens))))
        _, _, following = naive.follow(text)
        if not following:
            return len(text)
        committed = [random.choice(sorted(following))]
        while random.random() < 0.6 and naive.follow([*text, *committed])[2]:
            committed.append(random.choice(sorted(naive.follow([*text, *committed])[2])))
        assert grammar.commit(committed) == len(committed)
        text += committed
        _, has_ended, _ = naive.follow(text)
        assert grammar.has_ended == (has_ended and committed[-1] not in end_ids)
        if has_ended:
            return len(text)
    return len(text)


@each(("name", "ends", "entropy"), product(GRAMMARS, ENDS, range(3)))
def test_masks_are_those_of_a_new_matcher_on_each_path(name: str, ends: str, entropy: int) -> None:
    serve(name, ends, entropy, small())


@each(("name", "entropy"), product(["json_schema", "structural_tag", "after"], range(2)))
def test_so_they_are_with_a_models_tokenizer(name: str, entropy: int) -> None:
    serve(name, "the model's", entropy, tiny(), num_turns=2)


@each("end_ids", [(0, EOS), (EOS,), (LETTER_A,)])
def test_so_they_are_whichever_end_token_llguidance_has(end_ids: tuple[int, ...]) -> None:
    """It has one for all its matchers, which may be a text's token too."""
    for name, ends in product(["end tokens as text", "regex", "choice", "lark"], ENDS):
        serve(name, ends, 1, small(end_ids))


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAMMARS)
def test_so_are_many_more(name: str) -> None:
    lengths = [serve(name, ends, entropy, small(), 8) for ends, entropy in product(ENDS, range(10, 15))]
    assert max(lengths) > (1 if name == "choice" else 2)


# --- ends -------------------------------------------------------------------------------------------------------------


def test_a_text_that_cannot_go_on_ends_without_an_end_token() -> None:
    """Whatever comes behind the end in the same round does not belong to the text."""
    grammar, ids = session_grammar(small(), {"choice": ["a", "ab"]}), small().ids
    assert grammar.commit(ids("a")) == 1
    assert not grammar.has_ended
    assert grammar.commit([*ids("b"), LETTER_A, EOS]) == 1
    assert grammar.has_ended


def test_an_end_token_belongs_to_the_text() -> None:
    grammar = session_grammar(small(), {"regex": "a*"})
    assert grammar.commit([LETTER_A, LETTER_A, EOS]) == 3
    assert not grammar.has_ended


def test_a_node_behind_an_end_is_not_allowed() -> None:
    grammar, ids = session_grammar(small(), {"choice": ["a", "ab"]}), small().ids
    tokens, parents = [LETTER_A, EOS, LETTER_A, *ids("b"), LETTER_A, -1, EOS], [-1, 0, 1, 0, 3, 1, 3]
    assert grammar.allowed(tokens, parents).tolist() == [True, True, False, True, False, False, False]


def test_an_ignored_end_is_not_allowed() -> None:
    """Where the model's ends are ignored, they are no text either."""
    grammar = session_grammar(small(), {"regex": "a*"}, end_ids=())
    assert grammar.allowed([EOS, 0, LETTER_A], [-1, -1, -1]).tolist() == [False, False, True]
    assert masks_of(grammar, [], [])[0] == {i for i in masks_of(grammar, [], [])[0] if i > EOS}


def test_tokens_that_are_not_known_yet_may_be_anything() -> None:
    """Neither may what hangs from them be known."""
    grammar = session_grammar(small(), {"choice": ["ab"]})
    tokens, parents = [-7, LETTER_A, -3, EOS, LETTER_A], [-1, 0, -1, -1, -1]
    assert grammar.allowed(tokens, parents).tolist() == [True, True, True, False, True]


@each("grammar", [{"regex": ""}, {"lark": 'start: ""'}])
def test_an_empty_text_ends_at_once(grammar: dict[str, Any]) -> None:
    """With an end token, since a session has no round without tokens."""
    assert masks_of(session_grammar(small(), grammar), [], []) == [{EOS}]
    assert masks_of(session_grammar(small(), grammar, end_ids=()), [], []) == [set()]


def test_tokens_above_the_tokenizers_are_never_allowed() -> None:
    """A model's vocabulary is often padded."""
    most = max(masks_of(session_grammar(small(), {"regex": "(?s:.*)"}), [], [])[0])
    assert most == 349 < SMALL


def test_a_model_without_end_tokens_follows_no_grammars() -> None:
    with pytest.raises(ConfigError, match="eos_token list must not be empty"):
        build_tokenizer(tokenizer_files(), SMALL, ())


# --- what was committed wrongly, and limits ---------------------------------------------------------------------------


def test_a_committed_token_that_is_not_allowed_is_an_error() -> None:
    grammar = session_grammar(small(), {"choice": ["ab"]})
    with pytest.raises(EngineError, match=f"does not allow token {LETTER_A}"):
        grammar.commit([LETTER_A, LETTER_A])


def test_a_matcher_that_runs_into_a_limit_allows_nothing_and_says_why() -> None:
    """In a mask, or on the way to a node. No call raises but `commit`."""
    limits = replace(GrammarLimits(), lexer_states=20)
    grammar = session_grammar(small(), {"regex": "(a|b)*c(a|b){12}d"}, limits=limits)
    tokens = small().ids("abacabab")
    parents = list(range(-1, len(tokens) - 1))
    for _ in range(2):
        found = masks_of(grammar, tokens, parents)
        assert found[0] == set()
        assert "too complex here" in grammar.reason()
        assert "too many states" in grammar.reason()
        assert not grammar.allowed(tokens, parents).any()
        assert grammar.forced(tokens[:2]) == []
    with pytest.raises(EngineError, match="too many states"):
        grammar.commit(tokens[:1])
    assert not grammar.has_ended


@each("marks", [{"opens": "<t>", "after": "</t>"}, {"opens": "<|im_start|>", "after": "<|im_end|>", "within": 2}])
def test_only_behind_a_free_part_may_white_space_come_before_the_grammar(marks: dict[str, Any]) -> None:
    """A text without such a part is one of the choices, and not one behind spaces."""
    free = f"{marks['opens']}a{marks['after']}"
    for text, is_allowed in (("yes", True), (" yes", False), (f"{free} yes", True), (f"{free}     yes", False)):
        token_ids = small((0,)).ids(text)
        count = matcher_of(small((0,)), {"choice": ["yes"], **marks}).try_consume_tokens(token_ids)
        assert (count == len(token_ids)) == is_allowed, text


@each("text", ["", "a", "ab", "abc", "b", "abcd"])
def test_the_mask_behind_a_drafted_path_is_that_of_its_row(text: str) -> None:
    """None where the path is not allowed, or ends the text. The state stays."""
    tokens, grammar = [small().ids(one)[0] for one in text], session_grammar(small(), {"regex": "ab?c*"})
    rows = masks_of(grammar, tokens, [*range(-1, len(tokens) - 1)])
    found = grammar.mask_behind(tokens)
    assert (None if found is None else tokens_of(found)) == (rows[-1] if text in ("", "a", "ab", "abc") else None)
    assert masks_of(grammar, [], []) == rows[:1]
