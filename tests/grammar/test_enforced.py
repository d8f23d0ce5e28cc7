"""Strict schemas that llguidance takes and does not keep are refused."""

from __future__ import annotations

import re

import pytest
from jsonschema import FormatChecker

from specq.grammar.building import build_matcher, try_grammar
from specq.grammar.forms import ANNOTATIONS
from specq.grammar.limits import GrammarLimits
from specq.grammar.tokenizer import build_tokenizer
from specq.models import resolve_model
from specq.protocol import JobError
from specq.protocol.grammars import MAX_CHOICES, MOST_STRUCTURES, grammar_text
from specq.text import load_tokenizer_files

TOKENIZER = build_tokenizer(load_tokenizer_files(resolve_model("tiny", "target")), 4096, (0,))
LIMITS = GrammarLimits(mask_s=0.1)  # a busy machine's


def takes(grammar, text):
    matcher = build_matcher(TOKENIZER, grammar_text(grammar), LIMITS)
    token_ids = TOKENIZER.ids(text)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


TAG = {"structures": [{"begin": "<f>", "schema": {"type": "null"}, "end": ""}], "triggers": ["<f>"]}
# a schema, a text that llguidance takes and that violates it, the reason
UNKEPT = [
    ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**60}, str(2**53), "minimum 9007199254740993 cannot"),
    ({"type": "integer", "minimum": 2**63, "maximum": 2**63 + 9}, str(2**63 - 1), "minimum 9223372036854775808"),
    ({"type": "integer", "minimum": 0, "maximum": 2**53 + 3}, str(2**53 + 4), "maximum 9007199254740995"),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "0", "exclusiveMinimum 0 cannot be enforced beside"),
    ({"type": "number", "minimum": -5.5, "exclusiveMaximum": -5}, "-5", "exclusiveMaximum -5 cannot"),
    ({"const": 2**64 - 1}, "18446744073709552000", "18446744073709551615 in const"),
    ({"enum": [{"a": [2**53 + 1]}]}, '{"a": [9007199254740992]}', "9007199254740993 in const or enum"),
    ({"type": "object", "minProperties": 2}, '{"a": 1, "a": 2}', "minProperties 2 cannot"),
    ({"prefixItems": [{"type": "null"}], "additionalItems": False}, "[1]", "prefixItems cannot"),
]


@pytest.mark.parametrize(("schema", "text", "reason"), UNKEPT, ids=lambda value: str(value)[:40])
def test_a_strict_schema_that_would_not_be_kept_is_refused_with_the_place(schema, text, reason):
    assert takes({"json_schema": schema}, text), "llguidance keeps it now: delete the check"
    outer = {"type": "object", "properties": {"a/b": {"anyOf": [{"type": "null"}, schema]}}}
    structures = [{"begin": f"<f{at}>", "schema": one, "end": ""} for at, one in enumerate([{"type": "null"}, outer])]
    tag = {"structural_tag": {"structures": structures, "triggers": ["<f"]}}
    for grammar, name in (
        ({"json_schema": outer}, ""),
        (tag, "structures[1].schema"),
        ({"structural_tag": TAG, "required": True, "otherwise": outer}, "otherwise"),
    ):
        with pytest.raises(JobError, match=re.escape(reason)) as caught:
            try_grammar(TOKENIZER, grammar_text(grammar), LIMITS)
        assert str(caught.value).endswith(f", at {name}#/properties/a~1b/anyOf/1")
    try_grammar(TOKENIZER, grammar_text({"json_schema": outer, "strict": False}), LIMITS)


@pytest.mark.parametrize(
    ("at", "place"),
    [("components/A", "#/components/A"), ("x y/0", "#/x%20y/0"), ("a~1b/A", "#/a~1b/A"), ("enum/0", "#/enum/0")],
)
def test_what_a_schema_refers_to_is_checked_wherever_it_stands(at, place):
    """llguidance follows such a pointer, also behind names that are no keywords."""
    (name, key), part = at.replace("~1", "/").rsplit("/", 1), {"type": "object", "minProperties": 2}
    schema = {"anyOf": [{"$ref": place}], name: [part] if key == "0" else {key: part}}
    if name != "enum":
        assert takes({"json_schema": schema}, '{"a": 1, "a": 2}')
    with pytest.raises(JobError, match=re.escape("minProperties 2 cannot")) as caught:
        try_grammar(TOKENIZER, grammar_text({"json_schema": schema}), LIMITS)
    assert str(caught.value).endswith(f", at {place}")


@pytest.mark.parametrize("address", ["http://x/s#/c/A", "s#/c/A", "#/c/A"])
@pytest.mark.parametrize("is_inner", [False, True])
def test_so_it_is_where_a_schema_has_a_name(address, is_inner):
    named = {"$id": "http://x/s", "anyOf": [{"$ref": address}], "c": {"A": {"type": "object", "minProperties": 2}}}
    schema = {"anyOf": [{"$ref": "#/$defs/B"}], "$defs": {"B": named}} if is_inner else named
    assert takes({"json_schema": schema}, '{"a": 1, "a": 2}')
    with pytest.raises(JobError, match=re.escape("minProperties 2 cannot")):
        try_grammar(TOKENIZER, grammar_text({"json_schema": schema}), LIMITS)


