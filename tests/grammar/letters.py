"""A vocabulary of a few letters, and random grammars over it, of which it is known in another way what they allow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specq.grammar import GrammarTokenizer, SessionGrammar
from specq.grammar.building import build_matcher
from specq.grammar.limits import GrammarLimits
from specq.grammar.tokenizer import build_tokenizer

LETTERS = "abcd"
LAST, END = 4, 5  # what each text ends with, out of reach of the tests, and the end token


@cache
def letters() -> GrammarTokenizer:
    """Return a tokenizer of single letters."""
    vocab = {letter: i for i, letter in enumerate([*LETTERS, "z"])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return build_tokenizer({"tokenizer.json": str(tokenizer.to_str())}, END + 1, (END,))


@dataclass(frozen=True)
class Automaton:
    """A random grammar: in each of some states some letters may come, each of which leads to a state.

    vocab   letters that there are.
    length  of the texts. Tests look at shorter ones.
    """

    entropy: int
    vocab: int = 3
    num_states: int = 3
    length: int = 12

    @cached_property
    def ways(self) -> list[dict[int, int]]:
        """The following state of each allowed token, by state.

        States with one token lead to later states or to state 0, which has two.
        """
        rng = np.random.default_rng(self.entropy)
        found = []
        for state in range(self.num_states):
            count = rng.integers(1, self.vocab) if state else 2
            after = [0, *range(state + 1, self.num_states)] if count == 1 else range(self.num_states)
            tokens = rng.permutation(self.vocab)[:count].tolist()
            found.append({token: int(rng.choice(list(after))) for token in tokens})
        return found

    def allows(self, text: Sequence[int]) -> set[int]:
        """Return the tokens that may follow a text; all of them if the text itself is not allowed."""
        state = 0
        for token in text:
            if token not in self.ways[state]:
                return set(range(self.vocab))
            state = self.ways[state][token]
        return set(self.ways[state])

    def is_allowed(self, text: Sequence[int]) -> bool:
        """Return whether a text is allowed."""
        state: int | None = 0
        for token in text:
            state = None if state is None else self.ways[state].get(token)
        return state is not None

    def session_grammar(self) -> SessionGrammar:
        """Return the same as llguidance follows it, at its start."""
        return SessionGrammar(self._matcher.deep_copy(), letters().inner, ())

    @cached_property
    def _matcher(self) -> Any:
        lines = ["start: s0_0"]
        for depth in range(self.length):
            for state, ways in enumerate(self.ways):
                options = " | ".join(f'"{LETTERS[token]}" s{to}_{depth + 1}' for token, to in ways.items())
                lines.append(f"s{state}_{depth}: {options}")
        lines += [f's{state}_{self.length}: "z"' for state in range(self.num_states)]
        return build_matcher(letters(), json.dumps({"lark": "\n".join(lines)}), GrammarLimits())
