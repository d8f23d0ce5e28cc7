"""What `make demo` shows: the pipeline at work on this machine, and how much faster it is than plain decoding.

A broker, one target verifier and two draft workers are started as processes of their own, which talk ZeroMQ over TCP;
so is a second broker with a target and no drafters, for comparison. A few prompts are completed before your eyes, with
colours that tell where each piece of text came from. Then the same prompts run again on both, in turn, and the medians
are compared. All processes are stopped at the end.
"""

from __future__ import annotations

import json
import signal
import sys
from contextlib import ExitStack
from statistics import median

import click

from specq.bench.prompts import DATA
from specq.bench.servers import Servers
from specq.cli.columns import columns
from specq.client import Client, Result
from specq.errors import SpecqError

PROMPTS = (("gsm8k", 1), ("gsm8k", 7), ("humaneval", 2))  # data set, line
HEADER = (
    "PROMPT",
    "TOKENS",
    "ROUNDS",
    "TOKENS/ROUND",
    "ACCEPTED",
    "FIRST TOKEN MS",
    "TOKENS/S",
    "PLAIN",
    "SPEED-UP",
)


@click.command()
@click.option("--max-tokens", default=96, show_default=True, help="Most tokens for each prompt.")
@click.option("--repeats", default=3, show_default=True, help="Runs of each prompt and side that the medians are of.")
@click.option("--drafters", default=2, show_default=True, help="Draft workers.")
def demo(max_tokens: int, repeats: int, drafters: int) -> None:
    """Start everything, show it, measure it, stop everything."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwind, so that no process is left behind
    try:
        with ExitStack() as stack:
            with_drafters, plain = (stack.enter_context(Servers("tiny", "tiny", n)) for n in (drafters, 0))
            start(with_drafters, plain)
            prompts = load_prompts()
            show(with_drafters.client, prompts, max_tokens)
            measured = measure((with_drafters.client, plain.client), prompts, max_tokens, repeats)
            report(prompts, measured, repeats)
    except SpecqError as error:
        click.echo(f"demo: {error}", err=True)
        sys.exit(1)
    click.echo("all processes stopped")


def start(with_drafters: Servers, plain: Servers) -> None:
    """Wait until all processes are ready, and show them."""
    click.echo("starting the processes (the first time, the engine compiles its kernels) ...")
    for servers in (with_drafters, plain):
        servers.wait_ready()
    click.echo(f"\n{processes(with_drafters)}\n\nand for plain decoding:\n{processes(plain)}\n")


def processes(servers: Servers) -> str:
    """Return the lines of `specq up` that name its processes."""
    return "\n".join(f"  {line}" for line in servers.output().splitlines() if " process " in line)


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
    pen.write("drafted, and accepted by the target", True)
    pen.write("   the target's own", False)
    pen.finish()
    for name, prompt in prompts:
        click.secho(f"\n{name}", bold=True)
        click.echo(f"{prompt.strip()}\n")
        for piece in client.stream(messages=chat(prompt), max_tokens=max_tokens):
            for text, drafted in piece.spans:
                pen.write(text, drafted)
            if piece.result:
                pen.finish()
                click.echo(f"({summary(piece.result)})")


class Pen:
    """Writes text in the colour of its origin; off a terminal, in «quotes» if it is the target's own."""

    def __init__(self, *, colours: bool) -> None:
        self.colours, self.quoting = colours, False

    def write(self, text: str, drafted: bool) -> None:
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


def measure(
    clients: tuple[Client, Client], prompts: list[tuple[str, str]], max_tokens: int, repeats: int
) -> list[tuple[list[Result], list[Result]]]:
    """Return, for each prompt, the results with and without drafters, taken in turn."""
    click.echo(f"\nthe same prompts again, {repeats} times each, with drafters and without, in turn ...\n")
    measured = []
    for _, prompt in prompts:
        pairs = [[c.generate(messages=chat(prompt), max_tokens=max_tokens) for c in clients] for _ in range(repeats)]
        measured.append(([own for own, _ in pairs], [plain for _, plain in pairs]))
    return measured


def report(prompts: list[tuple[str, str]], measured: list[tuple[list[Result], list[Result]]], repeats: int) -> None:
    """Print a line for each prompt, and the whole."""
    click.echo(columns([HEADER, *(row(name, *both) for (name, _), both in zip(prompts, measured, strict=True))]))
    own, plain = (rate([both[side] for both in measured]) for side in (0, 1))
    same = all(a.token_ids == b.token_ids for both in measured for a, b in zip(*both, strict=True))
    click.echo(f"\n{'the same texts' if same else 'NOT the same text everywhere'}, with drafters and without")
    click.secho(
        f"{own:.0f} tokens/s with drafters, {plain:.0f} without: {own / plain:.2f} times plain decoding "
        f"(medians of {repeats} runs, one session at a time, on this machine as busy as it is)",
        bold=True,
    )


def row(name: str, own: list[Result], plain: list[Result]) -> tuple[object, ...]:
    """Return the medians of one prompt."""
    stats = [result.stats for result in own]
    ours, theirs = (median(result.stats["tokens_per_second"] for result in results) for results in (own, plain))
    return (
        name,
        len(own[0].token_ids),
        f"{median(s['rounds'] for s in stats):.0f}",
        f"{median(s['mean_accepted_length'] for s in stats):.2f}",
        f"{median(s['acceptance_rate'] for s in stats):.0%}",
        f"{median(s['time_to_first_token_ms'] for s in stats):.0f}",
        f"{ours:.0f}",
        f"{theirs:.0f}",
        f"{ours / theirs:.2f}x",
    )


def rate(results: list[list[Result]]) -> float:
    """Return tokens a second over all prompts: all tokens over the medians of the times."""
    seconds = [median(len(r.token_ids) / r.stats["tokens_per_second"] for r in repeats) for repeats in results]
    return sum(len(repeats[0].token_ids) for repeats in results) / sum(seconds)


if __name__ == "__main__":
    demo()