def test_a_schema_that_refers_to_itself_is_checked_once():
    parts = {"inner": {"anyOf": [{"type": "null"}, {"items": {"$ref": "#/parts/inner"}, "maxItems": 1}]}}
    loop = {"anyOf": [{"$ref": "#/parts/inner"}], "parts": parts}
    assert takes({"json_schema": loop}, "null")
    try_grammar(TOKENIZER, grammar_text({"json_schema": loop}), LIMITS)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1, "multipleOf": 1},
        {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        {"type": "number", "exclusiveMinimum": 0.5, "maximum": 0.6},
        {"type": "number", "exclusiveMinimum": -1, "maximum": -0.5},
        {"enum": [2**53, 10**18, 1e30]},
        {"type": "object", "required": ["a", "b"], "minProperties": 2},
        {"type": "object", "minProperties": 1},
        {"properties": {"const": {"enum": ["minProperties"]}, "prefixItems": {"type": "null"}}},
    ],
    ids=str,
)
def test_what_is_kept_is_not_refused(schema):
    from specq.grammar.enforced import check_enforced

    check_enforced({"json_schema": schema})


def test_a_format_that_is_an_annotation_constrains_nothing():
    """Wherever a schema may be; a property of this name and values are no formats, and other formats are refused."""
    for name in ANNOTATIONS:
        assert takes({"json_schema": {"type": "string", "format": name}}, '"any text"'), name
    inner = {"anyOf": [{"format": "password", "type": "string"}, {"$ref": "#/$defs/n"}]}
    defs = {"n": {"type": "integer", "format": "int32"}}
    properties = {"format": {"const": {"format": "byte"}}, "a": {"type": "array", "items": inner}}
    schema = {"type": "object", "properties": properties, "required": ["format", "a"], "$defs": defs}
    assert takes({"json_schema": schema}, '{"format": {"format": "byte"}, "a": ["x", 3]}')
    assert not takes({"json_schema": schema}, '{"format": {}, "a": []}')
    tag = {"structures": [{"begin": "<f>", "schema": inner["anyOf"][0], "end": ""}], "triggers": ["<f>"]}
    assert takes({"structural_tag": tag, "required": True}, '<f>"x"')
    for name in ("date-tme", "uuid4", "regex"):
        with pytest.raises(JobError, match=f"Unknown format: {name}, at #; leave this out"):
            try_grammar(TOKENIZER, grammar_text({"json_schema": {"type": "string", "format": name}}), LIMITS)


def test_no_validator_checks_them():
    """A format that the package jsonschema checks is a constraint."""
    assert not set(ANNOTATIONS) & set(FormatChecker.checkers)


@pytest.mark.parametrize("text", ["a\x7fb", "\0", 'q"\\', "\u2028\x85", "\x1b\r\n\t"])
def test_a_fixed_text_may_have_any_character(text):
    assert takes({"choice": [text]}, text)
    tag = {"structures": [{"begin": text, "schema": {"type": "null"}, "end": text}], "triggers": [text[:1]]}
    assert takes({"structural_tag": tag, "required": True}, f"{text}null{text}")


def test_a_text_before_a_special_token_does_not_spell_it():
    """Who reads the text would take the spelling for the token."""
    grammar = {"json_object": True, "after": "<|pad|>"}
    spelled = [*TOKENIZER.ids("a <|pad|"), *TOKENIZER.ids(">")]
    matcher = build_matcher(TOKENIZER, grammar_text(grammar), LIMITS)
    assert matcher.try_consume_tokens(spelled) == len(spelled) - 1
    assert takes(grammar, "a <|pad| b <|pad|>{}")


def test_no_space_but_that_of_json_comes_before_it():
    grammar = {"json_object": True, "after": "!"}
    assert takes(grammar, "!\n {}")
    assert not takes(grammar, "!\u2028{}")


def test_a_regular_expression_that_ends_with_half_an_escape_is_refused_as_such():
    with pytest.raises(JobError, match="invalid regex: it ends with"):
        try_grammar(TOKENIZER, grammar_text({"regex": "abc\\"}), LIMITS)
    assert takes({"regex": "abc\\\\"}, "abc\\")


def test_as_many_choices_and_structures_as_the_form_allows_pass_the_trial():
    try_grammar(TOKENIZER, grammar_text({"choice": [f"c{i}" for i in range(MAX_CHOICES)]}), LIMITS)
    null = {"type": "null"}
    structures = [{"begin": f"<f{i}>", "schema": null, "end": "</f>"} for i in range(MOST_STRUCTURES)]
    tag = {"structures": structures, "triggers": ["<f"]}
    walked = GrammarLimits(mask_s=0.1, lexer_states=300)  # of one walk: all of them need more
    try_grammar(TOKENIZER, grammar_text({"structural_tag": tag, "required": True}), walked)
    try_grammar(TOKENIZER, grammar_text({"structural_tag": tag, "required": True}), LIMITS)


def test_a_hostile_structure_among_many_is_found():
    schemas = [{"type": "null"}] * 60 + [{"type": "string", "pattern": "^(ab){50000}$"}]
    structures = [{"begin": f"<f{i}>", "schema": one, "end": ""} for i, one in enumerate(schemas)]
    grammar = {"structural_tag": {"structures": structures, "triggers": ["<f"]}, "required": True}
    with pytest.raises(JobError, match="of a trial takes"):
        try_grammar(TOKENIZER, grammar_text(grammar), GrammarLimits(mask_s=0.003))
