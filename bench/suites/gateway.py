"""`specq bench gateway`: what HTTP adds to the Python client."""

from __future__ import annotations

from statistics import median

import click

from bench.gateway import MOST_FIRST_MS, MOST_TOKEN_MS, added, measure
from bench.report import Report, figure, show
from bench.suite import COUNT, suite


@suite("gateway")
@click.option("--model", default="tiny", show_default=True, help="Target model: bundled, a directory, or a hub name.")
@click.option("--repeats", type=COUNT, default=20, show_default=True, help="Streams of each way, in turn.")
@click.option("--max-tokens", type=COUNT, default=64, show_default=True, help="Tokens of each stream.")
@click.option("--streams", type=COUNT, multiple=True, default=(200,), show_default=True, help="Streams at a time.")
def command(report: Report, *, model: str, repeats: int, max_tokens: int, streams: tuple[int, ...]) -> None:
    """Measure time to the first text and a token through the gateway and without it, and many streams at a time."""
    report.update(settings={"model": model, "repeats": repeats, "max_tokens": max_tokens, "streams": list(streams)})
    result = measure(model, repeats, max_tokens, streams)
    report.update(figures={name: figure("ms", values) for name, values in result["latency"].items()}, results=result)
    rows = [(name, f"{median(values):.3f} ms") for name, values in result["latency"].items()]
    many = [tuple(one.values()) for one in result["streams"]]
    more = added(result["latency"])
    verdicts = [
        f"the gateway adds {more['first']:.2f} ms to the first text (at most {MOST_FIRST_MS}), medians",
        f"and {more['token']:.3f} ms a token (at most {MOST_TOKEN_MS})",
        *(
            f"{one['same']} of {one['streams']} streams at a time had the text of their seed"
            for one in result["streams"]
        ),
    ]
    show([("WAY", "MEDIAN"), *rows], [" ".join(map(str, row)) for row in many] + verdicts)
