"""The request (models, prompts, sessions, temperature and lengths), and the result of one completion.

A pair is named NAME=TARGET,DRAFT. DRAFT may also be `random`, or `weak` (`weak:NOISE`): see `bench.drafts`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from specq.protocol import ConfigError
from specq.samples import Prompt, codec_of, load_prompts
from specq.text import TextCodec

MADE_OF = "tiny"  # the model that random and weak drafts are made from


@dataclass(frozen=True, slots=True)
class Settings:
    """One run's settings.

    num_prompts   of each data set.
    output_len    maximum tokens for each prompt.
    ignore_eos    always generate `output_len` tokens.
    k             tokens that the assistant of transformers drafts a round. specq chooses by itself.
    concurrency   specq's sessions in flight. Rivals on a CPU run one by one.
    repeats       repetitions of everything, interleaved.
    keys          as in `specq up`. "": no encryption.
    """

    datasets: tuple[str, ...] = ()
    num_prompts: int = 20
    output_len: int = 128
    k: int = 5
    concurrency: int = 1
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    repeats: int = 3
    drafters: int = 1
    model: str = "tiny"
    draft_model: str = "tiny"
    keys: str = ""

    def prompts(self) -> list[Prompt]:
        """Return the prompts; raises ConfigError if there are none."""
        found = load_prompts(self.datasets, self.num_prompts, self.codec())
        if not found:
            raise ConfigError(f"no prompts in {', '.join(self.datasets)}")
        return found

    def codec(self) -> TextCodec:
        """Return the target's tokenizer."""
        return codec_of(self.model)


@dataclass(frozen=True, slots=True)
class Completion:
    """A contestant's result for one prompt; `stats` has all counts of `specq.client.Result` that it knows.

    num_first   tokens that came first. 0 if not noted.
    seconds     time until the last token. 0 if not noted.
    """

    token_ids: list[int]
    first_token_ms: float
    stats: dict[str, Any] = field(default_factory=dict)
    num_first: int = 0
    seconds: float = 0.0


# --- pairs of models --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and a draft model, with their name in the figures."""

    name: str
    target: str
    draft: str


DEFAULT_PAIRS = (Pair("tiny", "tiny", "tiny"), Pair("weak", "tiny", "weak"))


def parse_pairs(texts: tuple[str, ...]) -> tuple[Pair, ...]:
    """Return the named pairs, or the default ones; raises ConfigError for invalid pairs and duplicate names."""
    pairs = tuple(_parse(text) for text in texts)
    names = [pair.name for pair in pairs]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ConfigError(f"two pairs are called {twice[0]!r}; give each a name of its own")
    return pairs or DEFAULT_PAIRS


def _parse(text: str) -> Pair:
    name, _, models = text.partition("=")
    target, _, draft = models.partition(",")
    if not (name and target and draft):
        raise ConfigError(
            f"pair {text!r} is not valid; expected NAME=TARGET,DRAFT, such as tiny=tiny,tiny or weak=tiny,weak"
        )
    _noise(draft)
    return Pair(name, target, draft)


def _noise(draft: str) -> float | None:
    """Return the noise of `weak:NOISE`; None without a number."""
    kind, colon, noise = draft.partition(":")
    if kind != "weak" or not colon:
        return None
    try:
        value = float(noise)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigError(f"draft {draft!r} has no noise after the colon; give a number from 0, as in weak:0.15")
    return value


@contextmanager
def draft_model(draft: str, made_of: str = MADE_OF) -> Iterator[str]:
    """Yield what the draft workers load: the model itself, or a temporary directory with a made one."""
    kind = draft.partition(":")[0]
    if kind not in ("random", "weak"):
        yield draft
        return
    from bench.drafts import WEAK_NOISE, make_random_draft, make_weak_draft

    with TemporaryDirectory(prefix=f"specq-{kind}-draft-") as folder:
        if kind == "random":
            make_random_draft(made_of, Path(folder))
        else:
            noise = _noise(draft)
            make_weak_draft(made_of, Path(folder), WEAK_NOISE if noise is None else noise)
        yield folder
