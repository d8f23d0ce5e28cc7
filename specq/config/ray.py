"""The section of `specq ray`: what a cluster has beyond `specq up`."""

from __future__ import annotations

from dataclasses import dataclass

from specq.config.options import Section, option


@dataclass(frozen=True, slots=True)
class RayConfig(Section):
    """The processes that `specq ray up` places on a Ray cluster, besides those of section `up`."""

    brokers: int = option(1, "Number of brokers, each on a node of its own if possible.", low=1, high=64)
    max_targets: int = option(
        0, "Start up to this many verifiers while jobs wait. 0: always the number in section `up`.", high=256
    )
    max_drafters: int = option(
        0, "Start up to this many draft workers while each one adds tokens. 0: the number in section `up`.", high=1024
    )
    draft_gpus: float = option(0.0, "GPUs of a draft worker; a fraction shares a GPU. 0: draft on CPUs.", high=64)
