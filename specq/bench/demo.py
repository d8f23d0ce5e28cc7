"""What `specq demo` shows: the pipeline at work on this machine, and how fast it is with and without speculation.

A broker, one target verifier and two draft workers start as processes of their own, which talk ZeroMQ over TCP; a second
broker with a target and no drafters starts for comparison. A few prompts are completed while the user watches, in colours
that show where each piece of text came from. Then the same prompts run again in three ways, in turn, and the medians are
compared: plain decoding, which has no speculation at all; lookup alone, where the verifier drafts what the text repeats; and
drafters together with the lookup. All processes are stopped at the end.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median

import click

from specq.bench.prompts import DATA
from specq.bench.servers import Servers, pair_config
from specq.client import Client, Result
from specq.models import PREFERRED, default_pair
from specq.protocol import TARGETS_OWN
from specq.runtime import columns

PROMPTS = (("gsm8k", 1), ("gsm8k", 7), ("humaneval", 2))  # data set, line
HEADER = (
    "PROMPT",
    "TOKENS",
    "ROUNDS",
    "TOKENS/ROUND",
    "ACCEPTED",
    "FIRST TOKEN MS",
    "TOKENS/S",
    "LOOKUP ALONE",
    "PLAIN",
    "VS LOOKUP",
    "VS PLAIN",
)
DRAFTERS, LOOKUP, PLAIN = WAYS = ("with drafters", "by lookup alone", "plain")

Measured = dict[str, list[Result]]  # way -> the results of a prompt


def demo(max_tokens: int, repeats: int, num_drafters: int) -> None:
    """Start everything, show it, measure it, stop everything."""
    pair = default_pair()
    if pair != PREFERRED:
        click.echo(
            f"{PREFERRED} or its draft model is not here (specq models); this runs on {pair}, a toy that babbles"
        )
    with ExitStack() as stack:
        with_drafters, alone = (stack.enter_context(Servers(pair_config(pair, pair, n))) for n in (num_drafters, 0))
        start(with_drafters, alone)
        prompts = load_prompts()
        show(with_drafters.client, prompts, max_tokens)
        measured = measure(ways(with_drafters.client, alone.client, max_tokens), prompts, repeats)
        report(prompts, measured, repeats)
    click.echo("all processes stopped")


def start(with_drafters: Servers, alone: Servers) -> None:
    """Wait until all processes are ready, and show them."""
    click.echo("starting the processes (the first time, the engine compiles its kernels) ...")
    for servers in (with_drafters, alone):
        servers.wait_ready()
    click.echo(f"\n{processes(with_drafters)}\n\nand without drafters, for comparison:\n{processes(alone)}\n")


def processes(servers: Servers) -> str:
    """Return the lines that name the processes, indented."""
    return "\n".join(f"  {line}" for line in servers.table().splitlines())


def load_prompts() -> list[tuple[str, str]]:
    """Return (name, text) of the prompts to show."""
    found = []
    for dataset, number in PROMPTS:
        line = json.loads((DATA / f"{dataset}.jsonl").read_text("utf-8").splitlines()[number])
        found.append((line["id"], line["prompt"]))
    return found


# --- the show -----------------------------------------------------------------------------------------------------


def show(client: Client, prompts: list[tuple[str, str]], max_tokens: int) -> None:
    """Complete the prompts, printing the texts as they grow."""
    pen = Pen(colours=sys.stdout.isatty())
    pen.write("drafted, and accepted by the target   ", drafted=True)
    pen.write("the target's own", drafted=False)
    pen.finish()
    for name, prompt in prompts:
        click.secho(f"\n{name}", bold=True)
        click.echo(f"{prompt.strip()}\n")
        for piece in client.stream(messages=chat(prompt), max_tokens=max_tokens):
            for text, origin in piece.spans:
                pen.write(text, drafted=origin not in TARGETS_OWN)
            if piece.result:
                pen.finish()
                click.echo(f"({summary(piece.result)})")


class Pen:
    """Writes text in the colour of its origin; off a terminal, in «quotes» if it is the target's own."""

    def __init__(self, *, colours: bool) -> None:
        self.colours, self.quoting = colours, False

    def write(self, text: str, *, drafted: bool) -> None:
        if self.colours:
            click.secho(text, fg="green" if drafted else "yellow", nl=False)
            return
        opening = "«" if not drafted and not self.quoting else ""
        closing = "»" if drafted and self.quoting else ""
        self.quoting = not drafted
        click.echo(f"{closing}{opening}{text}", nl=False)

    def finish(self) -> None:
        """End the line."""
        click.echo("»" if self.quoting else "")
        self.quoting = False


