"""What the tests of the commands that train for a target that exists share: places for a run, runs, and refusals."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner, Result
from torch.utils._python_dispatch import TorchDispatchMode

from specq.cli import main
from specq.engines.checkpoint import describe
from specq.models import resolve_model
from specq.protocol import ModelInfo
from specq.training import draft, runs
from specq.training.rollouts import save_rollouts

TARGET = Path(resolve_model("tiny", "target"))
# Of runs that make heads or a parallel draft model in some seconds.
SMALL = [
    *("--device=cpu", "--rollout-rows=3", "--rollout-tokens=12", "--rollout-seconds=60", "--batch-tokens=128"),
    *("--bench-prompts=2", "--bench-tokens=8", "--seconds=1.5"),
]
Places = dict[str, Path]
Run = Callable[..., Result]
NAMES = ("corpus", "bench", "work", "out")
STEP_S = 0.5


def write_corpus(folder: Path) -> Path:
    """Write a corpus of a few lines; return where."""
    folder.mkdir()
    records = {
        "math": [{"prompt": f"Ann has {n} figs and buys 2. How many?", "response": "2"} for n in range(4)],
        "chat": [{"text": "User: Is 4 even?\nAssistant: I will look it up."}],
        "prose": [{"text": f"Chapter {n}. It was a dark and stormy night in the town of figs. " * 9} for n in range(2)],
    }
    for name, own in records.items():
        with gzip.open(folder / f"{name}.jsonl.gz", "wt", encoding="utf-8") as lines:
            lines.writelines(json.dumps({**record, "source": "test"}) + "\n" for record in own)
    return folder


def make_places(base: Path) -> Places:
    """Return where a run finds a corpus and a benchmark of a few lines, works, and writes."""
    write_corpus(base / "corpus")
    return places_with_bench(base)


def places_with_bench(base: Path) -> Places:
    """Return those of a run for which only a benchmark is there."""
    (base / "bench").mkdir()
    (base / "bench" / "figs.jsonl").write_text('{"id": "0", "prompt": "How many figs?"}\n' * 3, encoding="utf-8")
    return empty_places(base)


def empty_places(base: Path) -> Places:
    """Return those of a run for which nothing is there yet."""
    return {name: base / name for name in NAMES}


def clock(step_s: float) -> SimpleNamespace:
    """A clock by which each step of a training takes so long."""
    seconds = itertools.count(0.0, step_s)
    return SimpleNamespace(monotonic=lambda: next(seconds))


def runner(method: str, options: Sequence[str]) -> Run:
    """Return what runs `specq train METHOD` for the bundled target in some places, with further arguments.

    A step of a training takes STEP_S, or `step_s`, by its clock: how many steps are made does not depend on the
    machine, nor do they take longer than they need. By the real clock if `step_s` is 0.
    """

    def run(places: Places, *arguments: str, step_s: float = STEP_S) -> Result:
        named = [f"--{name}={place}" for name, place in places.items()]
        with pytest.MonkeyPatch.context() as patched:
            for module in (runs, draft) if step_s else ():
                patched.setattr(module, "time", clock(step_s))
            return CliRunner().invoke(main, ["train", method, "--target=tiny", *named, *options, *arguments])

    return run


def refusal(result: Result) -> str:
    """Return why a run was refused, which must be said in one line."""
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    return result.stderr


class Waits(TorchDispatchMode):
    """Collects the operations for which a host would wait for a device, as long as it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.found = list[str]()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        is_mask = operation.overloadpacket.__name__ in ("index", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if is_mask or operation.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "masked_select"):
            self.found.append(str(operation))
        return operation(*args, **(kwargs or {}))


# Rollouts from which nothing can be learned, and why; who: what needs an answer of so many tokens at `least`.
USELESS = [
    ([([5, 6], [])], "contain no answers to train on"),
    ([([5, 6], [7, 8])], "the longest answer among the rollouts has 2 tokens; {who} need {least}"),
    ([([5, 6], [7, 8, 5000])], "the rollouts have token 5000, but .* 4096 tokens; they are for another target"),
]


def run_on(run: Run, folder: Path, pairs: Sequence[tuple[list[int], list[int]]], *arguments: str) -> Result:
    """Run with rollouts of these prompts and answers, and nothing else."""
    save_rollouts(folder / "a.npz", pairs)
    return run({name: folder / name for name in ("work", "out")}, f"--rollouts={folder / 'a.npz'}", *arguments)


def learn(run: Run, folder: Path, *arguments: str, step_s: float = STEP_S) -> str:
    """Let a run learn of one rollout that repeats itself; return what it said."""
    save_rollouts(folder / "a.npz", [([5, 6, 7], [40, 41, 42, 43] * 20)] * 4)
    places = {name: folder / name for name in ("work", "out")}
    result = run(places, f"--rollouts={folder / 'a.npz'}", *arguments, step_s=step_s)
    assert result.exit_code == 0, result.output
    return result.output


def losses(output: str, what: str) -> list[float]:
    """Return the last losses that were shown, one for each step, head or place."""
    shown = [line.split(f"loss by {what}")[1].split(",")[0] for line in output.splitlines() if f"by {what}" in line]
    return [float(loss) for loss in shown[-1].split()]


def tiny_info() -> ModelInfo:
    """What is said of the bundled target."""
    about = {"engine": "torch", "name": "tiny", "dtype": "float32"}
    return describe(TARGET, **about, vocab_size=4096, max_length=2048, kv_slots=64)


def check_it_goes_on(run: Run, places: Places, stage: str, other: str) -> None:
    """A run that was cut off goes on with the same command, until its time is over; with other settings it begins anew.

    A broken file of it is named.
    """
    assert "continuing after step" in run(places, stage).output
    longer = run(places, "--seconds=2.5", stage)
    assert "step " in longer.output.split("continuing after step")[1]
    assert "continuing after" not in run(places, other, stage).output
    state = places["work"] / "training.pt"
    state.write_bytes(state.read_bytes()[:1000])
    assert "training.pt cannot be read; delete it to start over" in refusal(run(places, stage))
    state.unlink()
