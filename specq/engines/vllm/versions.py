"""Which vLLM was tested with specq, and in which ways.

    sessions   long-lived requests through a scheduler of our own; chains of any strategy, one forward pass a step
    prompts    public API only; a request a round, several times slower; for where `sessions` does not work

To add a version: run `make test-vllm` with it, and a line here. Those below were run on CPUs, but for 0.26.0, whose steps were
run and compared on an H200 (`specq bench steps --engine vllm`).
"""

from __future__ import annotations

import structlog

log = structlog.get_logger(__name__)

WAYS = ("sessions", "prompts")

# Version -> the ways that were tested with it.
TESTED: dict[str, tuple[str, ...]] = {
    "0.26.0": ("sessions",),
    "0.27.1": ("sessions", "prompts"),
    "0.29.0": ("sessions", "prompts"),
    "0.31.0": ("sessions", "prompts"),
    "0.32.0": ("sessions", "prompts"),
}


def base_version(version: str) -> str:
    """Return the version without what a build adds to it, as in 0.32.0+cpu."""
    return version.partition("+")[0]


def ways_to_try(version: str) -> tuple[str, ...]:
    """Return the ways in which to drive this version, best first, and say so if it was not tested."""
    tested = TESTED.get(base_version(version))
    if tested is not None:
        return tested
    log.warning("vllm_untested", version=version, tested=", ".join(TESTED), trying=WAYS[0])
    return WAYS
