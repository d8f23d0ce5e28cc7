"""One contestant after the other on the same workload, because each fills the GPU; and the options that choose them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from bench.end_to_end import table
from bench.end_to_end.streams import CutShortError
from bench.end_to_end.workload import JOBS_EACH, Workload, check_engine
from bench.report import Report, attempt, show
from bench.suite import COUNT, option, options, repeatable
from specq.protocol import ConfigError
from specq.runtime import Number

DRAFT_SHAPE = "vocab=152064"  # the target's, because rivals need vocabularies of one size
SHAPES = ("target", "draft", "target_shape", "draft_shape")  # options of `specq models inflate`
SOURCES = ("parallel", "heads")  # likewise: inflated besides the pair

workload_options = options(
    option("--pair", click.Path(file_okay=False, path_type=Path), "pair", "Directory with target/ and draft/. "
        "Created if missing."),
    option("--target", str, "qwen2.5-7b", "Shape of the target, if the pair is created."),
    option("--draft", str, "qwen2.5-0.5b", "Shape of the draft model, likewise."),
    option("--draft-shape", str, DRAFT_SHAPE, "Changes to the draft model's shape."),
    option("--target-shape", str, "", "Changes to the target's shape."),
    option("--model", str, "tiny", "The small pair to inflate."),
    option("--parallel", str, "", "A parallel draft model for the pair, inflated too.", metavar="DIR"),
    repeatable("--heads", str, (), "Heads or a block drafter, inflated too.", metavar="DIR"),
    click.option(
        "--fresh-prompts", is_flag=True, help="Make every prompt unique, so that prefix caching has "
            "no effect."
    ),
    repeatable("--sessions", COUNT, (1, 8, 32, 64), "Number of jobs at a time."),
    repeatable("--temperature temperatures", Number(0), (0.0,), "Sampling temperature."),
    repeatable(
        "--sampled-sessions", COUNT, (), "Number of jobs at a time for every --temperature "
            "but the first.", show_default="those of --sessions"
    ),
    option("--output-len", COUNT, 128, "Tokens of each completion."),
    option(
        "--length-spread", Number(0, 0.9), 0.0,
        "Relative spread of completion lengths: 0.3 means 0.7 to 1.3 times --output-len.",
    ),
    option("--jobs-each", COUNT, JOBS_EACH, "Jobs of each session, one after the other. With more jobs, the end of "
        "a run, when fewer run, weighs less."),
    option("--repeats", COUNT, 3, "Number of repetitions. The median is reported."),
    option("--settle-s", Number(0), 3.0, "Warm-up seconds at each load, if a contestant learns which drafts pay off."),
    option("--engine", click.Choice(["torch", "vllm"]), "torch", "Engine of specq's verifiers."),
    repeatable(
        "--mode modes", click.Choice(["plain", "sync", "async"]), (),
        "Mode of own, one, two, two-own and ssd (ssd also has two ways of its own).", show_default="all of each",
    ),
    repeatable("--engine-option engine_options", str, (), "Option of the verifiers' engine.", metavar="NAME=VALUE"),
    option("--tensor-parallel-size", COUNT, None, "GPUs among which vLLM divides each layer.", show_default="1"),
    click.option("--tensor-parallel", type=COUNT, hidden=True),  # its old name
    option("--device", str, "cuda", "cuda, or cpu to try the suite."),
)  # fmt: skip
Contestant = Callable[[Workload], dict[str, Any]]


def prepare(report: Report, *, pair: Path, device: str, **given: Any) -> Workload:
    """Make the pair if it does not exist; return and report the workload.

    Raises ConfigError if the device is not available, or the engine does not know an option.
    """
    from bench.device import check_device

    check_device(device)
    check_engine(given["engine"], given["engine_options"], given.get("tensor_parallel_size", 1))
    made_of = {name: given.pop(name) for name in (*SHAPES, *SOURCES)} | {"model": given.pop("model")}
    _build(pair, device, made_of)
    work = Workload.of(pair, device=device, model=f"{pair}/target", **given)
    report.update(settings=work.to_dict() | made_of)
    return work


def _build(pair: Path, device: str, made_of: dict[str, Any]) -> None:
    if (pair / "draft" / "config.json").exists():
        return
    dtype = "bfloat16" if device.startswith("cuda") else "float32"
    given = {"out": str(pair), "device": device, "dtype": dtype} | made_of
    each = ((name, one) for name, value in given.items() for one in ((value,) if isinstance(value, str) else value))
    arguments = [part for name, one in each if one for part in (f"--{name.replace('_', '-')}", one)]
    if subprocess.run([sys.executable, "-m", "specq", "models", "inflate", *arguments], check=False).returncode:
        raise ConfigError(f"the pair {pair} could not be made; see above")


@dataclass(frozen=True, slots=True)
class ContestPart:
    """A contestant, or one variant that is measured separately; a contestant's variants form one result."""

    name: str
    measure: Contestant
    variant: str = ""

    @property
    def title(self) -> str:
        return f"{self.name} {self.variant}".strip()

    def is_in(self, results: Mapping[str, Any]) -> bool:
        """Return whether it has been measured."""
        found = results.get(self.name, {})
        return self.variant in found if self.variant else bool(found) and "error" not in found


def run(report: Report, work: Workload, parts: Sequence[ContestPart]) -> list[str]:
    """Measure the parts that the report lacks, one after the other, and show each when it is done; return failed ones.

    A failed part is reported, and the others continue. For an interrupted part the loads before the interruption are
    reported, and `--resume` measures it again.
    """
    results, failed = report.content["results"], list[str]()
    for part in parts:
        if part.is_in(results):
            continue
        stop: BaseException | None = None
        try:
            found = attempt(part.title, partial(part.measure, work))
        except CutShortError as cut:
            found, stop = cut.found, cut.stop
        failed += [f"{part.title}{key.removeprefix('error')}" for key in found if key.startswith("error")]
        earlier = results.get(part.name, {}) if part.variant else {}
        report.update(figures=table.figures(part.name, found), results={part.name: earlier | found})
        _show(table.table(part.name, found), table.notes(part.name, found))
        if stop is not None:
            raise stop
    _show(table.summary(results))
    return failed


def _show(rows: Sequence[table.Row], notes: Sequence[str] = ()) -> None:
    if rows:
        show(rows, notes)
