"""What grammars add to the host's work of a step that overlaps with a device, as on a GPU. No GPU is needed.

    python -m bench.grammars.host_steps --sessions 32 --sessions 128 --out host_steps.json

The device is a stub with the real vocabulary: a step of it ends `--device-ms` after its launch, and its tokens are
drawn from what the masks allow. A step is launched before the one in front of it is collected. Sessions decode plainly,
all with a grammar or all without, in turns. All the rest is what a verifier's process runs, but for the sockets.

`host` is the processor time of the verifier's thread in a step, without the stub's. `wall` is the wall time of a step
less what the device takes anyway: waits for masks and for Python's lock are in it. `late`: the wait for masks.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import click
import numpy as np

from bench.grammars.step_cost import PROMPT, endless, opening, wait_for_grammars
from specq.engines import Launched
from specq.grammar import GrammarBuilder
from specq.models import resolve_model
from specq.protocol import (
    NO_TAP,
    Int32Array,
    ModelInfo,
    SamplingParams,
    SessionStep,
    StepOutput,
    Tap,
    encode,
)
from specq.runtime.machine import describe
from specq.text import load_tokenizer_files
from specq.transport import calm_collector
from specq.verification import Judgements, StepBatch
from specq.verifier import StepCurve, Verifier

MOST_TOKENS = 1_900
WARM_UP = 12
ROOM = 1 << 22
EOS = 0


@dataclass(eq=False)
class StubStep:
    """A launched step; fulfils `specq.engines.Launched`."""

    device: StubDevice
    batch: StepBatch
    ready_at: float

    feeds = True

    def judge(self) -> None:
        """See `specq.engines.OverlappingEngine`."""
        if self.batch.masks is not None and self.batch.fed_by is not None:
            began = time.perf_counter()
            self.batch.masks.of(self.batch.judged())
            self.device.late_s += time.perf_counter() - began

    def collect(self) -> StepOutput:
        """Wait for the device."""
        return self.device.collect(self)

    def discard(self) -> None:
        """See `specq.engines.Launched`."""
        raise NotImplementedError


class StubDevice:
    """An engine without a model. It counts the seconds that it takes itself."""

    max_chain = num_tap_layers = 0
    is_helped = takes_scratch = takes_unread = False
    overlaps = takes_masks = judges_late = True
    jumps: tuple[int, ...] = ()

    def __init__(self, vocab_size: int, step_s: float) -> None:
        self.info = ModelInfo("stub", "stub", "none", "stub", vocab_size, vocab_size, (EOS,), MOST_TOKENS * 2, "", ROOM)
        self.free_slots = ROOM
        self._step_s, self._random = step_s, np.random.default_rng(0)
        self.wall_s = self.host_s = self.late_s = 0.0

    def open(self, session_id: int, token_ids: Int32Array, owner: str = "") -> int:
        """See `Engine.open`."""
        return 0

    def close(self, session_id: int) -> None:
        """See `Engine.close`."""

    def step(self, steps: Sequence[SessionStep], tap: Tap = NO_TAP) -> StepOutput:
        """See `Engine.step`."""
        return self.launch(steps, tap).collect()

    def launch(self, steps: Sequence[SessionStep], tap: Tap = NO_TAP, after: Launched | None = None) -> StubStep:
        """See `OverlappingEngine.launch`."""
        begins = time.perf_counter() if not isinstance(after, StubStep) else max(time.perf_counter(), after.ready_at)
        return StubStep(self, StepBatch.of(steps), begins + self._step_s)

    def collect(self, step: StubStep) -> StepOutput:
        """Wait until a step has ended, and draw a token for each judged session."""
        began, used = time.perf_counter(), time.thread_time()
        judged = step.batch.judged()
        token_ids = self._random.integers(3, self.info.vocab_size, len(judged)).astype(np.int32)
        if judged.masks is not None:
            for place, words in judged.masks.of(judged).each():
                bits = np.unpackbits(words[0].view(np.uint8), bitorder="little")
                token_ids[place] = self._random.choice(bits.nonzero()[0])
        time.sleep(max(step.ready_at - time.perf_counter(), 0.0))
        self.wall_s += time.perf_counter() - began
        self.host_s += time.thread_time() - used
        return StepOutput(Judgements.of_tokens(judged.session_ids, token_ids))

    def step_times(self, sizes: Sequence[int]) -> list[float]:
        """See `Engine.step_times`."""
        return [self._step_s for _ in sizes]

    def shutdown(self) -> None:
        """See `Engine.shutdown`."""


class StubService:
    """A verifier on a stub, with sessions that decode plainly."""

    def __init__(self, files: dict[str, str], vocab_size: int, step_s: float, num_sessions: int, *, has: bool) -> None:
        self.device = StubDevice(vocab_size, step_s)
        self.builder = GrammarBuilder(files, vocab_size, (EOS,))
        self.verifier = Verifier(
            self.device, StepCurve([1, 64], [step_s, step_s]), incarnation=1, tokenizer_files=files,
            grammar_builder=self.builder, max_uncommitted=2 * MOST_TOKENS, max_sessions=num_sessions,
            max_step_rows=max(num_sessions * len(PROMPT), 512), measures_drafts=False,
        )  # fmt: skip
        ids = count(1)
        for number in range(num_sessions):
            params = SamplingParams(
                max_tokens=MOST_TOKENS, seed=number, ignore_eos=True, grammar=endless(number) if has else ""
            )
            assert not self.verifier.handle(opening(next(ids), PROMPT, params), 0.0)
        wait_for_grammars(self.verifier)

    def step(self) -> tuple[float, float, float]:
        """Run a step; return its seconds on the host, in wall time, and those of `late`."""
        device = self.device
        device.wall_s = device.host_s = device.late_s = 0.0
        began, used = time.perf_counter(), time.thread_time()
        self.verifier.begin(time.monotonic(), time.monotonic)
        for message in self.verifier.step(time.monotonic).packed():
            assert not getattr(message, "reason", ""), message
            encode(message)
        host_s, wall_s = time.thread_time() - used, time.perf_counter() - began
        return host_s - device.host_s, wall_s - device.wall_s, device.late_s

    def close(self) -> None:
        """End the threads of the builder."""
        self.builder.close()


def measure(sides: Sequence[StubService], num_sessions: int, num_steps: int) -> dict[str, Any]:
    """Return the figures of one number of sessions, in milliseconds."""
    calm_collector()  # as in a verifier's process
    found: list[list[tuple[float, float, float]]] = [[], []]
    for turn in range(num_steps + WARM_UP):
        for which in (0, 1) if turn % 2 else (1, 0):
            found[which].append(sides[which].step())
    report: dict[str, Any] = {"sessions": num_sessions, "steps": num_steps}
    for name, own in zip(("free", "grammar"), found, strict=True):
        for column, what in enumerate(("host", "wall", "late")):
            values = 1e3 * np.array(own[WARM_UP:])[:, column]
            report[f"{name}_{what}_ms"] = [round(float(one), 3) for one in np.quantile(values, (0.5, 0.9, 0.99))]
    del report["free_late_ms"]
    return report


@click.command()
@click.option("--model", default="smollm2", show_default=True, help="Whose tokenizer is used.")
@click.option("--sessions", multiple=True, type=int, default=(32, 128), show_default=True, help="Numbers of sessions.")
@click.option("--steps", default=200, show_default=True, help="Steps of each side.")
@click.option("--device-ms", default=6.0, show_default=True, help="Time of a step on the device.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="File for the report, JSON.")
def main(model: str, sessions: tuple[int, ...], steps: int, device_ms: float, out: Path | None) -> None:
    """Measure, and print a line for each number of sessions: median, 90% and 99%."""
    files = load_tokenizer_files(resolve_model(model, "target"))
    vocab_size = 49_152 if model == "smollm2" else len(json.loads(files["tokenizer.json"])["model"]["vocab"])
    rows = []
    for number in sessions:
        sides = [StubService(files, vocab_size, device_ms / 1e3, number, has=has) for has in (False, True)]
        rows.append(measure(sides, number, steps))
        for side in sides:
            side.close()
        click.echo(json.dumps(rows[-1]))
    if out is not None:
        report = {"model": model, "load": os.getloadavg(), "device_ms": device_ms, "steps": rows}
        out.write_text(json.dumps(describe() | report) + "\n", "utf-8")


if __name__ == "__main__":
    main()
