"""What `specq demo` shows: the pipeline at work on this machine, and how fast it is with and without speculation.

The processes that `specq up` would start, with the same division of the machine, and a second broker with a verifier that has
nobody to draft for it, for comparison. Three prompts are answered while the user watches, in colours that show where each piece of
text came from. Then the same prompts run again in three ways, in turn, and the medians are compared: plain decoding, which has no
speculation at all; lookup alone, where the verifier drafts what the text repeats; and specq with all that drafts here. The token
ids of all runs must be the same. All processes are stopped at the end.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from hashlib import sha256
from statistics import median

import click

from specq.bench.prompts import DATA
from specq.bench.servers import Servers, on_free_port
from specq.chat import pen_for, summary
from specq.client import Client, Result
from specq.config import Config
from specq.runtime import columns
from workers.deployment import notes, placed
from workers.up import telling

PROMPTS = (("gsm8k", 1), ("gsm8k", 7), ("humaneval", 2))  # data set, line
HEADER = (
    *("PROMPT", "TOKENS", "PLAIN", "LOOKUP", "SPECQ", "VS PLAIN", "VS LOOKUP"),
    *("TOKENS/ROUND", "ACCEPTED", "FIRST TOKEN MS", "SAME TEXT"),
)
WARM_UPS = 2  # runs of each prompt that do not count: a verifier measures in its first seconds which drafts pay
PLAIN, LOOKUP, SPECQ = WAYS = ("plain", "lookup", "specq")

Measured = dict[str, list[Result]]  # way -> the results of a prompt


def demo(config: Config, max_tokens: int, repeats: int) -> bool:
    """Start everything, show it, measure it, stop everything; return whether all texts were the same."""
    for line in notes(config):
        click.echo(line)
    with ExitStack() as stack:
        told = (telling(config), undrafted(config))
        full, alone = (stack.enter_context(Servers(on_free_port(each))) for each in told)
        start(full, alone, drafting(config))
        prompts = load_prompts()
        show(full.client, prompts, max_tokens)
        measured = measure(ways(full.client, alone.client, max_tokens), prompts, repeats)
    are_same = report(prompts, measured, repeats, drafting(config))
    click.echo("all processes stopped")
    return are_same


def undrafted(config: Config) -> Config:
    """Return the configuration of the same target without anything that drafts but its lookups."""
    chosen = placed(config)
    return replace(chosen, target=replace(chosen.target, draft_model=""), up=replace(chosen.up, drafters=0))


def drafting(config: Config) -> str:
    """Return what drafts under a configuration besides lookups, in words."""
    chosen = placed(config)
    workers = f"{chosen.up.drafters} draft worker{'s' * (chosen.up.drafters > 1)}" if chosen.up.drafters else ""
    own = "draft model in the verifier" if chosen.target.draft_model else ""
    return " and ".join(filter(None, (own, workers))) or "nothing but lookups"


def start(full: Servers, alone: Servers, what_drafts: str) -> None:
    """Wait until all processes are ready, and show them."""
    click.echo("starting the processes (the first time, the engine compiles its kernels) ...")
    full.wait_ready(tell=click.echo)
    click.echo("the same without drafts, for comparison:")
    alone.wait_ready(tell=click.echo)
    click.echo(f"\nspecq, {what_drafts}:\n{processes(full)}\n\nplain and lookup alone:\n{processes(alone)}\n")


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
    pen = pen_for(otherwise="marks")
    pen.legend()
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
    """Return how a prompt is completed in each way. `alone` looks up what repeats unless it decodes plainly."""

    def way(client: Client, mode: str) -> Callable[[str], Result]:
        return lambda prompt: client.generate(messages=chat(prompt), max_tokens=max_tokens, mode=mode)

    return {PLAIN: way(alone, "plain"), LOOKUP: way(alone, "async"), SPECQ: way(full, "async")}


def measure(
    complete: dict[str, Callable[[str], Result]], prompts: list[tuple[str, str]], repeats: int
) -> list[Measured]:
    """Return, for each prompt, the results of each way. The ways take turns, and so do the prompts."""
    click.echo(
        f"\nthe same prompts again: {', '.join(complete)}, in turn, {WARM_UPS} times to warm up and {repeats} times ...\n"
    )
    measured: list[Measured] = [{name: [] for name in complete} for _ in prompts]
    for number in range(WARM_UPS + repeats):
        for (_, prompt), results in zip(prompts, measured, strict=True):
            for name, run in complete.items():
                done = run(prompt)
                results[name] += [done] if number >= WARM_UPS else []
    return measured


def report(prompts: list[tuple[str, str]], measured: list[Measured], repeats: int, what_drafts: str) -> bool:
    """Print a line for each prompt, and the whole; return whether all texts are the same."""
    rows = [row(name, results) for (name, _), results in zip(prompts, measured, strict=True)]
    click.echo(columns([HEADER, *rows, total(measured)]))
    click.echo(
        f"\ntokens/s: medians of {repeats} runs, one at a time, on this machine as busy as it is. specq: {what_drafts}"
    )
    are_same = all(len(digests(results)) == 1 for results in measured)
    runs = len(WAYS) * repeats
    proof = f"in all {runs} runs of each prompt the token ids are the same (SAME TEXT: the start of their SHA-256)"
    click.echo(f"the same texts: {proof}" if are_same else "NOT the same text everywhere, which is a bug of specq")
    for line in verdict(*(rate([results[way] for results in measured]) for way in WAYS)):
        click.secho(line, bold=pen_for().style == "colours")
    return are_same


def digests(results: Measured) -> set[str]:
    """Return a short hash of the token ids of each run: one, if speculation changes nothing."""
    runs = (result.token_ids for each in results.values() for result in each)
    return {sha256(json.dumps(token_ids).encode()).hexdigest()[:8] for token_ids in runs}


def verdict(plain: float, lookup: float, specq: float) -> list[str]:
    """Return what the rates in tokens/s come to; the last line says so if drafting gains nothing over the lookup alone."""
    over = f"{specq / plain:.2f} times plain decoding ({plain:.0f}), {specq / lookup:.2f} times lookup alone ({lookup:.0f})"
    lines = [f"specq: {specq:.0f} tokens/s, {over}"]
    if specq < lookup:
        lines.append("here drafting gains nothing over the lookup alone")
    return lines


def row(name: str, results: Measured) -> tuple[object, ...]:
    """Return the medians of one prompt; rounds and acceptance are those of specq."""
    stats = [result.stats for result in results[SPECQ]]
    rates = [median(result.stats["tokens_per_second"] for result in results[way]) for way in WAYS]
    return (
        name,
        len(results[SPECQ][0].token_ids),
        *rated(*rates),
        f"{median(s['mean_accepted_length'] for s in stats):.2f}",
        f"{median(s['acceptance_rate'] for s in stats):.0%}",
        f"{median(s['time_to_first_token_ms'] for s in stats):.0f}",
        " != ".join(sorted(digests(results))),
    )


def total(measured: list[Measured]) -> tuple[object, ...]:
    """Return the last line of the table: all prompts together."""
    rates = [rate([results[way] for results in measured]) for way in WAYS]
    num_tokens = sum(len(results[SPECQ][0].token_ids) for results in measured)
    return ("all", num_tokens, *rated(*rates), "", "", "", "")


def rated(plain: float, lookup: float, specq: float) -> tuple[str, ...]:
    """Return the columns of the rates."""
    return (
        *(f"{rate:.0f}" for rate in (plain, lookup, specq)),
        f"{specq / plain:.2f}x",
        f"{specq / lookup:.2f}x",
    )


def rate(results: list[list[Result]]) -> float:
    """Return tokens a second over all prompts: all tokens over the medians of the times."""
    seconds: list[float] = [
        median(len(r.token_ids) / r.stats["tokens_per_second"] for r in repeats) for repeats in results
    ]
    return sum(len(repeats[0].token_ids) for repeats in results) / sum(seconds)
