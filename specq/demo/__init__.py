"""The work of `specq demo`: show the pipeline, and its speed with and without speculation.

It starts the processes of `specq up`, with the same division of the machine. For comparison it starts a second broker
with a verifier that has no drafters. Three prompts are answered while the user watches. Colours show the origin of each
piece of text.

Then the same prompts run again in three ways, in turn. Plain decoding has no speculation. With lookup alone the
verifier drafts from repeated text. The third way is specq with all its drafters. The token ids of all runs must be
equal. `specq.demo.figures` compares the speeds. All processes are stopped at the end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import replace

import click

from specq.chat import pen_for, summary
from specq.client import Client, Result
from specq.config import NO_MODEL, Config
from specq.demo.figures import (
    LOOKUP,
    PLAIN,
    SPECQ,
    WAYS,
    Speed,
    Turns,
    are_same,
    conclusion,
    table,
)
from specq.processes.deployment import absent_sources, notes, placed
from specq.processes.servers import Servers, on_free_port
from specq.processes.up import telling
from specq.protocol import COLOCATED, DRAFT_WORKER, SHOWN
from specq.runtime import available_cores, has_kernels
from specq.runtime.usage import Usage, others_cores
from specq.samples import DATA

PROMPTS = (("gsm8k", 1), ("gsm8k", 7), ("humaneval", 2))  # data set, line
WARM_UPS = 2  # uncounted runs of each prompt: in its first seconds a verifier measures which drafts pay
NEXT = "next: specq up --serve starts a server for your own questions, with a web page at http://127.0.0.1:8000/"


def demo(config: Config, max_tokens: int, repeats: int) -> bool:
    """Start everything, show it, measure it, stop everything; return whether all texts were the same."""
    for line in notes(config):
        click.echo(line)
    with ExitStack() as stack:
        told = (telling(config), undrafted(config))
        full, alone = (stack.enter_context(Servers(on_free_port(each))) for each in told)
        start(full, alone, drafting(config))
        prompts = load_prompts()
        show(full.client, prompts, max_tokens, absent_sources(config))
        before = usage(full, alone)
        measured = measure(ways(full.client, alone.client, max_tokens), prompts, repeats)
        others = others_cores(before, usage(full, alone))
    click.echo("all processes stopped")
    return report(prompts, measured, drafting(config), others)


def usage(*servers: Servers) -> Usage | None:
    """Return the CPU time of the servers' processes and of all others; None if unknown."""
    pids = [pid for each in servers for pid in each.pids().values()]
    return Usage.known({str(pid): pid for pid in pids}, available_cores())


def undrafted(config: Config) -> Config:
    """Return the configuration of the same target with lookups as the only drafts."""
    chosen = placed(config)
    return replace(
        chosen,
        target=replace(chosen.target, draft_model="", heads=NO_MODEL, heads_tree=""),
        up=replace(chosen.up, drafters=0),
    )


def drafting(config: Config) -> str:
    """Return the sources of drafts besides lookups, in words."""
    chosen = placed(config)
    workers = (
        f"{chosen.up.drafters} {SHOWN[DRAFT_WORKER]}{'s' * (chosen.up.drafters > 1)}" if chosen.up.drafters else ""
    )
    own = SHOWN[COLOCATED] if chosen.target.draft_model else ""
    heads = "heads of the target" if chosen.target.heads else ""
    return " and ".join(filter(None, (own, heads, workers))) or "lookup only"


def start(full: Servers, alone: Servers, what_drafts: str) -> None:
    """Wait until all processes are ready, and show them."""
    click.echo(f"starting the processes{'' if has_kernels() else ' (first start: specq compiles its kernels)'} ...")
    full.wait_ready(tell=click.echo)
    click.echo("starting a second verifier without draft model and draft workers, for comparison ...")
    alone.wait_ready(tell=click.echo)
    click.echo(f"\nspecq, drafts from {what_drafts}:\n{processes(full)}\n")
    click.echo(f"plain decoding and lookup only:\n{processes(alone)}\n")


def processes(servers: Servers) -> str:
    """Return the lines with the names of the processes, indented."""
    return "\n".join(f"  {line}" for line in servers.table().splitlines())


def load_prompts() -> list[tuple[str, str]]:
    """Return (name, text) of the prompts to show."""
    found = []
    for dataset, number in PROMPTS:
        line = json.loads((DATA / f"{dataset}.jsonl").read_text("utf-8").splitlines()[number])
        found.append((line["id"], line["prompt"]))
    return found


# --- the answers --------------------------------------------------------------------------------------------------


def show(client: Client, prompts: list[tuple[str, str]], max_tokens: int, absent: Collection[str] = ()) -> None:
    """Complete the prompts, and print the texts as they grow."""
    pen = pen_for(otherwise="marks")
    pen.legend(absent)
    for name, prompt in prompts:
        click.secho(f"\n{name}", bold=pen.style == "colours")
        click.echo(f"{prompt.strip()}\n")
        for piece in client.stream(messages=chat(prompt), max_tokens=max_tokens):
            for text, origin in piece.spans:
                pen.write(text, origin)
            if piece.result:
                pen.finish()
                click.echo(f"({summary(piece.result)})")


def chat(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


# --- the figures --------------------------------------------------------------------------------------------------


def ways(full: Client, alone: Client, max_tokens: int) -> dict[str, Callable[[str], Result]]:
    """Return the function for each way to complete a prompt. `alone` uses lookups unless it decodes plainly."""

    def way(client: Client, mode: str) -> Callable[[str], Result]:
        return lambda prompt: client.generate(messages=chat(prompt), max_tokens=max_tokens, mode=mode)

    return {PLAIN: way(alone, "plain"), LOOKUP: way(alone, "async"), SPECQ: way(full, "async")}


def measure(complete: dict[str, Callable[[str], Result]], prompts: list[tuple[str, str]], repeats: int) -> list[Turns]:
    """Return, for each prompt, the results of each way. The ways take turns, and so do the prompts."""
    click.echo(
        f"\nmeasuring the same prompts with {', '.join(complete)}, one after the other: {WARM_UPS} warm-up turns and "
        f"{repeats} measured turns ...\n"
    )
    measured: list[Turns] = [{name: [] for name in complete} for _ in prompts]
    for number in range(WARM_UPS + repeats):
        for (_, prompt), results in zip(prompts, measured, strict=True):
            for name, run in complete.items():
                done = run(prompt)
                results[name] += [done] if number >= WARM_UPS else []
    return measured


def report(prompts: list[tuple[str, str]], measured: list[Turns], what_drafts: str, others: float | None) -> bool:
    """Print a line for each prompt, the conclusion, and the next command.

    Returns whether all texts are the same.
    """
    num_turns = len(measured[0][SPECQ])
    click.echo(table([name for name, _ in prompts], measured))
    click.echo(
        f"\nPLAIN, LOOKUP, SPECQ: tokens/s, median of {num_turns} turns, one prompt at a time\n"
        f"SPEEDUP: specq to plain decoding. VS LOOKUP: specq to lookup only. Both: lowest to highest turn\n"
        f"specq: drafts from {what_drafts}\n"
    )
    same = all(are_same(results) for results in measured)
    if same:
        runs = len(WAYS) * num_turns
        click.echo(f"all {runs} runs of each prompt have the same token ids (TEXT HASH: the start of their SHA-256)")
    speed = Speed.of(measured)
    for line in (str(speed), conclusion(speed, same, others, len(available_cores()))):
        click.secho(line, bold=pen_for().style == "colours")
    click.echo(NEXT)
    return same
