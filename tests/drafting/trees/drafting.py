"""Sources that count what they draft."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specq.drafting.trees.source import TreeSource
from specq.engines.torch.engine import TorchEngine


def counting(make: Callable[[TorchEngine], TreeSource], drafted: dict[str, int]) -> Callable[[TorchEngine], list[Any]]:
    """Return what makes a verifier's one source, which counts its nodes."""

    def made(engine: TorchEngine) -> list[Any]:
        source = make(engine)
        collect = source.collect

        def counted(*asked: Any) -> Any:
            batches = collect(*asked)
            drafted["nodes"] = drafted.get("nodes", 0) + sum(len(batch.token_ids) for batch in batches)
            return batches

        source.collect = counted  # type: ignore[method-assign]
        return [source]

    return made
