"""`specq submit`: prompts from a JSONL file, results to a JSONL file."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import click

from specq.cli.options import section_options
from specq.client import Client, Result
from specq.client.request import sampling_params
from specq.config import ClientConfig, load, override
from specq.submit import Line, read_lines, result_line, run_lines


@click.command()
@click.argument("prompts", type=click.File("rb"))
@click.option("--out", default="-", show_default=True, help="File for the results; - is standard output.")
@click.option("--max-tokens", type=int, help="Most tokens to generate.  [default: 128]")
@click.option("--temperature", type=float, help="0 is greedy.  [default: 0]")
@click.option("--top-k", type=int, help="Sample among the K likeliest tokens; 0: all.  [default: 0]")
@click.option("--top-p", type=float, help="Sample among the likeliest tokens of this mass, in (0, 1].  [default: 1]")
@click.option("--min-p", type=float, help="Drop tokens less likely than this share of the likeliest.  [default: 0]")
@click.option("--seed", type=int, help="The same seed gives the same text; drawn if temperature > 0 and none is given.")
@click.option("--strategy", help="How drafts are judged.  [default: deterministic]")
@click.option("--stop", multiple=True, help="Text that ends a completion and is not part of it; may be repeated.")
@click.option("--ignore-eos", is_flag=True, default=None, help="Go on past the model's end-of-text tokens.")
@click.option("--concurrency", type=click.IntRange(1, 4096), default=16, show_default=True, help="Jobs at a time.")
@click.option("--chat", is_flag=True, help="Take each prompt as a user's message, for the model's chat template.")
@click.option("--stream", is_flag=True, help="Show the texts as they grow, one after the other.")
@section_options(ClientConfig)
@click.pass_context
def submit(
    ctx: click.Context,
    /,
    prompts: BinaryIO,
    out: str,
    config_file: str | None,
    broker: str | None,
    timeout_s: float | None,
    concurrency: int,
    *,
    chat: bool,
    stream: bool,
    stop: tuple[str, ...],
    **params: Any,
) -> None:
    """Send the prompts of a JSONL file (- is standard input); write a line of results for each, in order.

    A line is {"prompt": ...}, {"messages": [...]} or {"token_ids": [...]}, optionally with "id" and any sampling
    parameter. The exit status is 0 only if no line failed.
    """
    config = override(load(config_file).client, broker=broker, timeout_s=timeout_s)
    defaults = {name: value for name, value in {**params, "stop": stop or None}.items() if value is not None}
    sampling_params(defaults)
    with Client(config.broker, timeout_s=config.timeout_s) as client:
        _ = client.served  # no broker and no verifier are one message here, not one for each line
        with _results(out, prompts) as file, _progress(prompts, stream=stream) as bar:
            write, lines = _Writer(file, bar), _noting_unknown(read_lines(prompts))
            show = _shower(to_stderr=out == "-") if stream else None
            num_failed = run_lines(client, lines, defaults, write, concurrency=concurrency, as_chat=chat, show=show)
    if num_failed:
        click.echo(f"specq: {num_failed} of {write.num_written} lines failed: {write.first_error}", err=True)
        ctx.exit(1)


@contextlib.contextmanager
def _results(out: str, prompts: BinaryIO) -> Iterator[BinaryIO]:
    """Open the file for results; raises click's one-line errors if it cannot be written or is the prompts file."""
    if out == "-":
        yield sys.stdout.buffer
        return
    path = Path(out)
    if path.exists() and prompts.name not in ("-", "<stdin>") and path.samefile(prompts.name):
        raise click.UsageError(f"{out} is the prompts file; give --out another name")
    try:
        with path.open("wb") as file:
            yield file
    except OSError as error:
        raise click.FileError(out, error.strerror or str(error)) from None


def _noting_unknown(lines: Iterator[Line]) -> Iterator[Line]:
    """Pass lines on; say once of each unknown key that it is ignored."""
    noted: set[str] = set()
    for line in lines:
        new = [name for name in line.unknown if name not in noted]
        noted.update(new)
        if new:
            click.echo(f"specq: line {line.number}: ignored unknown {', '.join(map(repr, new))}", err=True)
        yield line


def _shower(*, to_stderr: bool) -> Any:
    return lambda text: click.echo(text, nl=False, err=to_stderr)


def _progress(prompts: BinaryIO, *, stream: bool) -> Any:
    """Return a progress bar on standard error if that is a terminal and the number of prompts can be known."""
    if stream or not sys.stderr.isatty() or not prompts.seekable():
        return contextlib.nullcontext()
    length = sum(1 for raw in prompts if raw.strip())
    prompts.seek(0)
    return click.progressbar(length=length, label="prompts", show_pos=True, file=sys.stderr)


class _Writer:
    """Writes results, counts them, and moves the progress bar."""

    def __init__(self, file: BinaryIO, bar: Any) -> None:
        self._file, self._bar = file, bar
        self.num_written, self.first_error = 0, ""

    def __call__(self, result: Result) -> None:
        self._file.write(result_line(result))
        self._file.flush()
        self.num_written += 1
        self.first_error = self.first_error or result.error or ""
        if self._bar is not None:
            self._bar.update(1)
