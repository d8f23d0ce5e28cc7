"""Grammars, temperatures, ways to serve, strategies and other options: combinations that cover all pairs of them.

    python -m tests.grammar.runs.combinations --model tiny --combinations 400 --out combinations_tiny.json
    python -m tests.grammar.runs.combinations --only 17 --model tiny ...   the same combination again, by its number

Each combination runs as it is, and decodes plainly with the same grammar and seed. Under `deterministic` both must have
the same tokens and the same end. A text that ends by `stop` must follow its grammar. Texts cut by length are counted.
The number of a combination is its seed. The status is 1 if a combination fails. In an environment with vLLM, only the
ways of its engine run. It needs the package jsonschema, and Debian's json-schema-test-suite.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from specq.client import Client
from specq.models import resolve_model
from specq.processes.servers import Servers
from specq.protocol import JobError
from specq.runtime.machine import describe
from specq.text import TextCodec, load_tokenizer_files
from tests.grammar.runs.cases import FORM_NAMES, fault_of, grammar_of, take_suite
from tests.grammar.runs.covering import Row, covering, pairs_left
from tests.grammar.runs.ways import PATIENCE_S, WAYS, Arguments, WayOutcome, configured, serve, ways_of

PROMPTS = (
    "Return JSON about the weather in Berlin.",
    "A customer writes: the app crashes when I open my invoice. Fill in the form.",
    "Call the function that books a flight from Berlin to Tokyo on 3 May.",
)
MAX_TOKENS = 256
STOPS = ["er", "1,"]
EXTRAS: dict[str, Callable[[TextCodec], Arguments]] = {
    "none": lambda _: {},
    "penalties": lambda _: {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    "filters": lambda _: {"top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "banned": lambda codec: {"bad_words": ["the", "in"], "logit_bias": {codec.encode("a")[0]: 3.0}},
    "min_tokens": lambda _: {"min_tokens": 20},
    "logprobs": lambda _: {"logprobs": 3},
    "stop strings": lambda _: {"stop": STOPS},
}
Serve = Callable[[Sequence[Arguments], int], list[WayOutcome]]


@dataclass(frozen=True)
class Combination:
    """One row: its number, its values by factor, its grammar, and the arguments of its job."""

    number: int
    row: Row
    grammar: dict[str, Any]
    arguments: Arguments

    @property
    def plain(self) -> Arguments:
        """The same job, decoded plainly."""
        names = self.arguments.keys() - WAYS[self.row["way"]][1].keys()
        return {name: self.arguments[name] for name in names} | {"mode": "plain"}

    def fault(self, found: WayOutcome, plain: WayOutcome) -> str:
        """Return what is wrong, "": nothing."""
        is_same = (found.finish, found.reason) == (plain.finish, plain.reason)
        if found.finish != "error":  # a failed job's last round has no tokens, and with drafts it is longer
            is_same = is_same and found.token_ids == plain.token_ids
        if self.row["strategy"] == "deterministic" and not is_same:
            return "differs from plain decoding"
        if found.finish == "error" and plain.finish != "error":
            return f"failed: {found.reason}"
        if found.finish == "stop" and not self._may_be_cut(found):
            return fault_of(self.grammar, found.text)
        return ""

    def _may_be_cut(self, found: WayOutcome) -> bool:
        """Return whether a stop string may have ended the text. The grammar says nothing of such a text."""
        return self.row["extra"] == "stop strings" and fault_of(self.grammar, found.text) != ""


def combinations_of(model: str, num: int, ways: Sequence[str], seed: int = 0) -> tuple[list[Combination], int]:
    """Return the combinations, and how many pairs of values they leave out."""
    factors = {
        "form": FORM_NAMES,
        "way": ways,
        "temperature": ("0", "0.8"),
        "strategy": ("deterministic", "deterministic ", "probabilistic", "typical"),  # the first twice as often
        "extra": tuple(EXTRAS),
        "load": ("1", "16"),
    }
    rows = covering(factors, num, ("form", "way", "temperature"), seed)
    left = pairs_left(factors, rows)
    codec = TextCodec(load_tokenizer_files(resolve_model(model, "target")))
    return [_combination(number, row, codec) for number, row in enumerate(rows)], left


def _combination(number: int, row: Row, codec: TextCodec) -> Combination:
    row = {name: value.strip() for name, value in row.items()}
    grammar = grammar_of(row["form"], number)
    arguments = {
        "token_ids": codec.encode(PROMPTS[number % len(PROMPTS)]),
        "grammar": grammar,
        "temperature": float(row["temperature"]),
        "strategy": row["strategy"],
        "seed": number,
        "max_tokens": MAX_TOKENS,
        **EXTRAS[row["extra"]](codec),
        **WAYS[row["way"]][1],
    }
    return Combination(number, row, grammar, arguments)


@contextmanager
def serving(place: str, model: str) -> Iterator[Serve]:
    """Yield what runs jobs at a place."""
    if place.startswith("late"):
        from tests.grammar.runs.late_model import LateServer

        with closing(LateServer(model, has_drafts=place != "late")) as server:
            yield server.serve
            click.echo(f"{place}: at most {server.most_in_flight} steps in flight")
        return
    with configured(place, model) as config, Servers(config) as servers:
        servers.wait_ready(600)
        with Client(servers.address, timeout_s=PATIENCE_S) as client:
            yield lambda jobs, in_flight: serve(client, jobs, in_flight)


def run_place(
    place: str, model: str, asked: Sequence[Combination]
) -> Iterator[tuple[Combination, WayOutcome, WayOutcome]]:
    """Yield what the combinations of a place came to, and their plain decoding there."""
    with serving(place, model) as run:
        for load in ("1", "16"):
            some = [one for one in asked if one.row["load"] == load]
            found = run([one.arguments for one in some], int(load))
            yield from zip(some, found, run([one.plain for one in some], 8), strict=True)


def taken_suite(model: str) -> int:
    """Let the cases have the schemas of Debian's suite that this model's grammars take."""
    from specq.engines import read_info
    from specq.grammar import GrammarBuilder

    at = Path(resolve_model(model, "target"))
    info = read_info(at)
    return take_suite(lambda: GrammarBuilder(load_tokenizer_files(str(at)), info.vocab_size, info.eos_ids))


@click.command()
@click.option("--model", default="tiny", show_default=True, help="Target: tiny or smollm2.")
@click.option("--combinations", "num", default=400, show_default=True, help="Number of combinations.")
@click.option("--only", multiple=True, type=int, help="Run these numbers alone.")
@click.option("--way", "some_ways", multiple=True, help="Run the combinations of these ways alone.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="File for the report, JSON.")
def main(model: str, num: int, only: tuple[int, ...], some_ways: tuple[str, ...], out: Path | None) -> None:
    """Run combinations and print what failed."""
    ways = ways_of(model, has_vllm=find_spec("vllm") is not None)
    num_suite = taken_suite(model)
    rows, left = combinations_of(model, num, ways)
    asked = [one for one in rows if (not only or one.number in only) if not some_ways or one.row["way"] in some_ways]
    skipped = [way for way in WAYS if way not in ways]
    about: dict[str, Any] = {
        "model": model,
        "suite_schemas": num_suite,
        "pairs_left_out": left,
        "ways_skipped": skipped,
    }
    counts, failures, began = Counter[str](), list[dict[str, Any]](), time.monotonic()
    by_way: dict[str, Counter[str]] = {way: Counter() for way in ways}
    for place in dict.fromkeys(WAYS[way][0] for way in ways):
        own = [one for one in asked if WAYS[one.row["way"]][0] == place]
        for one, found, plain in run_place(place, model, own) if own else ():
            fault = one.fault(found, plain)
            for counter in (counts, by_way[one.row["way"]]):
                _count(counter, one, found, fault)
            if fault:
                failures.append(_failure(one, found, plain, fault))
                click.echo(f"{one.number}: {one.row}: {fault[:300]}")
        seconds = round(time.monotonic() - began)
        click.echo(f"{place}: {json.dumps(counts)} after {seconds} s")
        if out is not None:  # what is known if a later place fails
            about |= {"counts": counts, "by_way": by_way, "failures": failures, "seconds": seconds}
            out.write_text(json.dumps(_described() | about, indent=1, ensure_ascii=False) + "\n", "utf-8")
    click.echo(json.dumps({"counts": counts, "by_way": by_way}, indent=1))
    sys.exit(1 if failures else 0)


def _described() -> dict[str, Any]:
    return describe()


def _count(counter: Counter[str], one: Combination, found: WayOutcome, fault: str) -> None:
    counter["combinations"] += 1
    counter["failed combinations"] += bool(fault)
    counter[f"ended by {found.finish}"] += 1
    counter["tokens"] += len(found.token_ids)
    counter["draft tokens"] += found.drafted
    counter["accepted tokens"] += found.accepted
    counter["compared"] += one.row["strategy"] == "deterministic"


def _failure(one: Combination, found: WayOutcome, plain: WayOutcome, fault: str) -> dict[str, Any]:
    return {"number": one.number, "row": one.row, "fault": fault, "found": asdict(found), "plain": asdict(plain)}


if __name__ == "__main__":
    try:
        main()
    except JobError as error:
        raise click.ClickException(str(error)) from None
