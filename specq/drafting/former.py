"""Support for drafters that packages wrote for the previous version.

Those drafters are not derived from a base class. The next version removes this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

from specq.drafting.interface import Children, Drafter, Expansion
from specq.protocol import ConfigError, Float32Array, Int32Array, ModelInfo, SamplingParams


def as_drafter(made: Any) -> Drafter:
    """Return a `Drafter` unchanged, or wrap an object that has its methods; ConfigError if a method is missing."""
    if isinstance(made, Drafter):
        return made
    if not isinstance(getattr(made, "info", None), ModelInfo):
        raise ConfigError(
            f"{type(made).__name__} is not a drafter: its `info` must be a specq.protocol.ModelInfo; derive it from "
            "specq.drafting.Drafter"
        )
    missing = [method for method in ("open", "close", "commit", "expand") if not callable(getattr(made, method, None))]
    if missing:
        raise ConfigError(
            f"{type(made).__name__} is not a drafter: it has no `{missing[0]}`; derive it from specq.drafting.Drafter"
        )
    return FormerDrafter(made)


class FormerDrafter(Drafter):
    """Drafts with the methods of a proposer. Only four methods are required."""

    def __init__(self, proposer: Any) -> None:
        self.proposer, self.info = proposer, proposer.info
        self._takes_owner = _takes_owner(proposer.open)
        if hasattr(proposer, "activations"):
            self.activations, self.width = proposer.activations, proposer.width

    @property
    def maker(self) -> Any:
        """See `Drafter`."""
        return getattr(self.proposer, "maker", None)

    @maker.setter
    def maker(self, maker: Any) -> None:
        self.proposer.maker = maker

    @property
    def has_chains(self) -> bool:
        """See `Drafter`."""
        return bool(getattr(self.proposer, "has_chains", False))

    def open(self, session_id: int, token_ids: Int32Array, params: SamplingParams, owner: str = "") -> None:
        """See `Drafter`."""
        self.proposer.open(session_id, token_ids, params, *((owner,) if self._takes_owner else ()))

    def close(self, session_id: int) -> None:
        """See `Drafter`."""
        self.proposer.close(session_id)

    def commit(self, session_id: int, token_ids: Int32Array, path: Sequence[int]) -> None:
        """See `Drafter`."""
        self.proposer.commit(session_id, token_ids, path)

    def rewind(self, session_id: int, length: int) -> bool:
        """See `Drafter`."""
        has_rewind = hasattr(self.proposer, "rewind")
        if has_rewind:
            self.proposer.rewind(session_id, length)
        return has_rewind

    def expand(self, requests: Sequence[Expansion]) -> list[Children]:
        """See `Drafter`."""
        found: list[Children] = self.proposer.expand(requests)
        return found

    def expand_chain(self, requests: Sequence[Expansion], depth: int) -> list[list[Children]]:
        """See `Drafter`."""
        if depth == 1 or not self.has_chains:
            return super().expand_chain(requests, depth)
        found: list[list[Children]] = self.proposer.expand_chain(requests, depth)
        return found

    def observe(self, session_id: int, first: int, states: Float32Array) -> None:
        """See `Drafter`."""
        self.proposer.observe(session_id, first, states)

    def knows(self, session_id: int) -> bool:
        """See `Drafter`."""
        return not self.activations.layers or bool(self.proposer.knows(session_id))


def _takes_owner(open_session: Callable[..., None]) -> bool:
    """Return whether `open` accepts the owner of a text; the first proposers did not."""
    try:
        signature(open_session).bind(0, (), SamplingParams(), "")
    except TypeError:
        return False
    return True
