"""Rounds of a colocated drafter, without sockets: a verifier in this process whose sessions are drafted for before each step.

Everything runs that a verifier's process does but its sockets. Where the device's time goes is read from its own events: `draft` from the
first copy of integers to the last token of the chains, `verify` from there likewise to the choice of the tokens, and between them `to verify`
and `to draft`, in which the device waits for the host. Chains are read before they are verified, or afterwards wherever that is possible, whatever a
node costs; `node price` is the least acceptance probability that paid in the last step, by which the verifier chooses.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch

from bench.gpu.overlap import ROUNDS, serve
from bench.gpu.parts import Found, Task
from bench.gpu.timing import event
from bench.report import Figure, figure, tell
from specq.drafting.draft_model.chain_model import ChainModel
from specq.drafting.draft_model.making import level_times
from specq.drafting.draft_model.source import ColocatedDrafter
from specq.protocol import Open, SamplingParams, Speculation
from specq.samples import codec_of, load_prompts
from specq.verifier import StepCurve, Verifier, profiled_rows, step_curves

WARM_UP, STEPS = 8, 30
DEPTH, FAN_OUT = 8, 3
UNLIMITED, MOST_ROWS = 1 << 30, 512
WAYS = {"read": False, "unread": True}


class TimedChains(ChainModel):
    """A source of chains; on a GPU it notes when each round's work began and ended there."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.spans: list[tuple[Any, Any]] = []
        self._started: Any = None

    def start(self, session_ids: Sequence[int], depth: int, width: int) -> None:
        """Begin to draft chains; see `ChainSource`."""
        self._started = None
        inboxes = list(getattr(self.contexts._forward, "_inboxes", ())) if torch.cuda.is_available() else []
        for inbox in inboxes:
            inbox.copy = self._begins(inbox.copy)
        super().start(session_ids, depth, width)
        for inbox in inboxes:
            del inbox.copy
        if self._started is not None:
            end = event()
            end.record()
            self.spans.append((self._started, end))

    def _begins(self, copy: Callable[..., None]) -> Callable[..., None]:
        def timed(*given: Any) -> None:
            if self._started is None:
                self._started = event()
                self._started.record()
            copy(*given)

        return timed


def measure(task: Task) -> Found:
    """Measure greedy, synchronous sessions; a figure has a value a round."""
    chains = TimedChains(task.pair.draft.loaded)
    sizes = sorted({1, 2, 4, 8, 16, 32, 64} & {*range(max(task.sessions) + 1)})
    levels = level_times(chains, sizes, DEPTH, {1, FAN_OUT})
    curve = step_curves(task.pair.engine, profiled_rows(task.pair.engine.jumps, MOST_ROWS))
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    for count in task.sessions:
        for _, (way, is_unread) in product(range(ROUNDS), WAYS.items()):
            steps = StepCurve(sizes, levels)
            drafter = ColocatedDrafter(chains, steps, fan_out=FAN_OUT, chain=DEPTH, is_unread=is_unread)
            for (name, unit), value in _serve(task, drafter, curve[-1], count).items():
                values[f"S={count} {way}, {name}", unit].append(value)
        tell(", ".join(f"{name} {np.median(each):.4g}" for (name, _), each in values.items() if f"S={count} " in name))
    figures: dict[str, Figure] = {name: figure(unit, each) for (name, unit), each in values.items()}
    return Found(figures)


def _serve(task: Task, drafter: ColocatedDrafter, curve: StepCurve, count: int) -> dict[tuple[str, str], float]:
    """Return what so many sessions gave, by name and unit."""
    chains: Any = drafter.chains
    engine: Any = task.pair.engine
    verifier = Verifier(
        engine, curve, [drafter], incarnation=1, max_sessions=count, max_uncommitted=UNLIMITED, measures_drafts=False
    )
    prompts = load_prompts(("gsm8k", "humaneval"), count, codec_of("tiny"))
    openings = [_opening(i, prompts[i % len(prompts)].token_ids, engine.info.num_tokens) for i in range(count)]
    # The chains of the first step that counts have begun by then.
    served = serve(verifier, openings, WARM_UP, STEPS, warmed=lambda: chains.spans.__delitem__(slice(-1)))
    price = verifier.min_accept_prob
    verifier.begin(time.monotonic())  # lets the drafter forget them
    found = {
        ("round", "ms"): 1e3 * served.seconds / STEPS,
        ("tokens/s", "tokens/s"): served.num_tokens / served.seconds,
        ("tokens a round", "tokens"): served.num_tokens / STEPS / count,
        ("node price", "probability"): price,
    }
    return found | _of_device(chains.spans[:STEPS], served.spans)


def _of_device(drafted: Sequence[tuple[Any, Any]], verified: Sequence[tuple[Any, Any]]) -> dict[tuple[str, str], float]:
    """Return the milliseconds of a round's parts on the device, where each step had a draft; medians."""
    if not verified or len(drafted) != len(verified):
        return {}
    parts = {
        "draft": [start.elapsed_time(end) for start, end in drafted],
        "to verify": [own[1].elapsed_time(next_[0]) for own, next_ in zip(drafted, verified, strict=True)],
        "verify": [start.elapsed_time(end) for start, end in verified],
        "to draft": [own[1].elapsed_time(next_[0]) for own, next_ in zip(verified, drafted[1:], strict=False)],
    }
    return {(name, "ms"): float(np.median(times)) for name, times in parts.items()}


def _opening(session_id: int, token_ids: Sequence[int], vocab: int) -> Open:
    return Open(
        session_id=session_id,
        epoch=1,
        prompt_len=len(token_ids),
        tokens_left=(WARM_UP + STEPS + 4) * (DEPTH + 1),
        params=SamplingParams(ignore_eos=True),
        speculation=Speculation(mode="sync"),
        token_ids=np.minimum(np.array(token_ids, np.int32), vocab - 1),
    )
