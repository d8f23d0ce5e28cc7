"""How much faster objects with four fields are written with forced tokens, with drafts, and with both.

    python -m bench.grammars.forced --model smollm2 --out forced.json
    python -m bench.grammars.forced --model pair/target --draft-model pair/draft --device cuda --dtype bfloat16

One engine, the model's default, one session at a time, greedy. The sides, in turns: each object plainly, with forced
tokens alone in every step, with suffix decoding or the pair's draft model alone, and with both. `default` has all of
them. Where there are other drafts than forced tokens, the policy chooses what drafts and how deep. Turns before the
first one that counts let it learn. Times are from the first step to the last. Ratios are medians over the objects, of
tokens a second of wall time and of the processor's time.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

from bench.grammars.forms import FORMS
from bench.grammars.parts import OBJECTS
from bench.grammars.step_cost import KV_SLOTS, opening, wait_for_grammars
from specq.config import TargetConfig
from specq.drafting.draft_model import making
from specq.drafting.grammar.source import ForcedTokens
from specq.drafting.suffix.source import SuffixDecoder
from specq.engines import ENGINES
from specq.grammar import GrammarBuilder
from specq.models import resolve_model, tokenizer_of
from specq.protocol import ModelInfo, SamplingParams, Verdict, grammar_text
from specq.runtime.machine import describe
from specq.text import TextCodec, load_tokenizer_files
from specq.verifier import DraftSource, Setup, StepCurve, Verifier

SIZES = [1, 2, 4, 8, 16, 32, 64]
MOST_TOKENS = 160
BEHIND, DEFAULT = " and forced", "default"


def sides_of(config: TargetConfig, info: ModelInfo) -> dict[str, list[DraftSource]]:
    """Return the draft sources of each side."""
    found: dict[str, list[DraftSource]] = {"plain": [], "forced": [ForcedTokens()]}
    model = colocated(config, info)  # one for all sides, since only one has a session at a time
    makers: dict[str, Callable[[], DraftSource]] = {"suffix": SuffixDecoder, "draft model": lambda: model}
    for name, make in makers.items():
        found |= {name: [make()], name + BEHIND: [make(), ForcedTokens()]}
    found[DEFAULT] = [makers["suffix"](), makers["draft model"](), ForcedTokens()]
    return found


def colocated(config: TargetConfig, info: ModelInfo) -> DraftSource:
    """Return the source of a configuration's draft model, in this process."""
    at, files = resolve_model(config.draft_model, "draft"), tokenizer_of(config.draft_model, "draft")
    made = making.make(Setup(config, info, at, config.device, bool, draft_tokenizer=files))
    assert made is not None
    return made


def prompts(codec: TextCodec) -> list[tuple[str, Any, Any]]:
    """Return the objects with four fields: their names, prompts and grammars."""
    found = []
    for name, (about, fields) in OBJECTS.items():
        if len(fields) != 4:
            continue
        example = ", ".join(f'"{field}": ...' for field in fields)
        question = f"{about} Answer as JSON with the keys {{{example}}}.\n"
        found.append((name, codec.encode(question), grammar_text({"json_schema": FORMS["arguments"](name, name)})))
    return found


def run(verifier: Verifier, session_id: int, prompt: list[int], grammar: str, mode: str) -> tuple[int, float, float]:
    """Write one object; return its number of tokens, and the seconds of wall and of processor time."""
    params = SamplingParams(max_tokens=MOST_TOKENS, grammar=grammar)
    assert not verifier.handle(opening(session_id, np.array(prompt, np.int32), params, mode), 0.0)
    wait_for_grammars(verifier)
    num_tokens, began, used = 0, 0.0, 0.0
    while verifier.has_work:
        verifier.begin(time.monotonic(), time.monotonic)
        for verdict in verifier.step(time.monotonic):
            assert isinstance(verdict, Verdict)
            num_tokens += len(verdict.token_ids)
        if not began:  # the prompt has been computed
            began, used, num_tokens = time.perf_counter(), time.process_time(), 0
    return num_tokens, time.perf_counter() - began, time.process_time() - used


@click.command()
@click.option("--model", default="smollm2", show_default=True, help="Target.")
@click.option("--draft-model", default="", help="Draft model.  [default: the target's, by its name]")
@click.option("--device", default="cpu", show_default=True, help="Where both run.")
@click.option("--dtype", default="auto", show_default=True, help="Type of the weights.")
@click.option("--turns", default=3, show_default=True, help="How often each object is written.")
@click.option("--warm-up", default=3, show_default=True, help="Turns before, which do not count.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="File for the report, JSON.")
def main(model: str, draft_model: str, device: str, dtype: str, turns: int, warm_up: int, out: Path | None) -> None:
    """Measure, and print the ratios."""
    at = resolve_model(model, "target")
    config = TargetConfig(model=model, draft_model=draft_model or model, device=device, dtype=dtype)
    engine = ENGINES.resolve("auto").make(at, device=device, dtype=dtype, kv_slots=KV_SLOTS)
    files = load_tokenizer_files(at)
    times, ids = engine.step_times(SIZES), count(1)
    curve = StepCurve(SIZES[: len(times)], times)
    builder = GrammarBuilder(files, engine.info.vocab_size, engine.info.eos_ids)
    verifiers = {
        name: Verifier(
            *(engine, curve, sources),
            incarnation=1,
            tokenizer_files=files,
            grammar_builder=builder,
            measures_drafts=name not in ("plain", "forced"),
        )
        for name, sources in sides_of(config, engine.info).items()
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in verifiers}  # tokens a second: wall, processor
    for turn in range(-warm_up, turns):
        for _, prompt, grammar in prompts(TextCodec(files)):
            for name in list(verifiers)[:: 1 if turn % 2 else -1]:
                mode = "plain" if name == "plain" else "async"
                num_tokens, wall_s, processor_s = run(verifiers[name], next(ids), prompt, grammar, mode)
                if turn >= 0:
                    found[name].append((num_tokens / wall_s, num_tokens / processor_s))
    builder.close()
    is_on_cpu = int(device == "cpu")  # there the processor's time tells which is better
    rates = {name: np.array(own) for name, own in found.items()}
    ratios = {f"{name} to plain": own / rates["plain"] for name, own in rates.items() if name != "plain"}
    for names in (("suffix",), ("draft model",), ("suffix", "draft model")):
        better = max((rates[name] for name in ("forced", *names)), key=lambda own: float(np.median(own[:, is_on_cpu])))
        both = DEFAULT if len(names) > 1 else names[0] + BEHIND
        ratios[f"{both} to the best of forced, {', '.join(names)}"] = rates[both] / better
    report: dict[str, Any] = {
        "model": model,
        "arithmetic": engine.info.arithmetic,
        "objects": len(found["plain"]) // turns,
        "load": os.getloadavg(),
    }
    report["plain_tokens_per_s"] = median(rates["plain"][:, 0])
    report["ratios"] = {
        name: {"wall": median(own[:, 0]), "processor": median(own[:, 1])} for name, own in ratios.items()
    }
    click.echo(json.dumps(report, indent=1))
    if out is not None:
        out.write_text(json.dumps(describe() | report, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
