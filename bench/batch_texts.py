"""How many texts change with the batch on a GPU, with `batch_invariant` and without, and what a step takes.

    specq models inflate --out pair
    python -m bench.batch_texts --model pair/target --draft-model pair/draft --out FILE

Half of the texts are greedy, half at temperature 0.8. Each is made alone, by plain decoding. Then all are made at once:
plainly, and twice with the drafts of a colocated draft model in every step. A verifier without sockets.
"""

from __future__ import annotations

import gc
import json
import time
from itertools import count
from pathlib import Path
from typing import Any

import click
import numpy as np

from bench.grammars.forced import colocated
from bench.grammars.step_cost import opening
from specq.config import TargetConfig
from specq.engines import ENGINES, Engine
from specq.models import resolve_model
from specq.protocol import Close, SamplingParams, Verdict
from specq.runtime.machine import describe
from specq.text import TextCodec, load_tokenizer_files
from specq.verifier import StepCurve, Verifier

SIZES = [1, 8, 16, 32, 48, 64, 96, 128, 192, 256, 320, 448, 576, 768]
KV_SLOTS = 80_000
TEMPERATURE = 0.8
WORDS = ["river", "town", "north", "behind", "small", "people", "repair", "old", "clocks", "sell", "bread", "Fridays"]
_ids = count(1)


def prompts(codec: TextCodec, number: int, seed: int) -> list[list[int]]:
    """Return prompts of unequal lengths."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(8, 160, number)
    return [codec.encode(f"Question {i}: {' '.join(rng.choice(WORDS, n))}? Answer:") for i, n in enumerate(lengths)]


def serve(
    verifier: Verifier, todo: dict[int, list[int]], mode: str, num_tokens: int
) -> tuple[dict[int, list[int]], int]:
    """Make the texts of some prompts at once; return them, and the number of their rounds."""
    places, texts, num_rounds = dict[int, int](), {place: list[int]() for place in todo}, 0
    for place, prompt in todo.items():
        session_id = next(_ids)
        places[session_id] = place
        params = SamplingParams(
            max_tokens=num_tokens, ignore_eos=True, temperature=TEMPERATURE * (place % 2), seed=place
        )
        assert not verifier.handle(opening(session_id, np.array(prompt, np.int32), params, mode), 0.0)
    while verifier.has_work:
        verifier.begin(time.monotonic(), time.monotonic)
        for verdict in verifier.step(time.monotonic):
            assert isinstance(verdict, Verdict)
            texts[places[verdict.session_id]] += verdict.token_ids.tolist()
            num_rounds += 1
    for session_id in places:
        assert not verifier.handle(Close(session_id=session_id, epoch=1), 0.0)
    return texts, num_rounds


def measure(engine: Engine, config: TargetConfig, num_texts: int, num_tokens: int, seed: int) -> dict[str, Any]:
    """Return how many texts differ from those made alone, and the milliseconds of a step by rows."""
    times = engine.step_times(SIZES)
    curve = StepCurve(SIZES[: len(times)], times)
    source = colocated(config, engine.info)
    codec = TextCodec(load_tokenizer_files(resolve_model(config.model, "target")))
    todo = dict(enumerate(prompts(codec, num_texts, seed)))
    plain, drafting = (
        Verifier(engine, curve, sources, incarnation=1, measures_drafts=False) for sources in ([], [source])
    )
    alone = dict[int, list[int]]()
    for place, prompt in todo.items():
        alone |= serve(plain, {place: prompt}, "plain", num_tokens)[0]
    found: dict[str, Any] = {"arithmetic": engine.info.arithmetic, "texts": num_texts, "tokens": num_tokens}
    for name, verifier, mode in (("together", plain, "plain"), *[("with drafts", drafting, "async")] * 2):
        texts, num_rounds = serve(verifier, todo, mode, num_tokens)
        found.setdefault(f"differ {name}", []).append(sum(alone[place] != texts[place] for place in todo))
    tokens_a_round = num_texts * num_tokens / num_rounds
    return found | {
        "tokens_a_round": tokens_a_round,
        "step_ms": dict(zip(SIZES, np.round(times, 6) * 1e3, strict=False)),
    }


@click.command()
@click.option("--model", required=True, help="Target: a name or a directory.")
@click.option("--draft-model", required=True, help="Draft model: a name or a directory.")
@click.option("--device", default="cuda", show_default=True, help="Where both run.")
@click.option("--dtype", default="bfloat16", show_default=True, help="Type of the weights.")
@click.option("--texts", default=64, show_default=True, help="Number of texts.")
@click.option("--tokens", default=128, show_default=True, help="Tokens of each text.")
@click.option("--seed", default=0, show_default=True, help="Of the prompts.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="File for the report, JSON.")
def main(texts: int, tokens: int, seed: int, out: Path | None, **options: Any) -> None:
    """Measure without `batch_invariant`, then with it, and print a line for each."""
    config, found = TargetConfig(**options), {}
    for is_invariant in (False, True):  # it changes the whole process, so it comes last
        made = {"device": config.device, "dtype": config.dtype, "kv_slots": KV_SLOTS, "batch_invariant": is_invariant}
        engine = ENGINES.resolve("torch").make(resolve_model(config.model, "target"), **made)
        found[f"batch_invariant={is_invariant}"] = measure(engine, config, texts, tokens, seed)
        click.echo(json.dumps(found[f"batch_invariant={is_invariant}"]))
        engine.shutdown()
        del engine
        gc.collect()
    if out is not None:
        out.write_text(json.dumps(describe("bench.batch_texts") | options | found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
