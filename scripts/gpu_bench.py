"""Measure the torch engine and the draft model on a GPU: builds what it needs, checks, times, profiles, in one call.

    python scripts/gpu_bench.py --out DIR [--only steps,chains] [--target qwen2.5-7b] [--draft qwen2.5-0.5b]

Models are the bundled pair inflated to large shapes (specq models inflate), made on the device. DIR gets gpu_bench.json,
written anew after every part, so that a call that is cut short leaves what it had. A short table is printed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from gpu_bench_lib import compiling, passes, speculation, steps, tiles, timing
from gpu_bench_lib.models import Model, load_inflated

from specq.bench import chain_steps
from specq.bench.machine import describe
from specq.engines.torch.engine import TorchEngine
from specq.engines.torch.generic import GenericForward
from specq.engines.torch.loading import load
from specq.models import resolve_model
from specq.proposers.draft_model import DraftModel

PARTS = ("generic", "passes", "steps", "chains", "profile", "text", "tiles")
STEP_GRID = [(s, k) for s in (1, 8, 32, 64) for k in (0, 4, 8)]


class Report:
    """What has been measured so far, on disk after every part."""

    def __init__(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.path = out / "gpu_bench.json"
        self.content: dict[str, Any] = describe(" ".join(["python", *sys.argv]))
        self.content |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "seconds": {}}

    def run(self, name: str, part: Callable[[], Any]) -> None:
        """Run a part; its failure is reported and the others go on."""
        started = time.perf_counter()
        try:
            self.content[name] = part()
        except Exception as error:
            self.content[name] = {"error": f"{type(error).__name__}: {error}"}
            click.echo(f"{name}: {type(error).__name__}: {error}")
            import traceback

            traceback.print_exc()
        self.content["seconds"][name] = round(time.perf_counter() - started, 1)
        click.echo(f"-- {name}: {self.content['seconds'][name]} s")
        self.path.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")


def run_steps(engine: TorchEngine, target: Model, bandwidth: float) -> dict[str, Any]:
    """Time steps over sessions and nodes; the floor is weights over bandwidth."""
    floor = target.step_bytes / bandwidth / 1e9
    cases = [steps.measure(engine, s, k) for s, k in STEP_GRID]
    cases += [steps.measure(engine, 1, 8, context=context) for context in (1000, 1900)]
    cases += [steps.measure(engine, 1, 14, shape="tree"), steps.measure(engine, 32, 8, temperature=0.8)]
    for case in cases:
        case["of_floor"] = round(case["step_ms"] / floor, 3)
        click.echo(
            f"S={case['sessions']:3} K={case['nodes']:2} {case['shape']} ctx={case['context']:4} T={case['temperature']}"
            f"  step {case['step_ms']:7.3f}  forward {case['forward_ms']:7.3f}  {case['of_floor']:5.2f} x floor"
            f"  host {case['host_ms']}"
        )
    return {"floor_ms": round(floor, 3), "cases": cases}


def run_chains(draft: DraftModel, model: Model, bandwidth: float) -> dict[str, Any]:
    """Time chains of draft steps."""
    settings = [(1, 0.0, 1), (1, 0.8, 1), (1, 0.0, 3), (8, 0.0, 1), (32, 0.0, 1)]
    cases = [chain_steps.measure(draft, s, temperature=t, width=w) for s, t, w in settings]
    for case in cases:
        click.echo(
            f"chain S={case['sessions']:3} T={case['temperature']} F={case['width']}  step {case['step_ms']:.4f} ms"
            f"  calls {case['chain_ms']}  one pass {case['one_pass_ms']:.3f} ms"
        )
    return {"floor_ms": round(model.step_bytes / bandwidth / 1e9, 3), "cases": cases}


def run_tiles(models: dict[str, Model], shapes: dict[str, str]) -> dict[str, Any]:
    """Time the tiles of both shapes; print the best of each product."""
    found = {}
    for role, model in models.items():
        sizes, decoder = tiles.measured_rows(shapes[role]), model.loaded.forward.decoder
        measured = tiles.measure(decoder, sizes)
        found[role] = {"alone": measured, "refined": tiles.refine(decoder, sizes, measured)}
        for rows in sizes:
            click.echo(f"{role} rows {rows}: {found[role]['refined'][rows]}")
            for product in tiles.PRODUCTS:
                own = [e for e in measured if e["product"] == product and e["rows"] == rows and "us" in e]
                best = sorted(own, key=lambda entry: entry["us"])[:3]
                vendor = next((e["us"] for e in own if e["tile"] == "vendor"), None)
                text = "  ".join(f"{e['tile']} {e['us']} us {e['tb_s']} TB/s" for e in best)
                click.echo(f"{role} rows {rows:2} {product:8} {text}  (vendor {vendor})")
    return found


def run_passes(models: dict[str, Model]) -> dict[str, Any]:
    """Time whole passes of both decoders, the narrow ones also without PDL."""
    sizes = {"target": (1, 16, 32, 64, 96, 160, 288, 320), "draft": (1, 16, 32)}
    found = {r: passes.measure(m.loaded.forward.decoder, sizes[r]) for r, m in models.items()}
    for role, figures in found.items():
        for size, own in figures.items():
            click.echo(f"{role} {size:>4} rows: {own}")
    return found


def run_profile(models: dict[str, Model]) -> dict[str, Any]:
    """Profile whole passes of both decoders."""
    sizes = {"target": (1, 16, 64, 320), "draft": (1, 16)}
    found = {role: passes.profile(model.loaded.forward.decoder, sizes[role]) for role, model in models.items()}
    for role, figures in found.items():
        for size, entries in figures.items():
            click.echo(f"{role} {size} rows")
            for entry in entries[:11]:
                click.echo(f"   {entry['us_each']:8.2f} us x {entry['count']:6}  {entry['kernel']}")
    return found


def run_generic(target: Model, engine: TorchEngine) -> dict[str, Any]:
    """Compare the fused logits with transformers' own code on the same weights, in one verify step."""
    generic = GenericForward(target.network, target.loaded.forward.kv)
    kept: list[Any] = []

    class Both:
        kv = target.loaded.forward.kv

        def __call__(self, rows: Any) -> Any:
            output = target.loaded.forward(rows)
            kept.append((output.logits.float().clone(), generic(rows).logits))
            return output

    engine._forward = Both()
    steps.measure(engine, 4, 8, repeats=1)
    engine._forward = target.loaded.forward
    pairs = [pair for pair in kept if len(pair[0])]
    worst = max(float((ours - theirs).abs().max()) for ours, theirs in pairs)
    same = [float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()) for ours, theirs in pairs]
    largest = max(float(theirs.abs().max()) for _, theirs in pairs)
    result = {"largest_difference": worst, "largest_logit": largest, "argmax_equal": sum(same) / len(same)}
    click.echo(f"fused against generic: {result}")
    return result


