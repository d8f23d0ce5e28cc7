"""`specq bench vllm-only`: what only the vllm engine has, each started for real."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np

from specq.bench.prompts import codec_of, load_prompts
from specq.bench.report import Report, attempt, show
from specq.bench.suite import COUNT, suite
from specq.models import resolve_model
from specq.protocol import Int32Array

PARTS = ("fp8", "w4a16", "prefix", "long")
MEMORY = {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 4 << 30}  # beside another, and known without a trial
CPU_MEMORY = {"kv_cache_memory_bytes": 1 << 30}
ROWS = 1024


@suite("vllm-only")
@click.option(
    "--model",
    required=True,
    help="A directory in Hugging Face layout, whose linear layers have multiples of 128 inputs.",
)
@click.option(
    "--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True, help="What vLLM was built for."
)
@click.option("--only", multiple=True, type=click.Choice(PARTS), help="May be repeated.  [default: all]")
@click.option("--numseqs", type=COUNT, default=4, show_default=True, help="Prompts for each kind of weights.")
@click.option("--output-len", type=COUNT, default=32, show_default=True, help="Tokens of each text.")
@click.option(
    "--prefix-len", type=COUNT, default=2048, show_default=True, help="Tokens of the prompt that sessions share."
)
@click.option("--long-len", type=COUNT, default=32768, show_default=True, help="Tokens of the long prompt.")
@click.option(
    "--sessions",
    type=COUNT,
    default=64,
    show_default=True,
    help="Short texts beside it, and sessions that share the prefix.",
)
@click.option(
    "--step-rows", type=COUNT, multiple=True, default=(1024, 256, 128), show_default=True,
    help="Most rows of a step with a part of the long prompt; may be repeated.",
)  # fmt: skip
def command(
    report: Report,
    *,
    model: str,
    device: str,
    only: tuple[str, ...],
    numseqs: int,
    output_len: int,
    **sizes: Any,
) -> None:
    """Run quantised weights (fp8, and w4a16 as compressed-tensors packs it, made here) and compare each greedy text with vLLM's own; let
    sessions share a prefix; and let short texts go on while a long prompt is computed beside them."""
    directory = resolve_model(model, "target")
    report.update(settings={"model": model, "device": device, "numseqs": numseqs, "output_len": output_len, **sizes})
    prompts = _prompts(numseqs)
    memory: dict[str, Any] = dict(MEMORY if device == "cuda" else CPU_MEMORY)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "fp8": partial(_fp8, directory, prompts, output_len, memory),
        "w4a16": partial(_w4a16, directory, prompts, output_len, memory),
        "prefix": partial(_prefix, directory, output_len, memory, sizes),
        "long": partial(_long, directory, prompts, memory, sizes),
    }
    for name in only or PARTS:
        found = attempt(name, parts[name])
        report.update(results={name: found})
        show([("PART", "FIGURE", "VALUE"), *_rows(name, found)])


def _prompts(count: int) -> list[Int32Array]:
    codec = codec_of("tiny")
    return [np.array(prompt.token_ids, np.int32) for prompt in load_prompts(("gsm8k",), count, codec)]


def _fp8(model: str, prompts: Sequence[Int32Array], num_tokens: int, memory: dict[str, Any]) -> dict[str, Any]:
    from specq.bench.vllm_only import quantised

    return quantised(model, prompts, num_tokens, ROWS, memory, "fp8")


def _w4a16(model: str, prompts: Sequence[Int32Array], num_tokens: int, memory: dict[str, Any]) -> dict[str, Any]:
    from specq.bench.gpu.four_bit import quantise
    from specq.bench.vllm_only import quantised

    with TemporaryDirectory() as folder:
        quantise(Path(model), Path(folder) / "w4a16")
        return quantised(f"{folder}/w4a16", prompts, num_tokens, ROWS, memory)


def _prefix(model: str, num_tokens: int, memory: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    from specq.bench.vllm_only import load, shared_prefix

    prompt = np.resize(np.concatenate(_prompts(64)), sizes["prefix_len"])
    eager = memory | _longer(sizes["prefix_len"] + num_tokens) | {"enforce_eager": True}
    engine = load(model, max_step_rows=ROWS, max_sessions=sizes["sessions"], options=eager)
    found = shared_prefix(engine, prompt, num_tokens, ROWS, sizes["sessions"])
    engine.shutdown()
    return found


def _long(model: str, prompts: Sequence[Int32Array], memory: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    from specq.bench.vllm_only import load, long_prompt

    num_sessions, rows = sizes["sessions"], sizes["step_rows"]
    long = np.resize(np.concatenate(_prompts(64)), sizes["long_len"])
    shorts = [prompts[i % len(prompts)] for i in range(num_sessions)]
    longest = 2 * sizes["long_len"]
    engine = load(
        model, max_step_rows=max(rows), max_sessions=num_sessions + 1, options=memory | _longer(longest)
    )  # fmt: skip
    found = {}
    for number, most in enumerate(rows):  # each with a prompt of its own, so that none is cached
        found[f"{most} rows"] = long_prompt(engine, np.roll(long, number + 1), shorts, most)
    engine.shutdown()
    return found


def _longer(num_tokens: int) -> dict[str, Any]:
    """Return options by which the model takes so many tokens: positions that it has not learned, at the price of those that it has."""
    return {"max_model_len": num_tokens, "hf_overrides": {"max_position_embeddings": num_tokens}}


def _rows(name: str, found: dict[str, Any], of: str = "") -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for key, value in found.items():
        if isinstance(value, dict):
            rows += _rows(name, value, f"{of}{key} ")
        else:
            rows.append((name, f"{of}{key}", value))
    return rows
