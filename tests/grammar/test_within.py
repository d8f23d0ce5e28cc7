"""A part before the grammar with a bounded number of tokens: exactly the texts of its definition, with any draft."""

from __future__ import annotations

import itertools

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from specq.grammar import SessionGrammar
from specq.grammar.building import build_matcher, try_grammar
from specq.grammar.limits import GrammarLimits
from specq.grammar.tokenizer import build_tokenizer
from specq.protocol import MAX_WITHIN, JobError
from specq.protocol.grammars import grammar_text
from tests.each import each

A, B, OPEN, CLOSE, END = range(5)
LIMITS = GrammarLimits(mask_s=0.1)  # a busy machine's
LONGEST = 5


def small_tokenizer():
    """Two letters, and the marks of thoughts as in Qwen3: added tokens that are not special."""
    tokenizer = Tokenizer(models.BPE({"a": A, "b": B}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<t>", special=False), AddedToken("</t>", special=False)])
    tokenizer.add_special_tokens(["<end>"])
    return build_tokenizer({"tokenizer.json": str(tokenizer.to_str())}, END + 1, (END,))


TOKENIZER = small_tokenizer()


def is_complete(kind, opens, within, token_ids):
    """Whether a text is allowed, by definition."""
    if opens and token_ids[:1] != (OPEN,):
        return follows(kind, token_ids) and not (kind == "any" and OPEN in token_ids)
    thoughts = token_ids[1:] if opens else token_ids
    if CLOSE not in thoughts or thoughts.index(CLOSE) > within:
        return False
    rest = thoughts[thoughts.index(CLOSE) + 1 :]
    return follows(kind, rest) and not (kind == "any" and opens and OPEN in rest)


def follows(kind, token_ids):
    return kind == "any" or (set(token_ids) == {A})


@each("within", [0, 1, 2])
@each("opens", [False, True])
@each("kind", ["any", "regex"])
def test_the_texts_are_those_of_the_definition(kind, opens, within):
    given = {"any": True} if kind == "any" else {"regex": "a+"}
    marks = {"after": "</t>", "within": within} | ({"opens": "<t>"} if opens else {})
    matcher = build_matcher(TOKENIZER, grammar_text(given | marks), LIMITS)
    grammar = SessionGrammar(matcher, TOKENIZER.inner, [END])
    texts = [ids for size in range(LONGEST + 1) for ids in itertools.product((A, B, OPEN, CLOSE), repeat=size)]
    complete = {ids for ids in texts if is_complete(kind, opens, within, ids)}
    begun = {ids[:end] for ids in complete for end in range(len(ids) + 1)}
    for ids in texts:
        chain = list(range(-1, len(ids)))
        allowed = grammar.allowed([*ids, END], chain).tolist()  # each draft is walked, and taken back
        if len(ids) < LONGEST - 2:  # longer ones may be the beginnings of texts that are not listed
            assert all(allowed[: len(ids)]) == (ids in begun), ids
        assert allowed[-1] == (ids in complete), ids


def test_the_end_is_forced_behind_the_last_token():
    """So it is drafted without a model, and a draft cannot pass it."""
    matcher = build_matcher(TOKENIZER, grammar_text({"any": True, "after": "</t>", "within": 3}), LIMITS)
    grammar = SessionGrammar(matcher, TOKENIZER.inner, [END])

    assert grammar.forced([A, B]) == []
    assert grammar.forced([A, B, OPEN]) == [CLOSE]
    assert grammar.commit([A, B, A]) == 3
    assert grammar.forced() == [CLOSE]
    assert grammar.allowed([A, B, OPEN, CLOSE, END], [-1] * 5).tolist() == [False, False, False, True, False]


def test_the_largest_budget_passes_the_trial():
    for kind in ({"any": True}, {"regex": "a+"}):
        for opens in ({}, {"opens": "<t>"}):
            try_grammar(TOKENIZER, grammar_text({**kind, **opens, "after": "</t>", "within": MAX_WITHIN}), LIMITS)


@each(
    ("given", "reason"),
    [
        ({"any": True, "within": 3}, "within without after"),
        ({"any": True, "after": "a", "within": -1}, "within is -1, but must be a number of tokens from 0 to"),
        ({"any": True, "after": "a", "within": True}, "within is True, but must be"),
        ({"any": 1}, "any is 1, but must be true"),
    ],
)
def test_a_wrong_form_is_refused(given, reason):
    with pytest.raises(JobError, match=reason):
        grammar_text(given)


@each("marks", [{"after": "b</t>"}, {"after": "</t>", "opens": "a"}])
def test_what_cannot_be_counted_is_refused(marks):
    with pytest.raises(JobError, match="to begin with a special token of the model, but it is"):
        try_grammar(TOKENIZER, grammar_text({"any": True, "within": 3, **marks}), LIMITS)
