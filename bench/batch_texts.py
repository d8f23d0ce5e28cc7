"""How many texts change with the batch on a GPU, with `batch_invariant` and without, and what a step takes.

    specq models inflate --out pair
    python -m bench.batch_texts --model pair/target --draft-model pair/draft --out FILE

Half of the texts are greedy, half at temperature 0.8. A quarter of the prompts begin in the same way. Each text is made
alone, by plain decoding. Then 64 at once: plainly, and with drafts in every step, of a draft model, of suffix decoding
beside it, and of heads if there are any. Then half of them are opened again in the middle, as after the loss of their
verifier. A verifier without sockets.

With --served a broker and a verifier run as processes. The verifier is killed when half of the tokens are there.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import click
import numpy as np

from bench.grammars.forced import colocated
from bench.grammars.step_cost import opening
from specq.config import TargetConfig
from specq.drafting.eagle3 import source as eagle3
from specq.drafting.suffix.source import SuffixDecoder
from specq.engines import ENGINES, Engine
from specq.models import resolve_model
from specq.processes.servers import Servers, pair_config
from specq.protocol import Close, SamplingParams, Verdict
from specq.runtime.machine import describe
from specq.text import TextCodec, load_tokenizer_files
from specq.verifier import DraftSource, Setup, StepCurve, Verifier

SIZES = [1, 8, 16, 32, 48, 64, 96, 128, 192, 256, 320, 448, 576, 768]
KV_SLOTS = 80_000
AT_ONCE = 64
TEMPERATURE = 0.8
READY_S = 240.0  # until a verifier is ready
WORDS = ["river", "town", "north", "behind", "small", "people", "repair", "old", "clocks", "sell", "bread", "Fridays"]
_ids = count(1)


def prompts(codec: TextCodec, number: int, seed: int) -> list[list[int]]:
    """Return prompts of unequal lengths. Every fourth begins with the same 300 words."""
    rng = np.random.default_rng(seed)
    common = " ".join(rng.choice(WORDS, 300))
    lengths = rng.integers(8, 160, number)
    return [
        codec.encode(f"{'' if i % 4 else common} Question {i}: {' '.join(rng.choice(WORDS, n))}? Answer:")
        for i, n in enumerate(lengths)
    ]


@dataclass(frozen=True, slots=True)
class TextsToMake:
    """Prompts by place, and their texts. A text that has tokens goes on after them."""

    prompts: dict[int, list[int]]
    begun: dict[int, list[int]]
    num_tokens: int

    def group(self, places: list[int]) -> TextsToMake:
        return TextsToMake({place: self.prompts[place] for place in places}, self.begun, self.num_tokens)


def serve(verifier: Verifier, todo: TextsToMake, mode: str) -> tuple[dict[int, list[int]], int]:
    """Make some texts at once; return them, and the number of their rounds."""
    places, num_rounds = dict[int, int](), 0
    texts = {place: list(todo.begun.get(place, [])) for place in todo.prompts}
    for place, prompt in todo.prompts.items():
        session_id = next(_ids)
        places[session_id] = place
        params = SamplingParams(
            max_tokens=todo.num_tokens, ignore_eos=True, temperature=TEMPERATURE * (place % 2), seed=place
        )
        opened = opening(session_id, np.array(prompt, np.int32), params, mode)
        opened = replace(
            opened, token_ids=np.array(prompt + texts[place], np.int32), tokens_left=todo.num_tokens - len(texts[place])
        )
        assert not verifier.handle(opened, 0.0)
    while verifier.has_work:
        verifier.begin(time.monotonic(), time.monotonic)
        for verdict in verifier.step(time.monotonic):
            assert isinstance(verdict, Verdict)
            texts[places[verdict.session_id]] += verdict.token_ids.tolist()
            num_rounds += 1
    for session_id in places:
        assert not verifier.handle(Close(session_id=session_id, epoch=1), 0.0)
    return texts, num_rounds


def serve_all(verifier: Verifier, todo: TextsToMake, mode: str, at_once: int) -> tuple[dict[int, list[int]], int]:
    """Make all texts, `at_once` at a time."""
    texts, num_rounds = dict[int, list[int]](), 0
    places = list(todo.prompts)
    for first in range(0, len(places), at_once):
        found, rounds = serve(verifier, todo.group(places[first : first + at_once]), mode)
        texts, num_rounds = texts | found, num_rounds + rounds
    return texts, num_rounds


def sources_of(config: TargetConfig, engine: Engine) -> dict[str, list[DraftSource]]:
    """Return the ways to draft."""
    model = colocated(config, engine.info)
    ways = {"draft model": [model], "draft model and suffix decoding": [model, SuffixDecoder()]}
    if config.heads:
        at = resolve_model(config.model, "target")
        made = eagle3.make(Setup(config, engine.info, "", config.device, bool, target=at, heads=config.heads))
        assert made is not None
        ways["EAGLE-3"] = [made]
    return ways


def measure(engine: Engine, config: TargetConfig, num_texts: int, num_tokens: int, seed: int) -> dict[str, Any]:
    """Return how many texts differ from those made alone, and the milliseconds of a step by rows."""
    times = engine.step_times(SIZES)
    curve = StepCurve(SIZES[: len(times)], times)
    codec = TextCodec(load_tokenizer_files(resolve_model(config.model, "target")))
    todo = TextsToMake(dict(enumerate(prompts(codec, num_texts, seed))), {}, num_tokens)

    def verifier_of(sources: list[DraftSource]) -> Verifier:
        return Verifier(engine, curve, sources, incarnation=1, measures_drafts=False)

    began = time.perf_counter()
    alone, _ = serve_all(verifier_of([]), todo, "plain", 1)
    found: dict[str, Any] = {"arithmetic": engine.info.arithmetic, "texts": num_texts, "tokens": num_tokens}
    found["tokens_per_s_alone"] = num_texts * num_tokens / (time.perf_counter() - began)
    lengths = {place: 1 + 7 * place % (num_tokens - 1) for place in alone if place % 4 < 2}
    halves = TextsToMake(todo.prompts, {place: alone[place][:length] for place, length in lengths.items()}, num_tokens)
    ways = {name: ("async", verifier_of(sources)) for name, sources in sources_of(config, engine).items()}
    for name, (mode, verifier) in {"plain": ("plain", verifier_of([])), **ways}.items():
        for begun, texts in (("", todo), (", opened again", halves)):
            made, num_rounds = serve_all(verifier, texts, mode, AT_ONCE)
            count = sum(num_tokens - len(texts.begun.get(place, [])) for place in made)
            differ = sum(alone[place] != made[place] for place in made)
            found[f"{name}{begun}"] = {"differ": differ, "tokens_a_round": count / num_rounds}
    return found | {"step_ms": dict(zip(SIZES, np.round(times, 6) * 1e3, strict=False))}


def made_by_processes(config: TargetConfig, num_texts: int, num_tokens: int, seed: int) -> dict[str, Any]:
    """Return how many texts of processes differ from those made alone, when the verifier is killed in the middle."""
    codec = TextCodec(load_tokenizer_files(resolve_model(config.model, "target")))
    given, texts = prompts(codec, num_texts, seed), [list[int]() for _ in range(num_texts)]
    base = pair_config(config.model, "", 0)
    options = ("batch_invariant=true",)
    target = replace(
        base.target, device=config.device, dtype=config.dtype, kv_slots=KV_SLOTS, max_sessions=AT_ONCE, drafts="always",
        draft_model=config.draft_model, heads=config.heads, engine_options=options,
    )  # fmt: skip
    with Servers(replace(base, target=target)) as servers, ThreadPoolExecutor(AT_ONCE) as pool:
        servers.wait_ready(READY_S)
        client = servers.client

        def asked(place: int) -> dict[str, Any]:
            sampling = {"temperature": TEMPERATURE * (place % 2), "seed": place, "ignore_eos": True}
            return {"token_ids": given[place], "max_tokens": num_tokens, **sampling}

        def make(place: int) -> None:
            for piece in client.stream(**asked(place), mode="async"):
                texts[place] += piece.token_ids

        alone = [client.generate(**asked(place), mode="plain").token_ids for place in range(num_texts)]
        todo, killed = [pool.submit(make, place) for place in range(num_texts)], list[int]()
        while not wait(todo, 0.02).done.issuperset(todo):
            made = sum(map(len, texts))
            if not killed and made > num_texts * num_tokens // 2:
                killed = [len(text) for text in texts]
                os.kill(next(pid for name, pid in servers.pids().items() if "target" in name), signal.SIGKILL)
            servers.tend()
        for one in todo:
            one.result()
    differ = sum(list(one) != two for one, two in zip(alone, texts, strict=True))
    interrupted = sum(0 < count < num_tokens for count in killed)
    return {"texts": num_texts, "tokens": num_tokens, "interrupted": interrupted, "differ": differ}


@click.command()
@click.option("--model", required=True, help="Target: a name or a directory.")
@click.option("--draft-model", required=True, help="Draft model: a name or a directory.")
@click.option("--heads", default="", help="Directory of an EAGLE-3 head.")
@click.option("--device", default="cuda", show_default=True, help="Where both run.")
@click.option("--dtype", default="bfloat16", show_default=True, help="Type of the weights.")
@click.option("--texts", default=64, show_default=True, help="Number of texts.")
@click.option("--tokens", default=128, show_default=True, help="Tokens of each text.")
@click.option("--seed", default=0, show_default=True, help="Of the prompts.")
@click.option("--only-invariant", is_flag=True, help="Do not measure without `batch_invariant`.")
@click.option("--served", is_flag=True, help="Make them by processes, whose verifier is killed.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="File for the report, JSON.")
def main(
    texts: int, tokens: int, seed: int, only_invariant: bool, served: bool, out: Path | None, **options: Any
) -> None:
    """Measure without `batch_invariant`, then with it, and print a line for each."""
    config, found = TargetConfig(**options), dict[str, Any]()
    if served:
        found["served"] = made_by_processes(config, texts, tokens, seed)
        click.echo(json.dumps(found["served"]))
    kinds = (False, True)[only_invariant:]  # `batch_invariant` changes the whole process, so it comes last
    for is_invariant in () if served else kinds:
        made = {"device": config.device, "dtype": config.dtype, "kv_slots": KV_SLOTS, "batch_invariant": is_invariant}
        engine = ENGINES.resolve("torch").make(resolve_model(config.model, "target"), **made)
        found[f"batch_invariant={is_invariant}"] = measure(engine, config, texts, tokens, seed)
        click.echo(json.dumps(found[f"batch_invariant={is_invariant}"]))
        engine.shutdown()
        del engine
        gc.collect()
    if out is not None:
        out.write_text(json.dumps(describe() | options | found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
