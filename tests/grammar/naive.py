"""What a grammar allows, by a matcher of its own for each question: the reference of `SessionGrammar`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from random import Random
from typing import Any

import numpy as np

from specq.grammar import GrammarTokenizer, SessionGrammar
from specq.grammar.building import build_matcher
from specq.grammar.limits import GrammarLimits
from specq.grammar.tokenizer import build_tokenizer
from specq.models import resolve_model
from specq.protocol.arrays import Int32Array
from specq.testing.tokenizer import tokenizer_files
from specq.text.codec import load_tokenizer_files

SMALL, EOS = 353, 2  # no multiple of 32, and 3 more than the tokenizer has; `<|im_end|>`
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["add", "sells", 9]}, "b": {"type": "array", "items": {"type": "boolean"}}},
    "required": ["a"],
    "additionalProperties": False,
}
TAG = {
    "structures": [{"begin": "<add>", "schema": SCHEMA, "end": "</add>"}],
    "triggers": ["<add"],
}
GRAMMARS: dict[str, dict[str, Any]] = {
    "json_object": {"json_object": True},
    "json_schema": {"json_schema": SCHEMA},
    "regex": {"regex": "(ab?|dog){1,3}[0-9]*"},
    "choice": {"choice": ["return", "return a", "retain", "eggs"]},
    "lark": {"lark": 'start: "(" start ")" | "a"+'},
    "structural_tag": {"structural_tag": TAG},
    "required": {"structural_tag": TAG, "required": True, "most": 2},
    "after": {"choice": ["yes", "no"], "after": "</t>", "opens": "<t>"},
    "within": {"any": True, "after": "<|im_start|>", "within": 4},
    "special": {"lark": 'start: "a" <|im_start|> "b"* | "eggs"'},
    "end tokens as text": {"lark": 'start: "a" ( <|im_end|> | <|endoftext|> | "b" )+ "c"'},
}


@cache
def small(end_ids: tuple[int, ...] = (EOS, 0)) -> GrammarTokenizer:
    """Return the byte-level tokenizer of the tests, for a model with these ends."""
    return build_tokenizer(tokenizer_files(), SMALL, end_ids)


@cache
def tiny() -> GrammarTokenizer:
    """Return the tokenizer of the bundled model."""
    files = load_tokenizer_files(resolve_model("tiny", "target"))
    return build_tokenizer(files, 4096, (EOS, 0))


_AT_START: dict[tuple[int, str], tuple[GrammarTokenizer, Any]] = {}  # by tokenizer, which must not be freed


def _at_start(tokenizer: GrammarTokenizer, text: str) -> Any:
    key = id(tokenizer), text
    if key not in _AT_START:
        _AT_START[key] = tokenizer, build_matcher(tokenizer, text, GrammarLimits())
    return _AT_START[key][1]


def matcher_of(tokenizer: GrammarTokenizer, grammar: dict[str, Any], limits: GrammarLimits | None = None) -> Any:
    """Return a matcher at its start."""
    return build_matcher(tokenizer, json.dumps(grammar), limits or GrammarLimits())


def session_grammar(
    tokenizer: GrammarTokenizer,
    grammar: dict[str, Any],
    end_ids: Sequence[int] = (EOS,),
    limits: GrammarLimits | None = None,
) -> SessionGrammar:
    """Return the grammar of a session at its start."""
    return SessionGrammar(matcher_of(tokenizer, grammar, limits), tokenizer.inner, end_ids)


def tokens_of(words: Int32Array) -> set[int]:
    """Return the tokens of a mask."""
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


class Naive:
    """What a grammar allows behind a text. `end_ids`: the tokens that end the session's text."""

    def __init__(self, tokenizer: GrammarTokenizer, grammar: dict[str, Any], end_ids: Iterable[int]) -> None:
        self._at_start = _at_start(tokenizer, json.dumps(grammar))
        self._ends = {end for end in end_ids if end < tokenizer.inner.vocab_size}
        self._closed = self._ends | set(tokenizer.inner.eos_tokens)

    def follow(self, text: Sequence[int]) -> tuple[bool, bool, set[int]]:
        """Return whether a text is allowed, whether it has ended, and which tokens may come next."""
        matcher = self._at_start.deep_copy()
        for place, token in enumerate(text):
            is_complete = matcher.is_accepting()
            if matcher.is_stopped():
                return False, True, set()
            if token in self._ends:
                return is_complete and place == len(text) - 1, True, set()
            if token not in tokens_of(np.frombuffer(matcher.compute_bitmask(), np.int32)) - self._closed:
                return False, False, set()
            assert matcher.consume_token(token)
        inner = tokens_of(np.frombuffer(matcher.compute_bitmask(), np.int32)) - self._closed
        if matcher.is_stopped():
            assert matcher.is_accepting()
            return True, True, set()
        return True, False, inner | (self._ends if matcher.is_accepting() else set())

    def walk(self, random: Random, num_tokens: int) -> list[int]:
        """Return a random allowed text of at most so many tokens that has not ended."""
        text: list[int] = []
        for _ in range(num_tokens):
            _, _, following = self.follow(text)
            token = random.choice(sorted(following)) if following else -1
            if token < 0 or self.follow([*text, token])[1]:
                break
            text.append(token)
        return text


def random_tree(naive: Naive, text: Sequence[int], random: Random, vocab: int) -> tuple[list[int], list[int]]:
    """Return tokens and parents of a random tree behind a text: allowed tokens, ends and others."""
    tokens: list[int] = []
    parents: list[int] = []
    paths: list[list[int]] = []
    for node in range(random.randrange(1, 9)):
        parent = random.randrange(-1, node)
        above = [*text, *(paths[parent] if parent >= 0 else [])]
        _, _, following = naive.follow(above)
        any_token = random.choice([random.randrange(vocab), random.randrange(3)])
        tokens.append(random.choice(sorted(following)) if following and random.random() < 0.8 else any_token)
        parents.append(parent)
        paths.append([*(paths[parent] if parent >= 0 else []), tokens[-1]])
    return tokens, parents


def path_to(tokens: Sequence[int], parents: Sequence[int], node: int) -> list[int]:
    """Return the tokens on the path to a node, its own included."""
    return [] if node < 0 else [*path_to(tokens, parents, parents[node]), tokens[node]]
