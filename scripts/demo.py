"""Show specq at work: `make demo`.

Starts a broker, a verifier and two drafters as processes that talk ZeroMQ over TCP, streams a few of the bundled prompts,
then stops the drafters and runs the same prompts again, for plain decoding on the same verifier. On a terminal accepted
drafts are green; elsewhere the target's own tokens (corrections, and the bonus after a draft accepted whole) stand in
«quotes».
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.resources import files

import click

from specq import Client
from specq.addresses import free_address
from specq.client import Piece
from specq.config import Config, load, override
from specq.errors import SpecqError
from workers.up import Group, members

NUM_PROMPTS = 2  # of each dataset
MAX_TOKENS = 96
START_S = 120.0


@dataclass(slots=True)
class Run:
    """The prompts run once: texts, and what they took."""

    texts: list[str] = field(default_factory=list)
    num_tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


def main() -> None:
    """Run the demonstration."""
    config = load()
    config = replace(config, broker=override(config.broker, bind=free_address()))
    click.echo("starting a broker, a verifier and two drafters ...")
    with Group(members(config, ["--log-level", "error"])) as group:
        group.wait_ready(START_S)
        show_processes(group, config)
        with Client(group.address) as client:
            client.generate("warm up", max_tokens=8, ignore_eos=True)
            drafted = run_all(client, aloud=True)
            stop_drafters(group, client)
            click.echo("the drafters are stopped; the same prompts again ...")
            plain = run_all(client, aloud=False)
    compare(drafted, plain)


def show_processes(group: Group, config: Config) -> None:
    """Say who runs, on which cores."""
    for member in group.members:
        click.echo(f"  {member.name:9} process {group.processes[member.name].pid}, core {list(member.cores)}")
    click.echo(f"  model {config.target.model}, drafted for by {config.draft.model}, at {group.address}\n")


def prompts() -> Iterator[str]:
    """Yield the first bundled prompts of each dataset."""
    for name in ("gsm8k", "humaneval"):
        lines = files("specq").joinpath("data", f"{name}.jsonl").read_text("utf-8").splitlines()
        yield from (json.loads(line)["prompt"] for line in lines[:NUM_PROMPTS])


def run_all(client: Client, *, aloud: bool) -> Run:
    """Stream all prompts, greedy; show each `aloud`, or only take the time."""
    run = Run()
    for prompt in prompts():
        if aloud:
            click.secho("> " + " ".join(prompt.split())[:110] + " ...", bold=True)
        started = time.perf_counter()
        pieces = client.stream(messages=[{"role": "user", "content": prompt}], max_tokens=MAX_TOKENS)
        last = show(pieces) if aloud else last_of(pieces)
        run.seconds += time.perf_counter() - started
        assert last.result is not None
        run.texts.append(last.result.text)
        run.num_tokens += last.result.usage["completion_tokens"]
    return run


def last_of(pieces: Iterator[Piece]) -> Piece:
    """Return the last piece."""
    *_, last = pieces
    return last


def show(pieces: Iterator[Piece]) -> Piece:
    """Print an answer as it grows, and what the drafts did for it; return the last piece."""
    last = Piece("")
    for last in pieces:
        for text, accepted in last.spans:
            click.echo(mark(text, accepted=accepted), nl=False)
        sys.stdout.flush()
    assert last.result is not None
    usage, stats = last.result.usage, last.result.stats
    click.echo(
        f"\n  {usage['completion_tokens']} tokens in {stats['rounds']} rounds: {stats['accepted_tokens']} of "
        f"{stats['draft_tokens']} checked drafts accepted, {stats['mean_accepted_length']:.2f} tokens a round\n"
    )
    return last


def mark(text: str, *, accepted: bool) -> str:
    """Return text that shows whose it is."""
    if sys.stdout.isatty():
        return click.style(text, fg="green") if accepted else text
    return text if accepted else f"«{text}»"


def stop_drafters(group: Group, client: Client) -> None:
    """End the drafters, and wait until the broker has noticed."""
    for member in group.members:
        if member.name.startswith("draft"):
            group.processes[member.name].terminate()
    while any(worker["role"] == "draft" for worker in client.status()["workers"]):
        time.sleep(0.1)


def compare(drafted: Run, plain: Run) -> None:
    """Print both speeds, and whether the texts are the same."""
    num_different = sum(a != b for a, b in zip(drafted.texts, plain.texts, strict=True))
    same = f"{num_different} of {len(plain.texts)} texts differ" if num_different else "the same texts"
    click.echo(f"with drafters     {drafted.tokens_per_second:6.1f} tokens/s")
    click.echo(f"without drafters  {plain.tokens_per_second:6.1f} tokens/s, {same}")
    click.echo(f"{drafted.tokens_per_second / plain.tokens_per_second:.2f} times plain decoding on the same verifier")


if __name__ == "__main__":
    try:
        main()
    except SpecqError as error:
        sys.exit(f"specq: {error}")
