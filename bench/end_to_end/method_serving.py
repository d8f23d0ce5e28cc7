"""Ways to draft in the verifier's process, each on a verifier of its own: methods of `bench.methods` without workers.

Their weights are beside the target, as `specq models inflate` writes them. Plain decoding is measured on each verifier,
too.

Rule: a method's drafts are always used (unless `drafts` changes this) and no other source drafts. No text is drafted
from an earlier text of the same prompt.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.deployments import PLAIN
from bench.end_to_end.serving import BRISK_MS, READY_S, Completer, run, until_one_fails, verifier_config
from bench.end_to_end.streams import ListeningClient, StreamLoad
from bench.end_to_end.workload import Workload
from bench.methods import EVERYTHING, KINDS, DraftFiles, choose, config_of
from bench.step_split import StepSplit
from specq.config import Config
from specq.processes.servers import Servers
from specq.protocol import BLOCK, EAGLE, MEDUSA

METHODS = tuple(kind for kind in KINDS if kind not in (PLAIN, EVERYTHING) and not kind.endswith("-worker"))
DRAFTS = ("always", "measured")


def measure(kind: str, work: Workload, drafts: str = "always") -> dict[str, Any]:
    """Return {"drafts" and "plain": {load: figures}} of a method. Raises ConfigError if its weights are missing."""
    config = method_config(kind, work, drafts)
    with Servers(config) as servers, ListeningClient(servers.address) as client:
        servers.wait_ready(READY_S)
        split = StepSplit(servers.client, config.broker.heartbeat_ms)

        def completer(load: StreamLoad, name: str, mode: str) -> Completer:
            return Completer(client, load, work, mode, name=f"{kind} {name}", wave=len(work.prompts))

        return until_one_fails(
            (name, load.key, partial(run, completer(load, name, mode), split, work, load, number))
            for number, (name, mode) in enumerate((("drafts", "async"), (PLAIN, PLAIN)))
            for load in work.loads
        )


def method_config(kind: str, work: Workload, drafts: str = "always") -> Config:
    """Return the configuration of a broker and a verifier that drafts with this method."""
    method = next(one for one in choose(_files(Path(work.pair)), [kind]) if one.kind == kind)
    config = verifier_config(work, "")
    lookup = config_of(method, config.target.model).target.prompt_lookup
    target = replace(config.target, **{"prompt_lookup": lookup, **method.target, "drafts": drafts})
    return replace(config, target=target, broker=replace(config.broker, heartbeat_ms=BRISK_MS))


def _files(pair: Path) -> DraftFiles:
    draft, parallel, *heads = (
        str(pair / name) if (pair / name / "config.json").is_file() else ""
        for name in ("draft", "parallel", MEDUSA, EAGLE, BLOCK)
    )
    return DraftFiles(draft, parallel, tuple(filter(None, heads)))
