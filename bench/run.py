"""A whole benchmark run: prompts, contestants, turns, figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from bench import agreement
from bench.contestants import RIVALS, field
from bench.figures import figures
from bench.measure import measure
from bench.settings import Settings
from specq.protocol import ConfigError
from specq.samples import codec_of, load_prompts

NOTES = {
    "transformers": "one prompt after the other, with as many threads as are fastest; specq's processes are idle meanwhile",
    "assisted": "the same, with the draft model as assistant",
    "plain": "specq without any speculation: no drafters, no lookups",
    "lookup": "specq without drafters; the verifier drafts what the text repeats",
    "lookahead": "specq without drafters; the verifier always drafts by lookahead decoding",
    "specq": "specq with drafters; the verifier drafts what the text repeats where they have sent nothing",
    "rate": "all tokens over all seconds of a repetition, prompts included; the median of the repetitions",
}


def run(settings: Settings, names: Sequence[str], tell: Callable[[str], None]) -> dict[str, Any]:
    """Measure the named contestants; return settings, figures and differences as JSON-able values."""
    prompts = load_prompts(settings.datasets, settings.num_prompts, codec_of(settings.model))
    if not prompts:
        raise ConfigError(f"no prompts in {', '.join(settings.datasets)}")
    with field(names, settings, tell) as found:
        turns = measure(found.contestants, prompts, settings, tell)
        sessions = {contestant.name: contestant.concurrency for contestant in found.contestants}
        comparable = [turn for turn in turns if settings.temperature == 0 or turn.contestant not in RIVALS]
        different = agreement.differences(comparable, found.rivals.logit_gap if found.rivals else None)
    return {
        "settings": asdict(settings) | {"transformers_threads": found.rivals.num_threads if found.rivals else None},
        "num_prompts": len(prompts),
        "contestants": figures(turns, sessions),
        "agreement": agreement.summary(comparable, different),
        "notes": NOTES,
    }
