"""`specq submit`: sends prompts from a JSONL file and writes results to a JSONL file."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import click

from specq.cli.groups import GroupedCommand, GroupedOption
from specq.cli.options import out_option, section_options
from specq.cli.parameters import given, parameter_options, schema_option
from specq.cli.waiting import WaitReport, wait_options
from specq.client import (
    Client,
    JobDesk,
    PromptLine,
    Result,
    ResultsFile,
    check_values,
    detach_lines,
    read_lines,
    result_line,
    run_lines,
)
from specq.config import ClientConfig, kinds, load, override
from specq.runtime import writing

_FILES: dict[str, Any] = {"cls": GroupedOption, "group": "Prompts and results"}


@click.command(cls=GroupedCommand, context_settings={"max_content_width": 120})
@click.argument("prompts", type=click.File("rb"))
@out_option(**_FILES)
@click.option(
    "--chat", is_flag=True, help="Send each prompt as a user message, with the model's chat template.", **_FILES
)
@click.option("--stream", is_flag=True, help="Print the texts while they are generated, one after another.", **_FILES)
@click.option(
    "--concurrency",
    type=click.IntRange(1, 4096),
    default=16,
    show_default=True,
    help="Maximum number of prompts in flight.",
    **_FILES,
)
@click.option("--verbose", is_flag=True, help="Add all counters to each result, under `internal`.", **_FILES)
@wait_options(**_FILES)
@click.option("--detach", is_flag=True, help="Submit the jobs, print their ids, one per line, and exit.", **_FILES)
@click.option(
    "--priority",
    type=int,
    help="Job priority; higher runs first. With keys, your key sets the maximum.  [default: 0]",
    **_FILES,
)
@click.option(
    "--deadline",
    type=float,
    help="Fail a job that has not finished after this long, in seconds.  [default: none]",
    **_FILES,
)
@click.option(
    "--cache-salt",
    help="Share the KV cache and drafts from earlier texts only with jobs of the same salt.  [default: none]",
    **_FILES,
)
@click.option(
    "--trace",
    is_flag=True,
    default=None,
    help="Record the events of each job in all processes, for `specq trace`.",
    **_FILES,
)
@parameter_options
@schema_option("each text", cls=GroupedOption, group="Shaping")
@section_options(ClientConfig)
@click.pass_context
def submit(
    ctx: click.Context,
    /,
    prompts: BinaryIO,
    out: str,
    config_file: str | None,
    concurrency: int,
    wait_seconds: float,
    *,
    chat: bool,
    stream: bool,
    verbose: bool,
    wait: bool,
    detach: bool,
    **values: Any,
) -> None:
    """Send the prompts of a JSONL file (- is standard input) and write one result line per completion, in order.

    A line is {"prompt": ...}, {"messages": [...]} or {"token_ids": [...]}. It may also have "id" and any parameter
    below ("top_p": 0.9), which overrides the option. Lines of OpenAI's batches are read, too, except for their model.
    The exit status is 0 only if no line failed.

    After a kill or the loss of the broker, run the same command again. With the same prompts, options and --out it
    continues where it stopped. Without a broker or a verifier, it prints a notice and waits.

    \b
    Examples:
      specq submit examples/prompts.jsonl --out results.jsonl
      echo '{"prompt": "What is 3 times 4?"}' | specq submit - --chat --temperature 0
    """
    config = override(load(config_file).client, **{name: values.pop(name) for name in kinds(ClientConfig)})
    defaults = given(values)
    check_values(defaults)
    if detach and (out != "-" or stream):
        raise click.UsageError(
            "--detach excludes --out and --stream; fetch the results with `specq results` (--out, --wait)"
        )
    with _connected(config, wait_seconds if wait else 0.0) as client:
        if detach:
            status = _detach(client, config, read_lines(prompts), defaults, as_chat=chat)
        else:
            options: dict[str, Any] = {"as_chat": chat, "is_verbose": verbose, "streams": stream}
            status = _run(client, prompts, out, defaults, concurrency, **options)
    ctx.exit(status)


def _run(
    client: Client,
    prompts: BinaryIO,
    out: str,
    defaults: dict[str, Any],
    concurrency: int,
    *,
    as_chat: bool,
    is_verbose: bool,
    streams: bool,
) -> int:
    """Answer the prompts, print a summary, and return the exit status."""
    with (
        _saying_how_to_go_on(out),
        _results(out, prompts, defaults | {"chat": as_chat, "verbose": is_verbose}) as file,
        _progress(prompts, stream=streams) as bar,
    ):
        write = _Writer(file.write, bar, verbose=is_verbose)
        write.skip(num_before := file.num_done)
        show = _shower(to_stderr=out == "-") if streams else None
        todo = file.remaining(read_lines(prompts))
        num_failed = run_lines(
            client, todo, defaults, write, concurrency=concurrency, as_chat=as_chat, show=show, key=file.key
        )
    if not write.num_written and not file.num_done:
        click.echo(f"specq: {prompts.name} contains no prompts", err=True)
    if num_failed:
        click.echo(f"specq: {num_failed} of {write.num_written} lines failed: {write.first_error}", err=True)
    elif out != "-" and write.num_written:
        click.echo(f"specq: {write.summary(num_before)} written to {out}: {write.figures()}", err=True)
    return 1 if num_failed else 0


@contextlib.contextmanager
def _connected(config: ClientConfig, wait_s: float) -> Iterator[Client]:
    """Connect, and wait for broker and verifier. If they are missing, print one message, not one per line."""
    report = WaitReport(wait_s)
    with Client(config.broker, timeout_s=config.timeout_s, keys=config.keys, wait_s=wait_s, on_wait=report) as client:
        try:
            _ = client.served
        except KeyboardInterrupt:
            raise click.exceptions.Exit(1) from None
        finally:
            report.stop()
        report.is_served(client.model.name)
        yield client


def _detach(
    client: Client, config: ClientConfig, lines: Iterator[PromptLine], defaults: dict[str, Any], *, as_chat: bool
) -> int:
    """Submit the lines, print the ids of their jobs, and return the exit status."""
    errors = []
    with JobDesk(config.broker, config.timeout_s, config.keys) as desk:
        for detached in detach_lines(client, desk, lines, defaults, as_chat=as_chat):
            for job_id in detached.job_ids:
                click.echo(job_id)
            errors += [detached.error] if detached.error else []
    if errors:
        click.echo(f"specq: {len(errors)} lines failed: {errors[0]}", err=True)
    return 1 if errors else 0


class _Stream:
    """Results for a terminal or a pipe: like a `ResultsFile`, but a later run cannot continue it."""

    num_done = 0
    key = None

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def remaining(self, lines: Iterator[PromptLine]) -> Iterator[PromptLine]:
        """Return all lines, since none is done."""
        return lines

    def write(self, data: bytes) -> None:
        """Write the results of a prompt at once."""
        self._file.write(data)
        self._file.flush()


@contextlib.contextmanager
def _results(out: str, prompts: BinaryIO, options: dict[str, Any]) -> Iterator[_Stream | ResultsFile]:
    """Open the file for results, or the file of an unfinished run with these options.

    Raises ConfigError if it cannot be written, click's UsageError if it is the prompts file.
    """
    if out == "-":
        yield _Stream(sys.stdout.buffer)
        return
    path = Path(out)
    if path.exists() and prompts.name not in ("-", "<stdin>") and path.samefile(prompts.name):
        raise click.UsageError(f"{out} is the prompts file; choose another file for --out")
    with writing(out):
        if path.exists() and not path.is_file():
            with path.open("wb") as pipe:
                yield _Stream(pipe)
        else:
            with ResultsFile(path, options) as file:
                yield file


@contextlib.contextmanager
def _saying_how_to_go_on(out: str) -> Iterator[None]:
    """Turn Ctrl-C into one line and an exit status. The line names the file of results that a rerun continues."""
    try:
        yield
    except KeyboardInterrupt:
        kept = out != "-" and Path(out).is_file()
        click.echo(f"specq: stopped{f'; run the same command again to continue {out}' if kept else ''}", err=True)
        raise click.exceptions.Exit(1) from None


def _shower(*, to_stderr: bool) -> Any:
    return lambda text: click.echo(text, nl=False, err=to_stderr)


def _progress(prompts: BinaryIO, *, stream: bool) -> Any:
    """Return a progress bar on standard error, if it is a terminal and the prompts can be counted."""
    if stream or not sys.stderr.isatty() or not prompts.seekable():
        return contextlib.nullcontext()
    length = sum(1 for raw in prompts if raw.strip())
    prompts.seek(0)
    return click.progressbar(length=length, label="prompts", show_pos=True, file=sys.stderr)


class _Writer:
    """Writes all results of a prompt at once, counts them, and advances the progress bar."""

    def __init__(self, write: Callable[[bytes], None], bar: Any, *, verbose: bool) -> None:
        self._write, self._bar, self._verbose = write, bar, verbose
        self.num_written, self.first_error = 0, ""
        self._num_tokens, self._num_rounds, self._started = 0, 0, time.monotonic()

    def __call__(self, results: list[Result]) -> None:
        self._write(b"".join(result_line(result, verbose=self._verbose) for result in results))
        self.first_error = self.first_error or next((result.error for result in results if result.error), "")
        self.num_written += len(results)
        self._num_tokens += sum(len(result.token_ids) for result in results)
        self._num_rounds += sum(result.stats.get("rounds", 0) for result in results)
        self.skip(1)

    def summary(self, num_before: int) -> str:
        """Return the number of results as text; `num_before`: prompts that an earlier run finished."""
        number = f"{self.num_written} result{'s' * (self.num_written != 1)}"
        return (
            f"{number} (after {num_before} prompt{'s' * (num_before != 1)} of an earlier run)" if num_before else number
        )

    def figures(self) -> str:
        """Return tokens, time and tokens per round as text."""
        a_round = f", {self._num_tokens / self._num_rounds:.1f} tokens per round" if self._num_rounds else ""
        return f"{self._num_tokens} tokens in {time.monotonic() - self._started:.1f} s{a_round}"

    def skip(self, num_prompts: int) -> None:
        """Advance the progress bar."""
        if self._bar is not None:
            self._bar.update(num_prompts)
