"""Pairs of a target and a draft model to compare on, as the user names them: NAME=TARGET,DRAFT.

A model is a bundled name or a directory. DRAFT may also be `random`, or `weak` (`weak:NOISE`): see `bench.drafts`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from specq.protocol import ConfigError

MADE_OF = "tiny"  # the draft model that the made ones are made of


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and a draft model, under the name that the figures have."""

    name: str
    target: str
    draft: str


DEFAULT_PAIRS = (Pair("tiny", "tiny", "tiny"), Pair("weak", "tiny", "weak"))


def parse_pairs(texts: tuple[str, ...]) -> tuple[Pair, ...]:
    """Return the pairs that are named, or the default ones; raises ConfigError for what is none, or a name twice."""
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
        raise ConfigError(f"pair {text!r} is no NAME=TARGET,DRAFT such as tiny=tiny,tiny or weak=tiny,weak")
    _noise(draft)
    return Pair(name, target, draft)


def _noise(draft: str) -> float | None:
    """Return the noise that `weak:NOISE` asks for; None where it names none."""
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
def draft_model(draft: str) -> Iterator[str]:
    """Yield what the draft workers shall load: the model itself, or a directory with one that is made for the while."""
    kind = draft.partition(":")[0]
    if kind not in ("random", "weak"):
        yield draft
        return
    from bench.drafts import WEAK_NOISE, make_random_draft, make_weak_draft

    with TemporaryDirectory(prefix=f"specq-{kind}-draft-") as folder:
        if kind == "random":
            make_random_draft(MADE_OF, Path(folder))
        else:
            noise = _noise(draft)
            make_weak_draft(MADE_OF, Path(folder), WEAK_NOISE if noise is None else noise)
        yield folder
