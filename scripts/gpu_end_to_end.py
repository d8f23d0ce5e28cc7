"""Measure specq end to end, through broker and sockets, against vLLM and transformers on the same GPU, in one call.

    python scripts/gpu_end_to_end.py --out DIR [--gpus 2] [--only own,vllm] [--sessions 1,8,32,64]

The models are the bundled pair inflated to the shapes of Qwen2.5-7B and 0.5B (specq models inflate), made where --pair says
unless they are there. One contestant runs after the other, since each fills the GPU; all get the same prompts (GSM8K and
HumanEval), three for each session, as many at a time as there are sessions, and generate as many tokens, greedily. DIR gets
end_to_end.json, written anew after every contestant, so that a call that is cut short leaves what it had. A short table is printed.

Contestants: `plain`, `own` (a drafter in the verifier's process), `one` (a drafter in a process of its own on the same GPU), `two`
(that drafter on a second GPU), `two-own` (a drafter in both places); `alone` (steps of both models by themselves); `vllm` and
`vllm-spec` (its own draft model), and `transformers` (`generate` and assisted generation) where they are installed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from gpu_end_to_end_lib import serving
from gpu_end_to_end_lib.workload import Workload

from specq.bench.machine import describe
from specq.protocol.errors import SpecqError
from specq.runtime.columns import columns

HERE = Path(__file__).parent
CONTESTANTS = ("alone", "own", "one", "two", "two-own", "vllm", "vllm-spec", "transformers")
RIVAL_S = 400.0  # patience with one rival
DRAFT_SHAPE = "vocab=152064"  # the target's, since rivals want vocabularies of one size


@click.command()
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Gets end_to_end.json.")
@click.option(
    "--pair", default="pair", type=click.Path(file_okay=False, path_type=Path), help="Has target/ and draft/."
)
@click.option("--target", default="qwen2.5-7b", help="Shape of the target, if the pair is to be made.")
@click.option("--draft", default="qwen2.5-0.5b", help="Shape of the draft model, likewise.")
@click.option("--draft-shape", default=DRAFT_SHAPE, help="Changes to it.")
@click.option("--only", default=",".join(CONTESTANTS), help="Contestants, in order.")
@click.option("--sessions", default="1,8,32,64", help="Jobs at a time.")
@click.option("--output-len", default=128, help="Tokens of each completion.")
@click.option("--repeats", default=3, help="Repetitions; the median counts.")
@click.option("--device", default="cuda", help="cuda, or cpu to try this program out.")
@click.option("--gpus", default=1, help="GPUs that are there; `two` and `two-own` need 2.")
def main(out: Path, pair: Path, only: str, gpus: int, device: str, **options: Any) -> None:
    """Build, measure, compare."""
    out.mkdir(parents=True, exist_ok=True)
    shapes = {name: options.pop(name) for name in ("target", "draft", "draft_shape")}
    work = Workload.of(pair, device=device, **options)
    report: dict[str, Any] = describe(" ".join(["python", *sys.argv])) | {"workload": work.to_dict(), "contestants": {}}
    _build(pair, device, shapes)
    work.save(out / "workload.json")
    for name in only.split(","):
        if name in serving.SECOND and gpus < 2:
            continue
        started = time.perf_counter()
        try:
            report["contestants"][name] = _contestant(name, out, work)()
        except (SpecqError, OSError, RuntimeError, subprocess.SubprocessError) as error:
            report["contestants"][name] = {"error": f"{type(error).__name__}: {error}"[-2000:]}
            click.echo(f"{name}: {error}")
        click.echo(f"-- {name}: {time.perf_counter() - started:.0f} s")
        (out / "end_to_end.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        for row in _rows(name, report["contestants"][name]):
            click.echo(" ".join(map(str, row)))
    click.echo(columns(_table(report["contestants"])))


def _build(pair: Path, device: str, shapes: dict[str, str]) -> None:
    if not (pair / "draft" / "config.json").exists():
        options = [part for name, value in shapes.items() for part in (f"--{name.replace('_', '-')}", value)]
        dtype = "bfloat16" if device == "cuda" else "float32"
        command = [
            sys.executable,
            "-m",
            "specq",
            "models",
            "inflate",
            "--out",
            pair,
            "--device",
            device,
            "--dtype",
            dtype,
        ]
        subprocess.run([*command, *options], check=True)


def _contestant(name: str, out: Path, work: Workload) -> Callable[[], Any]:
    """Return what measures a contestant, and gives {variant: {sessions: figures}}."""
    if name in serving.DEPLOYMENTS:
        return lambda: serving.measure(name, work)
    return lambda: _in_a_child(name, out)


def _in_a_child(name: str, out: Path) -> Any:
    """Run a contestant that loads models into its own process, so that it leaves the GPU empty."""
    result = out / f"{name}.json"
    command = [sys.executable, str(HERE / "gpu_rivals.py"), name, str(out / "workload.json"), str(result)]
    with (out / f"{name}.log").open("wb") as log:
        done = subprocess.run(command, check=False, stdout=log, stderr=subprocess.STDOUT, timeout=RIVAL_S)
    if done.returncode:
        tail = (out / f"{name}.log").read_text(errors="replace")[-1500:]
        raise RuntimeError(f"ended with status {done.returncode}: {tail}")
    return json.loads(result.read_text("utf-8"))


def _table(contestants: dict[str, Any]) -> list[Sequence[object]]:
    header = ("CONTESTANT", "VARIANT", "SESSIONS", "TOKENS/S", "PER USER", "L", "STEP MS")
    return [header, *(row for name, found in contestants.items() for row in _rows(name, found))]


def _rows(name: str, found: dict[str, Any]) -> list[Sequence[object]]:
    return [
        (name, variant, sessions, f["tokens_per_second"], round(f["tokens_per_second"] / int(sessions), 1),
         f.get("mean_accepted_length", ""), f.get("step_ms", ""))
        for variant, by_sessions in found.items() if isinstance(by_sessions, dict)
        for sessions, f in by_sessions.items() if isinstance(f, dict) and "tokens_per_second" in f
    ]  # fmt: skip


if __name__ == "__main__":
    main()