def summary(result: Result) -> str:
    """Return one completion's speculation in a line."""
    stats = result.stats
    kept = f"{stats['accepted_tokens']} of {stats['draft_tokens']} checked drafts accepted"
    return (
        f"{len(result.token_ids)} tokens in {stats['rounds']} rounds, {kept}, {stats['tokens_per_second']:.0f} tokens/s"
    )


def chat(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


# --- the figures --------------------------------------------------------------------------------------------------


def ways(with_drafters: Client, alone: Client, max_tokens: int) -> dict[str, Callable[[str], Result]]:
    """Return how a prompt is completed in each way. `alone` has no drafters; it looks up what repeats unless it decodes plainly."""

    def way(client: Client, mode: str) -> Callable[[str], Result]:
        return lambda prompt: client.generate(messages=chat(prompt), max_tokens=max_tokens, mode=mode)

    return {DRAFTERS: way(with_drafters, "async"), LOOKUP: way(alone, "async"), PLAIN: way(alone, "plain")}


def measure(
    complete: dict[str, Callable[[str], Result]], prompts: list[tuple[str, str]], repeats: int
) -> list[Measured]:
    """Return, for each prompt, the results of each way, taken in turn."""
    click.echo(f"\nthe same prompts again, {repeats} times each: {', '.join(complete)}, in turn ...\n")
    measured: list[Measured] = []
    for _, prompt in prompts:
        turns = [{name: run(prompt) for name, run in complete.items()} for _ in range(repeats)]
        measured.append({name: [turn[name] for turn in turns] for name in complete})
    return measured


def report(prompts: list[tuple[str, str]], measured: list[Measured], repeats: int) -> None:
    """Print a line for each prompt, and the whole."""
    click.echo(columns([HEADER, *(row(name, results) for (name, _), results in zip(prompts, measured, strict=True))]))
    texts = [{tuple(result.token_ids) for results in ways.values() for result in results} for ways in measured]
    same = "the same texts" if all(len(found) == 1 for found in texts) else "NOT the same text everywhere"
    click.echo(f"\n{same}: {', '.join(WAYS)}")
    rates = {name: rate([results[name] for results in measured]) for name in WAYS}
    for line in summaries(rates):
        click.secho(line, bold=True)
    click.echo(f"(medians of {repeats} runs, one session at a time, on this machine as busy as it is)")


def summaries(rates: dict[str, float]) -> list[str]:
    """Return the rates in tokens/s as text; the last line says so if drafters gain nothing over the lookup alone."""
    drafters, lookup, plain = (rates[name] for name in WAYS)
    over = f"{drafters / plain:.2f} times plain decoding, {drafters / lookup:.2f} times lookup alone"
    lines = [
        f"plain decoding (no speculation at all): {plain:.0f} tokens/s",
        f"lookup alone (the verifier drafts what the text repeats): {lookup:.0f} tokens/s, {lookup / plain:.2f} times plain",
        f"with drafters and lookup: {drafters:.0f} tokens/s, {over}",
    ]
    if drafters < lookup:
        lines.append("here the drafters gain nothing over the lookup alone")
    return lines


def row(name: str, results: Measured) -> tuple[object, ...]:
    """Return the medians of one prompt; rounds and acceptance are those of the way with drafters."""
    stats = [result.stats for result in results[DRAFTERS]]
    drafters, lookup, plain = (median(result.stats["tokens_per_second"] for result in results[way]) for way in WAYS)
    return (
        name,
        len(results[DRAFTERS][0].token_ids),
        f"{median(s['rounds'] for s in stats):.0f}",
        f"{median(s['mean_accepted_length'] for s in stats):.2f}",
        f"{median(s['acceptance_rate'] for s in stats):.0%}",
        f"{median(s['time_to_first_token_ms'] for s in stats):.0f}",
        f"{drafters:.0f}",
        f"{lookup:.0f}",
        f"{plain:.0f}",
        f"{drafters / lookup:.2f}x",
        f"{drafters / plain:.2f}x",
    )


def rate(results: list[list[Result]]) -> float:
    """Return tokens a second over all prompts: all tokens over the medians of the times."""
    seconds: list[float] = [
        median(len(r.token_ids) / r.stats["tokens_per_second"] for r in repeats) for repeats in results
    ]
    return sum(len(repeats[0].token_ids) for repeats in results) / sum(seconds)
