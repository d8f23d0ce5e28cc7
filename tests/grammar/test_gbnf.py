"""Grammars in GBNF, the form of llama.cpp and xgrammar: llguidance translates them when the verifier builds them."""

from __future__ import annotations

import json

import pytest

from specq.grammar.forms import MOST_GBNF, llguidance_grammar
from specq.protocol import JobError
from specq.testing.tokenizer import tokenizer_json
from tests.each import each

SQL = """
root ::= select " from " column  # one table
select ::= "select " column (", " column)*
column ::= "col_" [1-2]
"""


def allows(text, grammar):
    """Return whether a grammar allows a whole text."""
    from llguidance import LLMatcher, LLTokenizer

    tokenizer = LLTokenizer(tokenizer_json(), eos_token=2)
    matcher = LLMatcher(tokenizer, llguidance_grammar(json.dumps({"lark": grammar}), {}), log_level=0)
    assert matcher.get_error() == ""
    return matcher.consume_tokens(tokenizer.tokenize_str(text)) and matcher.is_accepting()


@each(
    ("grammar", "text", "is_allowed"),
    [
        (SQL, "select col_1, col_2 from col_2", True),
        (SQL, "select col_1 from col_3", False),
        (SQL, "select col_1", False),
        ('start: "x ::= y"', "x ::= y", True),
        ('%llguidance {}\n start : "::="', "::=", True),
    ],
)
def test_gbnf_is_followed_and_lark_stays_as_it_is(grammar, text, is_allowed):
    assert allows(text, grammar) is is_allowed


@each(
    ("grammar", "message"),
    [
        ('a ::= "b"', "grammar: its GBNF cannot be translated: No 'root' rule found"),
        ('start ::= "a"\nroot ::= start', "cannot be translated: Rule 'start' already exists"),
        ("root ::= nothing", "grammar: its GBNF cannot be translated: Rule 'nothing' not found"),
        ('root ::= "a', "grammar: its GBNF cannot be translated: Unexpected end of input"),
        ("root ::= " + "(" * 4000, "grammar: its GBNF cannot be translated"),
        ("root ::= " + '"a" ' * (MOST_GBNF // 4), f"characters of GBNF, but at most {MOST_GBNF} are translated"),
    ],
)
def test_gbnf_that_cannot_be_translated_is_refused(grammar, message):
    with pytest.raises(JobError, match=message) as refused:
        llguidance_grammar(json.dumps({"lark": grammar}), {})
    assert (refused.value.code, refused.value.field) == ("invalid", "grammar")
