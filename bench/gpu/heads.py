"""Heads that read the target's hidden states, by themselves: an EAGLE-3 head and four Medusa heads of the target's width, with random weights.

Each round a session goes on with NEW tokens, as if some drafts had been accepted. `host` is the time until all is launched, `device` that between the
events before and after it, `whole` until the nodes are on the host. On a CPU there is `whole` alone. Before that, what it takes to record the
passes: `warm-up`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

from bench.gpu.models import check_device
from bench.gpu.parts import Found, Task
from bench.gpu.timing import event
from bench.report import figure, tell
from specq.drafting.eagle3 import form as eagle_form
from specq.drafting.eagle3.drafter import Eagle
from specq.drafting.eagle3.interface import TreeRequest
from specq.drafting.eagle3.loading import EagleHead
from specq.drafting.eagle3.network import EagleNetwork
from specq.drafting.eagle3.source import usual_sizes
from specq.drafting.medusa.drafter import Medusa
from specq.drafting.medusa.interface import HiddenRow
from specq.drafting.medusa.network import MedusaHeads
from specq.models import Shape
from specq.protocol import Int32Array, SamplingParams
from specq.verifier.sources import Followed

CONTEXT, NEW = 300, 4
DEPTH = 8
DRAFT_VOCAB, NUM_HEADS, COUNT = 32_000, 4, 10
WARM_UP, ROUNDS, MOST_S = 3, 10, 5.0
PARAMS = {"T=0": SamplingParams(), "T=0.8": SamplingParams(temperature=0.8, seed=1)}

Times = dict[str, list[float]]  # milliseconds, by name


def measure(task: Task) -> Found:
    """Measure a round of each head by sessions."""
    check_device(task.pair.device)
    times: Times = defaultdict(list)
    with torch.no_grad():
        for measured in (_measure_eagle, _measure_medusa):
            measured(times, task)
    return Found({name: figure("ms", values) for name, values in times.items()})


def _measure_eagle(times: Times, task: Task) -> None:
    shape = task.pair.shapes["target"]
    eagle = Eagle(random_eagle(shape, torch.device(task.pair.device), task.pair.dtype))
    most = max(task.sessions)
    _time(times, "eagle3 warm-up", partial(eagle.warm_up, most, (), usual_sizes(DEPTH)))
    for count in task.sessions:
        _eagle_rounds(times, eagle, count, shape.hidden)


def _measure_medusa(times: Times, task: Task) -> None:
    shape, device, dtype = task.pair.shapes["target"], torch.device(task.pair.device), task.pair.dtype
    medusa = Medusa(_medusa(shape, device, dtype), shape.vocab)
    _time(times, "medusa warm-up", partial(medusa.warm_up, max(task.sessions)))
    for count in task.sessions:
        _medusa_rounds(times, medusa, count, torch.randn(count, shape.hidden, device=device).to(dtype))


def _time(times: Times, name: str, work: Callable[[], object]) -> None:
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    times[name].append(1e3 * (time.perf_counter() - started))
    tell(f"{name}: {times[name][-1]:.0f} ms")


def _timed(times: Times, name: str, begin: Callable[[], Sequence[Callable[[], object]]]) -> None:
    """Time what launches something and returns what waits for it."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.synchronize()
        start, end = event(), event()
        start.record()
    started = time.perf_counter()
    waits = begin()
    launched = time.perf_counter()
    if on_gpu:
        end.record()
    for wait in waits:
        wait()
    if on_gpu:
        end.synchronize()
        times[f"{name}, host"].append(1e3 * (launched - started))
        times[f"{name}, device"].append(start.elapsed_time(end))
    times[f"{name}, whole"].append(1e3 * (time.perf_counter() - started))


def _eagle_rounds(times: Times, eagle: Eagle, count: int, hidden: int) -> None:
    """Time rounds of so many sessions: the rows that are new, and trees."""
    weight = eagle.network.fc.weight
    rng = np.random.default_rng(count)
    sessions = list(range(count))

    def go_on(first: int, num_tokens: int) -> None:
        taps = torch.randn(count * num_tokens, eagle_form.NUM_TAPS * hidden, device=weight.device, dtype=weight.dtype)
        token_ids = rng.integers(0, eagle.network.num_tokens, (count, num_tokens)).tolist()
        rows = [range(i * num_tokens, (i + 1) * num_tokens) for i in sessions]
        observed = [Followed(i, first, token_ids[i], rows[i]) for i in sessions]
        eagle.observe(taps, observed)

    def follow() -> Sequence[Callable[[], object]]:
        eagle.follow(sessions)
        return ()

    go_on(1, CONTEXT)
    _time(times, f"S={count} eagle3 prompts of {CONTEXT}", follow)
    kept: Times = defaultdict(list)
    began = time.perf_counter()
    for i in range(WARM_UP + ROUNDS):
        go_on(1 + CONTEXT + NEW * i, NEW)
        _timed(kept, "rows", follow)
        for sizes, (said, params) in product(usual_sizes(DEPTH)(count), PARAMS.items()):
            tree = TreeRequest(sessions, [params] * count, len(sizes), None, -np.inf, sizes)
            _timed(kept, f"tree of {sum(sizes)} {said}", partial(eagle.start, [tree]))
        if time.perf_counter() - began > MOST_S:
            break
    _keep(times, kept, f"S={count} eagle3")
    for session_id in sessions:
        eagle.close(session_id)


def _medusa_rounds(times: Times, medusa: Medusa, count: int, states: torch.Tensor) -> None:
    kept: Times = defaultdict(list)
    began = time.perf_counter()
    for i in range(WARM_UP + ROUNDS):
        rows = [HiddenRow(states, place) for place in range(count)]
        for said, params in PARAMS.items():
            _timed(kept, said, partial(_rank, medusa, rows, [params] * count, [CONTEXT + i] * count))
        if time.perf_counter() - began > MOST_S:
            break
    _keep(times, kept, f"S={count} medusa")


def _rank(
    medusa: Medusa, rows: Sequence[HiddenRow], params: Sequence[SamplingParams], lengths: Sequence[int]
) -> Sequence[Callable[[], object]]:
    return (medusa.start(rows, params, lengths, COUNT),)


def _keep(times: Times, kept: Times, name: str) -> None:
    """Keep what was timed but for the first rounds, where there are more."""
    for what, values in kept.items():
        times[f"{name} {what}"] = values[WARM_UP:] or values[-1:]
    tell(", ".join(f"{name} {what} {np.median(values):.3f}" for what, values in kept.items()))


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


def _medusa(shape: Shape, device: torch.device, dtype: torch.dtype) -> MedusaHeads:
    """Return heads with random weights that share one output matrix over all tokens."""

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=device, dtype=dtype).mul_(1 / shape.hidden**0.5)

    blocks = [(random(NUM_HEADS, shape.hidden, shape.hidden), random(NUM_HEADS, 1, shape.hidden))]
    return MedusaHeads(blocks, random(shape.vocab, shape.hidden), None)
