"""`specq bench vllm-only`: what the vllm engine is asked for beside speed, each started for real."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np

from specq.bench.agreement import PRECISIONS
from specq.bench.prompts import codec_of, load_prompts
from specq.bench.report import Report, attempt, show
from specq.bench.suite import COUNT, suite
from specq.models import resolve_model
from specq.protocol import Int32Array
from specq.runtime import Number

PARTS = ("fp8", "w4a16", "prefix", "long")
MEMORY = {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 4 << 30}  # beside another, and known without a trial
LONG_MEMORY = MEMORY | {"kv_cache_memory_bytes": 16 << 30}
CPU_MEMORY = {"kv_cache_memory_bytes": 1 << 30}
ROWS = 1024
MOST_SHOWN = 2  # texts that differ
MIXED_STEPS = 24  # with a part of a prompt, from which is told what such a step takes


@suite("vllm-only")
@click.option(
    "--model",
    required=True,
    help="A directory in Hugging Face layout, whose linear layers have multiples of 128 inputs.",
)
@click.option(
    "--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True, help="What vLLM was built for."
)
@click.option(
    "--engine", type=click.Choice(["vllm", "torch"]), default="vllm", show_default=True, help="Of the part `long`."
)
@click.option(
    "--dtype", type=click.Choice(tuple(PRECISIONS)), default="bfloat16", show_default=True, help="What is computed in."
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
    "--slowdown", type=Number(0), multiple=True, default=(1.8, 0.0), show_default=True,
    help="`max_prefill_slowdown` of the verifier, beside a long prompt; 0: no limit; may be repeated.",
)  # fmt: skip
@click.option(
    "--step-rows",
    type=COUNT,
    default=512,
    show_default=True,
    help="Most rows of a step with a part of the long prompt.",
)
@click.option(
    "--prompt-rows", type=COUNT, multiple=True, default=(2, 16, 64, 256), show_default=True,
    help="Rows of a prompt in each step, of which it is told what they add to it; may be repeated.",
)  # fmt: skip
def command(
    report: Report,
    *,
    model: str,
    device: str,
    engine: str,
    dtype: str,
    only: tuple[str, ...],
    numseqs: int,
    output_len: int,
    **sizes: Any,
) -> None:
    """Run quantised weights (fp8, and w4a16 as compressed-tensors packs it, made here) and compare each greedy text with vLLM's own; let
    sessions share a prefix; and let short texts go on while a long prompt is computed beside them."""
    directory = resolve_model(model, "target")
    asked = {"model": model, "device": device, "engine": engine, "dtype": dtype, "numseqs": numseqs}
    report.update(settings=asked | {"output_len": output_len, **sizes})
    prompts, is_gpu = _prompts(numseqs), device == "cuda"
    memory, longer = (MEMORY, LONG_MEMORY) if is_gpu else (CPU_MEMORY, CPU_MEMORY)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "fp8": partial(_fp8, directory, prompts, output_len, memory, dtype),
        "w4a16": partial(_w4a16, directory, prompts, output_len, memory, dtype),
        "prefix": partial(_prefix, directory, output_len, memory, dtype, sizes),
        "long": partial(_long, directory, prompts, longer, {"engine": engine, "device": device, "dtype": dtype}, sizes),
    }
    for name in only or PARTS:
        found = attempt(name, parts[name])
        report.update(results={name: found})
        show([("PART", "FIGURE", "VALUE"), *_rows(name, found)])


def _prompts(count: int) -> list[Int32Array]:
    codec = codec_of("tiny")
    return [np.array(prompt.token_ids, np.int32) for prompt in load_prompts(("gsm8k",), count, codec)]


def _fp8(
    model: str, prompts: Sequence[Int32Array], num_tokens: int, memory: Mapping[str, Any], dtype: str
) -> dict[str, Any]:
    from specq.bench.vllm_only import quantised

    return quantised(model, prompts, num_tokens, ROWS, memory, dtype, "fp8")


def _w4a16(
    model: str, prompts: Sequence[Int32Array], num_tokens: int, memory: Mapping[str, Any], dtype: str
) -> dict[str, Any]:
    from specq.bench.gpu.four_bit import quantise
    from specq.bench.vllm_only import quantised

    with TemporaryDirectory() as folder:
        quantise(Path(model), Path(folder) / "w4a16")
        return quantised(f"{folder}/w4a16", prompts, num_tokens, ROWS, memory, dtype)


def _prefix(
    model: str, num_tokens: int, memory: Mapping[str, Any], dtype: str, sizes: dict[str, Any]
) -> dict[str, Any]:
    """Of each way that a text comes, how many are what vLLM says to the prompt alone; its own texts of as many prompts at once, too."""
    from specq.bench.vllm_only import compared, completed, load, shared_prefix

    prompt, count = np.resize(np.concatenate(_prompts(64)), sizes["prefix_len"]), sizes["sessions"]
    with stretched(model, len(prompt) + num_tokens) as longer:
        options = {**memory, "enforce_eager": True, "max_model_len": len(prompt) + num_tokens}
        alone, *together = completed(longer, [prompt], num_tokens, options, dtype, count)
        engine = load(longer, dtype=dtype, max_step_rows=ROWS, max_sessions=count, options=options)
        found, texts = shared_prefix(engine, prompt, num_tokens, ROWS, count)
        engine.shutdown()
    texts["vllm itself, together"] = [one["token_ids"] for one in together]
    return found | {name: compared(own, [alone] * len(own), dtype) for name, own in texts.items()}


def _long(
    model: str,
    prompts: Sequence[Int32Array],
    memory: Mapping[str, Any],
    how: dict[str, str],
    sizes: dict[str, Any],
) -> dict[str, Any]:
    """What texts wait beside a long prompt, by what limits it; and what steps take that have so many rows of a prompt."""
    from specq.bench.vllm_only import load, long_prompt, measured_curve

    count, rows, num_long = sizes["sessions"], sizes["step_rows"], sizes["long_len"]
    long, shorts = np.resize(np.concatenate(_prompts(64)), num_long), [prompts[i % len(prompts)] for i in range(count)]
    found = {}
    with stretched(model, 2 * num_long + ROWS) as longer:
        own: dict[str, Any] = {**how, "max_step_rows": max(rows, count + max(sizes["prompt_rows"]))}
        if how["engine"] == "vllm":
            own |= {"options": {**memory, "max_model_len": 2 * num_long + ROWS}}
        engine = load(longer, max_sessions=count + 1, **own)
        make_curve = measured_curve(engine, rows)
        for number, slowdown in enumerate(sizes["slowdown"]):  # each with a prompt of its own, so that none is cached
            own_prompt = np.roll(long, number + 1)
            found[f"slowdown {slowdown:g}"] = long_prompt(engine, make_curve(), own_prompt, shorts, rows, slowdown)
        for number, few in enumerate(sizes["prompt_rows"]):
            part = np.roll(long, -number - 1)[: MIXED_STEPS * few]
            mixed = long_prompt(engine, make_curve(), part, shorts, count + few, 0.0)
            found[f"{few} rows"] = {name: mixed[name] for name in ("alone_ms", "beside_ms")}
        engine.shutdown()
    return found


@contextmanager
def stretched(model: str, num_tokens: int) -> Iterator[str]:
    """Yield a directory with the same model, which takes so many tokens: positions that it has not learned, at the price of those that it has.
    A file stays as it is."""
    if Path(model).is_file():
        yield model
        return
    with TemporaryDirectory() as folder:
        config = json.loads((Path(model) / "config.json").read_text("utf-8"))
        config["max_position_embeddings"] = max(config.get("max_position_embeddings", 0), num_tokens)
        for file in Path(model).iterdir():
            (Path(folder) / file.name).symlink_to(file.resolve())
        (Path(folder) / "config.json").unlink()
        (Path(folder) / "config.json").write_text(json.dumps(config), "utf-8")
        yield folder


def _rows(name: str, found: dict[str, Any], of: str = "") -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for key, value in found.items():
        if isinstance(value, dict):
            rows += _rows(name, value, f"{of}{key} ")
        elif isinstance(value, list):
            rows += [(name, f"{of}{key}", one) for one in value[:MOST_SHOWN]]
        else:
            rows.append((name, f"{of}{key}", value))
    return rows
