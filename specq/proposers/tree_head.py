"""What a verifier needs of a head that reads the target's hidden states and its own: trees, level by level, in arrays.

`specq.proposers.eagle` fulfils it; nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from specq.proposers.head_source import Ranked
from specq.protocol import Int32Array, IntpArray, SamplingParams


class Followed(NamedTuple):
    """Tokens of a session's text from position `first` on; before each stands one of these rows of hidden states."""

    session_id: int
    first: int
    token_ids: Sequence[int]
    rows: Sequence[int]


class Growth(Protocol):
    """Trees that grow below some contexts, as many rows at each level for all of them."""

    def ranked(self, count: int) -> Ranked:
        """Return the likeliest tokens, at most `count`, behind each row of the last level, [contexts, rows, count]: at first behind the
        contexts, one row each."""
        ...

    def expand(self, parents: IntpArray, token_ids: Int32Array) -> None:
        """Go one level down: tokens i32[contexts, rows], behind these rows i64[contexts, rows] of the last level."""
        ...


class Contexts(Protocol):
    """Contexts that are computed."""

    def grow(self, which: IntpArray) -> Growth:
        """Begin trees below some of them, by index."""
        ...


class TreeHead(Protocol):
    """A head, driven by one thread. Of a text it keeps what it was given since its first row, or since a gap.

    layers  of the target, whose hidden states it reads, beside each other as columns; see `Tap`
    """

    layers: tuple[int, ...]

    def observe(self, values: Any, followed: Sequence[Followed]) -> None:
        """Take in hidden states [n, width], wherever these are, and what the target's text goes on with. What is known is skipped."""
        ...

    def known(self, session_id: int) -> int:
        """Return up to which position a session's text is known; 0 for an unknown session."""
        ...

    def close(self, session_id: int) -> None:
        """Forget a session, known or not."""
        ...

    def start(self, session_ids: Sequence[int], params: Sequence[SamplingParams]) -> Contexts:
        """Begin to compute the contexts of sessions that are known."""
        ...
