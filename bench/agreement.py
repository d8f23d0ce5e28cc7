"""Whether all contestants give the same text.

At temperature 0 they must, except for near ties of the target's two best tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.turns import Turn
from specq.samples import Prompt

NEAR_TIE = 1e-4  # closer logits may fall either way in float32
PRECISIONS = {"float32": 24, "float16": 11, "bfloat16": 8}  # bits of a significand

Gap = Callable[[Sequence[int], int, int], float]


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a contestant first differs from the reference; `gap`: between the two tokens' logits, None if unknown."""

    contestant: str
    prompt: str
    position: int
    token: int
    reference_token: int
    gap: float | None

    @property
    def is_near_tie(self) -> bool:
        return self.gap is not None and self.gap < NEAR_TIE


def parting(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the index of the first token that differs between two texts.

    If one text is a prefix of the other, or both are equal, return the shorter one's length.
    """
    both = min(len(one), len(other))
    return next((i for i in range(both) if one[i] != other[i]), both)


def differences(turns: Sequence[Turn], gap: Gap | None) -> list[Difference]:
    """Return for each contestant and prompt the first difference from the first contestant's first repetition."""
    if not turns:
        return []
    reference = texts_of(turns, turns[0].contestant)
    others = {name: texts_of(turns, name) for name in dict.fromkeys(turn.contestant for turn in turns)}
    found = [
        _first(name, prompt, tokens, reference[prompt][0], gap)
        for name, texts in others.items()
        for prompt, repeats in texts.items()
        for tokens in repeats
    ]
    return list(dict.fromkeys(difference for difference in found if difference is not None))


def summary(turns: Sequence[Turn], found: Sequence[Difference]) -> dict[str, Any]:
    """Return the differences as JSON-able values."""
    return {
        "reference": turns[0].contestant if turns else None,
        "num_compared": sum(len(turn.prompts) for turn in turns),
        "num_different": len(found),
        "num_near_ties": sum(difference.is_near_tie for difference in found),
        "differences": [asdict(difference) | {"is_near_tie": difference.is_near_tie} for difference in found],
    }


def texts_of(turns: Sequence[Turn], name: str) -> dict[Prompt, list[list[int]]]:
    """Return the texts of a contestant for each prompt, one text for each repetition."""
    texts: dict[Prompt, list[list[int]]] = {}
    for turn in turns:
        for prompt, completion in zip(turn.prompts, turn.completions, strict=True) if turn.contestant == name else ():
            texts.setdefault(prompt, []).append(completion.token_ids)
    return texts


def _first(name: str, prompt: Prompt, tokens: list[int], right: list[int], gap: Gap | None) -> Difference | None:
    if tokens == right:
        return None
    position = parting(tokens, right)
    ours, theirs = (text[position] if position < len(text) else -1 for text in (tokens, right))
    known = gap is not None and min(ours, theirs) >= 0
    distance = gap([*prompt.token_ids, *right[:position]], ours, theirs) if gap and known else None
    return Difference(name, f"{prompt.dataset}/{prompt.id}", position, ours, theirs, distance)
