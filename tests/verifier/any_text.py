"""A target that says anything, and an EAGLE-3 head with random weights: for what does not depend on the texts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specq.drafting.eagle3 import form as eagle_form
from specq.drafting.eagle3.loading import EagleHead
from specq.drafting.eagle3.network import EagleNetwork
from specq.engines.native.flights import tapped_rows
from specq.models import Shape
from specq.protocol import (
    NO_TAP,
    Close,
    Int32Array,
    ModelInfo,
    Open,
    SamplingParams,
    SessionRows,
    SessionStep,
    StepOutput,
    Tap,
)
from specq.verification import Judgements, StepBatch, starts_of
from specq.verifier import StepCurve, Verifier

DRAFT_VOCAB = 32_000
DEEPEST = 4  # accepted nodes of a round: 0 to this
CURVE = StepCurve([1, 64, 512], [0.005, 0.006, 0.010])


@dataclass(eq=False)
class AnyStep:
    """A step in flight; fulfils `Launched`. It is followed by none before it is collected."""

    target: AnyText
    batch: StepBatch
    hidden: SessionRows
    feeds: bool = False

    def collect(self) -> StepOutput:
        """See `Launched`."""
        found = StepOutput(self.target.judge(self.batch.known().judged()), self.hidden)
        self.target.ended()
        return found

    def discard(self) -> None:
        """See `Launched`."""


class AnyText:
    """An engine without a model: it accepts some nodes of each tree and draws the other tokens; its hidden states are
    noise."""

    num_tap_layers, free_slots, max_chain = 8, 1_000_000, 0
    jumps: tuple[int, ...] = ()
    is_helped = takes_scratch = False
    overlaps = takes_unread = True

    def __init__(self, vocab: int, width: int, device: torch.device, dtype: torch.dtype) -> None:
        """`width`: of hidden states, of all layers that are asked for."""
        about = {"name": "any", "fingerprint": "any", "dtype": "none", "engine": "stub", "tokenizer_hash": "any"}
        sizes = {"vocab_size": vocab, "num_tokens": vocab, "max_length": 100_000, "kv_slots": 1_000_000}
        self.info = ModelInfo(**about, **sizes, eos_ids=())  # type: ignore[arg-type]
        self.launched = self.ended = _nothing
        self._noise = torch.randn(1024, width, device=device).to(dtype)
        self._rng = np.random.default_rng(0)

    def open(self, session_id: int, token_ids: Int32Array, owner: str = "") -> int:
        """See `Engine`."""
        return 0

    def close(self, session_id: int) -> None:
        """See `Engine`."""

    def step(self, steps: Sequence[SessionStep], tap: Tap = NO_TAP) -> StepOutput:
        """See `Engine`."""
        return self.launch(steps, tap).collect()

    def launch(self, steps: Sequence[SessionStep], tap: Tap = NO_TAP, after: Any = None) -> AnyStep:
        """See `OverlappingEngine`."""
        self.launched()
        batch = StepBatch.of(steps)
        rows, starts = tapped_rows(batch, tap)
        return AnyStep(self, batch, SessionRows(self._noise[: len(rows)].clone(), starts, tap.layers))

    def judge(self, batch: StepBatch) -> Judgements:
        """Accept the first nodes of each tree, down to a depth that is drawn."""
        counts, nodes, token_ids = list[int](), list[int](), list[int]()
        firsts = starts_of(batch.num_nodes).tolist()
        wanted = self._rng.integers(0, DEEPEST + 1, len(batch)).tolist()
        own = self._rng.integers(1, self.info.vocab_size, len(batch)).tolist()
        for i, (first, count) in enumerate(zip(firsts, batch.num_nodes.tolist(), strict=True)):
            path = _first_path(batch.parents[first : first + count].tolist(), wanted[i])
            counts.append(len(path) + 1)
            nodes += [*path, -1]
            token_ids += [*batch.node_tokens[first : first + count][path].tolist(), own[i]]
        tokens, of_nodes = np.array(token_ids, np.int32), np.array(nodes, np.int32)
        return Judgements(batch.session_ids, np.array(counts, np.intp), tokens, of_nodes)

    def step_times(self, sizes: Sequence[int]) -> list[float]:
        """See `Engine`."""
        return [CURVE(size) for size in sizes]

    def shutdown(self) -> None:
        """See `Engine`."""


def _nothing() -> None:
    """Discard the report."""


def _first_path(parents: Sequence[int], depth: int) -> list[int]:
    """Return the first nodes of a tree, each below the one before, down to a depth."""
    path = list[int]()
    for node, parent in enumerate(parents):
        if len(path) < depth and parent == (path[-1] if path else -1):
            path.append(node)
    return path


def open_wave(verifier: Verifier, rng: np.random.Generator, ids: Sequence[int], length: int, output_len: int) -> None:
    """Open sessions with random contexts of this length, for so many tokens."""
    for session_id in ids:
        context = rng.integers(1, verifier.engine.info.vocab_size, length).astype(np.int32)
        params = SamplingParams(max_tokens=output_len, ignore_eos=True)
        said = {"prompt_len": length, "tokens_left": output_len}
        verifier.handle(Open(session_id=session_id, epoch=1, params=params, token_ids=context, **said), 0.0)  # type: ignore[arg-type]


def steps_of(verifier: Verifier, clock: Callable[[], float] = time.perf_counter) -> Iterator[bool]:
    """Serve what is open to its end; yield of each step whether it had prompts."""
    while verifier.has_work or verifier.sessions:
        has_prompts = verifier.sessions.has_prompts
        verifier.begin(clock(), clock)
        for verdict in verifier.step(clock):
            if getattr(verdict, "finish", ""):
                verifier.handle(Close(session_id=verdict.session_id, epoch=1), 0.0)  # type: ignore[attr-defined]
        yield has_prompts


def random_eagle(shape: Shape, device: torch.device, dtype: torch.dtype) -> EagleHead:
    """Return a head with random weights."""
    num_columns = min(DRAFT_VOCAB, shape.vocab)
    sizes: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "target_hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "draft_vocab_size": num_columns,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
    }
    embedding = torch.randn(shape.vocab, shape.hidden, device=device, dtype=dtype)
    with torch.device(device):
        network = EagleNetwork(eagle_form.EagleShape(**sizes), embedding).to(dtype).eval()
    network.requires_grad_(requires_grad=False)
    network.fuse()
    tokens: Int32Array = np.sort(np.random.default_rng(1).permutation(shape.vocab)[:num_columns]).astype(np.int32)
    return EagleHead(network, (0, 1, 2), tokens)
