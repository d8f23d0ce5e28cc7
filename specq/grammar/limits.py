"""What one grammar may cost: while it is tried, while it is built, and for each of its masks.

The trial, in a process of its own, keeps to all of them. The verifier's matchers keep to the limits of llguidance.
Rule: ordinary schemas fit. The floors were measured on 49,152 tokens (`docs/log/structured-output.md`).
"""

from __future__ import annotations

from dataclasses import dataclass

from specq.protocol import MAX_CHOICES

# llguidance's own figures (LLParserLimits)
FUEL_PER_MS = 14_000  # of the lexer
ITEMS_PER_MS = 20_000  # of the parser
BYTES_PER_STATE = 2_048  # of the lexer

FUEL_SHARE = 0.75  # of a mask's time; the parser has the rest
LEAST_MASK_S = 0.025
LEAST_FUEL, MOST_FUEL = 100_000, 1_000_000
LEAST_ITEMS, MOST_ITEMS = 20_000, 200_000
LEAST_STATES, MOST_STATES = 32_768, 250_000  # a bounded string needs 5 for each character
LEAST_TRIAL_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """The limits of one grammar.

    trial_s           wall time of its trial
    trial_bytes       memory of its trial, beyond that of the loaded tokenizer
    mask_s            CPU time of one mask
    initial_fuel      the lexer's work while the grammar is built
    step_fuel         the lexer's work for one mask
    step_items        the parser's items for one mask
    items_in_row      the parser's items at one place of the text: 4 for each property that may be missing
    lark_items_in_row the same for Lark, whose grammars may be ambiguous: their items grow with the text
    lexer_states      states of the lexer, over the whole text
    grammar_size      symbols in all rules
    """

    trial_s: float = 2.0
    trial_bytes: int = 256 << 20
    mask_s: float = LEAST_MASK_S
    initial_fuel: int = 1_000_000
    step_fuel: int = 200_000
    step_items: int = 50_000
    items_in_row: int = 2_000
    lark_items_in_row: int = 500
    lexer_states: int = 65_536
    grammar_size: int = 500_000

    def items_in_row_of(self, kind: str) -> int:
        if kind == "choice":  # one for each text, and they have no parts
            return max(self.items_in_row, MAX_CHOICES + 1)
        return self.lark_items_in_row if kind == "lark" else self.items_in_row

    @property
    def memory_reason(self) -> str:
        return f"grammar: it needs more than {self.trial_bytes >> 20} MB of memory"


def limits_of(step_s: float, memory_bytes: int) -> GrammarLimits:
    """Return the limits of a session whose steps take `step_s`, and whose grammar may use `memory_bytes`.

    A mask may take as long as a step, since it is made while the step's forward pass runs.
    """
    step_ms = step_s * 1e3
    return GrammarLimits(
        trial_bytes=max(LEAST_TRIAL_BYTES, memory_bytes),
        mask_s=max(LEAST_MASK_S, step_s),
        step_fuel=_within(LEAST_FUEL, step_ms * FUEL_SHARE * FUEL_PER_MS, MOST_FUEL),
        step_items=_within(LEAST_ITEMS, step_ms * (1 - FUEL_SHARE) * ITEMS_PER_MS, MOST_ITEMS),
        lexer_states=_within(LEAST_STATES, memory_bytes / BYTES_PER_STATE, MOST_STATES),
    )


def _within(low: int, value: float, high: int) -> int:
    return int(min(max(low, value), high))
