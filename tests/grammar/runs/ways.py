"""The ways to serve a job with a grammar, and what a job came to.

Each deployment serves its ways and plain decoding, over real sockets. `overlap` has no processes: the model's steps are
collected late in this process, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.deployments import deployment
from specq.client import Client, Result
from specq.protocol import SpecqError

Arguments = dict[str, Any]
PATIENCE_S = 300.0
LIVENESS_MS = 60_000  # other programs may load the machine
ALONE = {"prompt_lookup": "none"}
ALWAYS = {"drafts": "always", **ALONE}
STATIC_TREE = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))


@dataclass(frozen=True)
class Place:
    """A deployment: its drafters and the options of its verifier. `heads`: made for the model, or bundled with it."""

    drafters: int = 0
    target: Mapping[str, Any] = field(default_factory=dict)
    is_colocated: bool = False
    heads: str = ""
    models: tuple[str, ...] = ("tiny", "smollm2")


PLACES = {
    "alone": Place(target=ALWAYS),
    "colocated": Place(target=ALWAYS, is_colocated=True),
    "workers": Place(2, ALWAYS),
    "suffix": Place(target={"drafts": "always", "shared_tokens": 100_000}),
    "lookahead": Place(target={"lookahead": True, **ALWAYS}),
    "eagle": Place(target=ALWAYS, heads="eagle", models=("tiny",)),
    "block": Place(target=ALWAYS, heads="block", models=("tiny",)),
    "medusa": Place(target=ALWAYS, heads="smollm2", models=("smollm2",)),
    "vllm": Place(1, {"engine": "vllm", "dtype": "float32", "drafts": "always", "shared_tokens": 100_000}),
    "late": Place(),
    "late, drafts": Place(),
}
# Each way: its place, and the job's drafting parameters. The first row of each place decodes plainly.
WAYS: dict[str, tuple[str, Arguments]] = {
    "plain": ("alone", {"mode": "plain"}),
    "forced tokens alone": ("alone", {}),
    "chain": ("colocated", {"num_candidates": 1}),
    "tree": ("colocated", {}),
    "static tree": ("colocated", {"tree": STATIC_TREE}),
    "draft workers": ("workers", {}),
    "draft workers, sync": ("workers", {"mode": "sync"}),
    "draft workers, jit": ("workers", {"mode": "jit"}),
    "suffix": ("suffix", {}),
    "lookahead": ("lookahead", {}),
    "EAGLE-3": ("eagle", {}),
    "block drafter": ("block", {}),
    "Medusa": ("medusa", {}),
    "overlap": ("late", {"mode": "plain"}),
    "overlap, drafts": ("late, drafts", {}),
    "vllm": ("vllm", {}),
    "vllm, plain": ("vllm", {"mode": "plain"}),
}


@dataclass(frozen=True)
class WayOutcome:
    """What a job came to. `finish`: "stop", "length", or "error" with the reason."""

    finish: str
    token_ids: list[int]
    text: str
    reason: str = ""
    drafted: int = 0
    accepted: int = 0


def outcome_of(result: Result) -> WayOutcome:
    stats = result.stats
    counts = stats["draft_tokens"], stats["accepted_tokens"]
    return WayOutcome(result.finish_reason, result.token_ids, result.text, result.error or "", *counts)


def ways_of(model: str, *, has_vllm: bool) -> list[str]:
    """Return the ways that exist for a model. With vLLM, its own alone."""
    return [name for name, (place, _) in WAYS.items() if model in PLACES[place].models if (place == "vllm") == has_vllm]


def serve(client: Client, jobs: Sequence[Arguments], in_flight: int) -> list[WayOutcome]:
    """Run jobs, so many at a time."""
    waiting: list[Any] = []
    found: list[WayOutcome] = []
    for job in jobs:
        if len(waiting) >= in_flight:
            found.append(_ended(waiting.pop(0)))
        try:
            waiting.append(client.submit(**job))
        except SpecqError as error:
            waiting.append(error)
    return found + [_ended(job) for job in waiting]


def _ended(job: Any) -> WayOutcome:
    if isinstance(job, SpecqError):
        return WayOutcome("error", [], "", str(job))
    try:
        return outcome_of(job.result(PATIENCE_S))
    except (SpecqError, TimeoutError) as error:
        return WayOutcome("error", [], "", str(error))


@contextmanager
def configured(place: str, model: str) -> Iterator[Any]:
    """Yield the configuration of a place, with heads that are made for it."""
    found = PLACES[place]
    own = dict(found.target) | ({"draft_model": model} if found.is_colocated else {})
    with TemporaryDirectory() as folder:
        if found.heads:
            own["heads"] = _made_head(found.heads, model, Path(folder))
        made = deployment(model, model, found.drafters, has_journal=True, **own)
        yield replace(made, broker=replace(made.broker, liveness_ms=LIVENESS_MS))


def _made_head(heads: str, model: str, folder: Path) -> str:
    """Return the directory of a random head for a model, or heads that are bundled."""
    from specq.engines import read_info
    from specq.models import resolve_model
    from specq.testing.checkpoints_block import block_shape_of, make_block
    from specq.testing.checkpoints_eagle import eagle_shape_of, make_eagle

    info = read_info(Path(resolve_model(model, "target")))
    tokenizer = {"num_tokens": info.num_tokens, "tokenizer_hash": info.tokenizer_hash}
    if heads == "eagle":
        shape = eagle_shape_of(256, info.vocab_size, 300, **tokenizer)
        return str(make_eagle(folder / "eagle", shape, embedding=False, scale=0.05))
    if heads == "block":
        layers = block_shape_of(256, info.vocab_size, (1, 5, 8), **tokenizer)
        return str(make_block(folder / "block", layers, scale=0.05))
    return heads
