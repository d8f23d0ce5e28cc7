"""Ways to draft in the verifier's process, each on a verifier of its own: those of `bench.methods` that need no draft worker.

They find what they draft with beside the target, as `specq models inflate` writes it. Plain decoding is measured on each verifier, too.

Rule: a method's drafts are always used (`drafts` says otherwise) and nothing else drafts; no text is drafted from an earlier text of the
same prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.contestants import PLAIN
from bench.end_to_end.listening import ListeningClient
from bench.end_to_end.serving import BRISK_MS, READY_S, Completer, run, until_one_fails, verifier_config
from bench.end_to_end.streams import Load
from bench.end_to_end.workload import Workload
from bench.methods import EAGLE, EVERYTHING, KINDS, MEDUSA, DraftFiles, choose, config_of
from bench.step_split import StepSplit
from specq.config import Config
from specq.processes.servers import Servers

Variant = tuple[str, str, Mapping[str, Any]]  # a name, a mode, and options of the shape
METHODS = tuple(kind for kind in KINDS if kind not in (PLAIN, EVERYTHING) and not kind.endswith("-worker"))
DRAFTS = ("always", "measured")
LEVELS = 5  # of both shapes; heads and parallel draft models that foresee fewer tokens draft as many as those
WIDTH = 3  # of the tree: the product of all (rank + 1) of a path, at most, as what follows a choice is the less likely the higher its rank
SHAPED = ("draft-colocated", "parallel-colocated", MEDUSA, EAGLE)  # those that draft in the shape that a job asks for


def measure(kind: str, work: Workload, drafts: str = "always", *, in_shapes: bool = False) -> dict[str, Any]:
    """Return {variant: {load: figures}}: `drafts` of the method, `plain`, and, where asked for, a chain and a tree of as many levels with one
    session. Raises ConfigError where what the method drafts with is not there."""
    config = method_config(kind, work, drafts)
    with Servers(config) as servers, ListeningClient(servers.address) as client:
        servers.wait_ready(READY_S)
        split = StepSplit(servers.client, config.broker.heartbeat_ms)
        return until_one_fails(
            (name, load.key, partial(run, _completer(client, load, kind, variant, work), split, work, load, number))
            for number, variant in enumerate(_variants(kind, in_shapes=in_shapes))
            for name, _, shape in [variant]
            for load in work.loads
            if load.sessions == 1 or not shape
        )


def _completer(client: ListeningClient, load: Load, kind: str, variant: Variant, work: Workload) -> Completer:
    name, mode, shape = variant
    return Completer(client, load, work, mode, name=f"{kind} {name}", shape=shape, wave=len(work.prompts))


def method_config(kind: str, work: Workload, drafts: str = "always") -> Config:
    """Return the configuration of a broker and a verifier that drafts in this way."""
    method = next(one for one in choose(_files(Path(work.pair)), [kind]) if one.kind == kind)
    config = verifier_config(work, "")
    lookup = config_of(method, config.target.model).target.prompt_lookup
    target = replace(config.target, **{"prompt_lookup": lookup, **method.target, "drafts": drafts})
    return replace(config, target=target, broker=replace(config.broker, heartbeat_ms=BRISK_MS))


def _files(pair: Path) -> DraftFiles:
    draft, parallel, *heads = (
        str(pair / name) if (pair / name / "config.json").is_file() else ""
        for name in ("draft", "parallel", MEDUSA, EAGLE)
    )
    return DraftFiles(draft, parallel, tuple(filter(None, heads)))


def _variants(kind: str, *, in_shapes: bool) -> Iterator[Variant]:
    """Yield what is measured."""
    yield "drafts", "async", {}
    if in_shapes and kind in SHAPED:
        yield "chain", "async", {"num_candidates": 1, "max_depth": LEVELS}
        yield "tree", "async", {"tree": tree_paths()}
    yield PLAIN, "plain", {}


def tree_paths(levels: int = LEVELS, width: int = WIDTH) -> list[list[int]]:
    """Return the paths of a tree to its last level, whose product of all (rank + 1) is at most `width`."""
    found: list[tuple[list[int], int]] = [([], 1)]
    for _ in range(levels):
        found = [([*path, rank], product * (rank + 1)) for path, product in found for rank in range(width // product)]
    return [path for path, _ in found]
