"""A running deployment: whether drafts leave its texts unchanged, and its speed with and without.

Each bundled prompt is completed plainly and with drafts, greedily and with a seed. The runs are seconds apart, in
changing order, and follow an uncounted run. A ratio compares two such turns.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

from specq.client import Result
from specq.doctor.checks import NOTE, OK, WRONG, Check, is_sound
from specq.runtime import Tell, columns
from specq.samples import shipped_messages

PLAIN, DRAFTS = "plain", "drafts"
MODES = {PLAIN: {"mode": "plain"}, DRAFTS: {}}
TEMPERATURES = (0.0, 0.8)
MAX_TOKENS = 64
WIDEST_TIE = 0.25  # of log-probabilities: two steps of bfloat16 at a logit between 16 and 32


class Generates(Protocol):
    """The needed part of a client."""

    def generate(self, **arguments: Any) -> Result:
        """Complete a prompt."""
        ...


@dataclass(frozen=True, slots=True)
class ServedRates:
    """The results of a deployment.

    They are the number of texts, the different texts, and each turn's tokens a second. A different text has the gap
    between plain decoding's two best tokens there, in log-probability. The gap is None for sampled texts.
    """

    texts: int
    differing: dict[str, float | None]
    rates: dict[str, list[float]]

    @property
    def check(self) -> Check:
        """Whether drafts left the texts unchanged.

        If rounding depends on the batch, near ties may change them.
        """
        said = f"{self.texts - len(self.differing)} of {self.texts} texts with drafts equal those of plain decoding"
        if not self.differing:
            return Check("same text", OK, said)
        said = f"{said}; not: {', '.join(self.differing)}"
        if any(gap is not None and gap > WIDEST_TIE for gap in self.differing.values()):
            return Check("same text", WRONG, said, "that is a bug of specq; please report it with the output of --json")
        return Check(
            "same text",
            NOTE,
            said,
            "on a GPU, nearly equal logits may change order with the batch size (README, Limits)",
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all results as JSON-able values."""
        about = {"texts": self.texts, "differing": self.differing, "status": self.check.status}
        return about | {"tokens_per_second": self.rates, "ratio": self.ratio}

    @property
    def is_sound(self) -> bool:
        return is_sound([self.check])

    @property
    def ratio(self) -> float:
        """The median ratio of a turn with drafts to the same turn without."""
        return round(median(ours / plain for ours, plain in zip(self.rates[DRAFTS], self.rates[PLAIN], strict=True)), 3)

    def lines(self) -> list[str]:
        """Return the answer as text."""
        rows = [
            (name, f"{median(rates):.1f}", f"{min(rates):.1f}..{max(rates):.1f}") for name, rates in self.rates.items()
        ]
        check = self.check
        return [
            columns([("WAY", "TOKENS/S", "OF EACH TEXT"), *rows]),
            (
                f"with drafts {self.ratio:.2f} times as fast as without: the median of pairs of turns, one session at "
                "a time"
            ),
            " ".join(filter(None, (f"same text: {check.status}:", check.found, check.advice and f"({check.advice})"))),
        ]


def examine_service(client: Generates, num_each: int, tell: Tell) -> ServedRates:
    """Complete `num_each` prompts of each bundled data set in both ways."""
    rates: dict[str, list[float]] = {name: [] for name in MODES}
    differing, prompts = dict[str, float | None](), shipped_messages(num_each)
    for _, messages in prompts:  # so that the first way does not compute the prompt for the other
        client.generate(messages=messages, max_tokens=1)
    for temperature in TEMPERATURES:
        for number, (name, messages) in enumerate(prompts):
            texts = {}
            for mode in sorted(MODES, reverse=bool(number % 2)):
                result, rate = _turn(client, messages, MODES[mode], temperature, number)
                texts[mode] = result.token_ids
                rates[mode].append(rate)
            if texts[PLAIN] != texts[DRAFTS]:
                gap = None if temperature else _gap(client, messages, texts[PLAIN], texts[DRAFTS])
                differing[f"{name} T={temperature:g}"] = gap
            tell(f"{name} T={temperature:g}: plain {rates[PLAIN][-1]:.0f}, drafts {rates[DRAFTS][-1]:.0f} tokens/s")
    return ServedRates(len(TEMPERATURES) * len(prompts), differing, rates)


def _turn(
    client: Generates, messages: Sequence[dict[str, str]], mode: dict[str, str], temperature: float, seed: int
) -> tuple[Result, float]:
    began = time.perf_counter()
    result = client.generate(messages=messages, max_tokens=MAX_TOKENS, temperature=temperature, seed=seed, **mode)
    return result, len(result.token_ids) / (time.perf_counter() - began)


def _gap(client: Generates, messages: Sequence[dict[str, str]], plain: Sequence[int], drafted: Sequence[int]) -> float:
    """Return the gap between plain decoding's two best tokens where the texts differ."""
    both = zip(plain, drafted, strict=False)
    at = next((i for i, (ours, theirs) in enumerate(both) if ours != theirs), min(len(plain), len(drafted)))
    again = client.generate(messages=messages, max_tokens=MAX_TOKENS, temperature=0.0, logprobs=2, **MODES[PLAIN])
    (_, best), (_, second) = (again.logprobs or [])[min(at, len(plain) - 1)]["top"][:2]
    return round(float(best - second), 4)
