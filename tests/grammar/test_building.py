"""Grammars are tried: hostile ones are refused with a reason, or fit into their limits."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from specq.grammar.building import MOST_REASON, Walk, build_matcher, follow, try_grammar, warm
from specq.grammar.limits import GrammarLimits, limits_of
from specq.grammar.tokenizer import build_tokenizer
from specq.models import resolve_model
from specq.protocol import ConfigError, JobError
from specq.protocol.grammars import grammar_text
from specq.text import load_tokenizer_files
from tests.grammar.hostile import HOSTILE

FILES = load_tokenizer_files(resolve_model("tiny", "target"))
TOKENIZER = build_tokenizer(FILES, 4096, (0,))
# In another process only, in test_builder.py. llguidance before 1.8 does not come to an end with the last two.
SLOW = ("masks slowly", "masks slowly later", "masks slowly behind a text", "maxItems", "minItems")
LIMITS = GrammarLimits(mask_s=0.1)  # a busy machine's


@pytest.mark.parametrize("name", [name for name in HOSTILE if name not in SLOW])
def test_a_hostile_grammar_is_refused_with_the_reason_or_fits(name):
    value, reason = HOSTILE[name]
    if reason is None:
        try_grammar(TOKENIZER, grammar_text(value), LIMITS)
        return
    with pytest.raises(JobError, match=reason) as caught:
        try_grammar(TOKENIZER, grammar_text(value), LIMITS)
    assert caught.value.field == "grammar"
    assert len(str(caught.value)) <= MOST_REASON
    assert "\n" not in str(caught.value)
    assert str(caught.value).count("grammar: ") == 1


def test_a_mask_that_takes_too_long_is_found_before_the_lexers_fuel_ends():
    with pytest.raises(JobError, match=r"the mask after 0 tokens of a trial takes \d+ ms, but may take 1 ms"):
        try_grammar(TOKENIZER, grammar_text({"regex": "(ab){50000}"}), replace(LIMITS, mask_s=0.001))


def test_a_trial_reaches_what_is_nested_in_values_that_may_be_left_out():
    slow = {"type": "string", "pattern": "^(ab){50000}$"}
    for _ in range(3):
        slow = {"type": "array", "items": slow}
    with pytest.raises(JobError, match="of a trial takes"):
        try_grammar(TOKENIZER, grammar_text({"json_schema": slow}), replace(LIMITS, mask_s=0.003))


@pytest.mark.parametrize("option", ['stop="a"', "max_tokens=3"])
def test_a_grammar_that_no_draft_can_be_taken_back_from_is_refused(option):
    with pytest.raises(JobError, match="rollback not supported"):
        try_grammar(TOKENIZER, grammar_text({"lark": f'start: x "b"\nx[{option}]: /.*/'}), LIMITS)


def test_each_limit_of_llguidance_is_set():
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string", "maxLength": 99} for i in range(20)}}
    grammar = grammar_text({"json_schema": schema})
    try_grammar(TOKENIZER, grammar, LIMITS)
    for name in ("initial_fuel", "step_fuel", "step_items", "items_in_row", "lexer_states", "grammar_size"):
        with pytest.raises(JobError) as caught:
            try_grammar(TOKENIZER, grammar, replace(LIMITS, **{name: 3}))
        assert "grammar: " in str(caught.value)


def test_warming_a_matcher_leaves_it_where_it_was():
    grammar = grammar_text({"json_schema": {"type": "object", "properties": {"a": {"type": "string"}}}})
    warmed, other = (build_matcher(TOKENIZER, grammar, LIMITS) for _ in range(2))
    warm(TOKENIZER, grammar, warmed)
    assert warmed.compute_bitmask() == other.compute_bitmask()
    assert warmed.try_consume_tokens(TOKENIZER.ids('{"a": "')) == len(TOKENIZER.ids('{"a": "'))


def test_a_copy_shares_the_lexer_and_its_limit_of_states():
    """This is why each job has a matcher of its own: a text at the limit ends the texts of all copies."""
    grammar = grammar_text({"json_schema": {"type": "string", "maxLength": 2000}})
    matcher = build_matcher(TOKENIZER, grammar, replace(LIMITS, lexer_states=300))
    copy, own = matcher.deep_copy(), build_matcher(TOKENIZER, grammar, replace(LIMITS, lexer_states=300))
    with pytest.raises(JobError, match="too many states"):
        follow(matcher, Walk((), (), 0, 500))
    copy.compute_bitmask()
    own.compute_bitmask()
    assert copy.is_error()
    assert "<non-verbose/>" in copy.get_error()  # what it would say of the text is not for logs
    assert not own.is_error()


def test_special_tokens_are_known_by_their_spelling():
    assert TOKENIZER.special["<|endoftext|>"] == 0
    assert TOKENIZER.ids("<|endoftext|>") == [0]


def test_a_model_without_tokenizer_cannot_follow_grammars():
    with pytest.raises(ConfigError, match=re.escape("tokenizer.json")):
        build_tokenizer({}, 4096, (0,))
    with pytest.raises(ConfigError, match="cannot read the model's tokenizer"):
        build_tokenizer({"tokenizer.json": '{"model": 1}'}, 4096, (0,))


def test_limits_follow_the_time_of_a_step_and_the_memory_of_a_session():
    small, large = limits_of(0.001, 1), limits_of(0.050, 512 << 20)
    assert small.step_fuel >= 100_000  # ordinary schemas need at most 20,000 with 49,152 tokens
    assert small.lexer_states >= 5 * 2_000  # a string of 2,000 characters
    assert (large.mask_s, large.step_fuel, large.step_items) == (0.050, 525_000, 200_000)
    assert (large.lexer_states, large.trial_bytes) == (250_000, 512 << 20)
    assert limits_of(0.050, 128 << 20).lexer_states == 65_536


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_number_that_json_does_not_have_is_refused_where_the_grammar_is_written(value):
    """In place of it orjson writes null, which would be another schema."""
    for schema in ({"const": value}, {"type": "number", "maximum": value}, {"enum": [1, [{"a": value}]]}):
        with pytest.raises(JobError, match=f"grammar cannot be written as JSON: {value} is not a number"):
            grammar_text({"json_schema": schema})