def run_text(engine: TorchEngine, draft: DraftModel, limit: int, count: int) -> dict[str, Any]:
    """Compare texts with the small pair's, and speculate in one process."""
    texts = speculation.prompts(limit)
    small = TorchEngine(load(resolve_model("tiny", "target"), device="cuda", dtype="bfloat16", kv_slots=8192))
    found: dict[str, Any] = {"target": speculation.compare_text(small, engine, texts, count)}
    found["speculation"] = [speculation.speculate(engine, None, texts, count, 0)]
    found["speculation"] += [speculation.speculate(engine, draft, texts, count, depth) for depth in (3, 5, 8)]
    click.echo(json.dumps(found))
    return found


@click.command()
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path))
@click.option("--only", default=",".join(PARTS[:-1]), help=f"Of {', '.join(PARTS)}.")
@click.option("--target", default="qwen2.5-7b")
@click.option("--draft", default="qwen2.5-0.5b")
@click.option("--limit", default=8, help="Prompts of each benchmark for `text`.")
@click.option("--tokens", default=64, help="Tokens of each text.")
def main(out: Path, only: str, target: str, draft: str, limit: int, tokens: int) -> None:
    """Run the parts asked for."""
    wanted = set(only.split(","))
    report = Report(out)
    compile_tasks = [(shape, rows, {}) for shape in (target, draft) for rows in (1, 16, 32, 64, 96)]
    compile_tasks += tiles.tasks((target, draft)) if "tiles" in wanted else []
    report.run("compiling_s", lambda: compiling.compile_all(compile_tasks))
    report.run("bandwidth_tb_s", timing.bandwidth_tb_s)
    bandwidth = report.content["bandwidth_tb_s"]["copy"]
    models: dict[str, Model] = {}
    for role, shape in (("target", target), ("draft", draft)):
        report.run(
            f"load_{role}", lambda role=role, shape=shape: models.setdefault(role, load_inflated(role, shape)) and shape
        )
    engine, drafter = TorchEngine(models["target"].loaded), DraftModel(models["draft"].loaded)
    parts: dict[str, Callable[[], Any]] = {
        "generic": lambda: run_generic(models["target"], engine),
        "steps": lambda: run_steps(engine, models["target"], bandwidth),
        "chains": lambda: run_chains(drafter, models["draft"], bandwidth),
        "passes": lambda: run_passes(models),
        "profile": lambda: run_profile(models),
        "text": lambda: run_text(engine, drafter, limit, tokens),
        "tiles": lambda: run_tiles(models, {"target": target, "draft": draft}),
    }
    for name in PARTS:
        if name in wanted:
            report.run(name, parts[name])


if __name__ == "__main__":
    main()
