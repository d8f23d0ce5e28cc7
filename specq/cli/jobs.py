"""`specq jobs`, `specq results` and `specq cancel`: the jobs of a broker, their results by their ids, and their end."""

from __future__ import annotations

import json
from typing import Any

import click

from specq.cli.options import out_option, section_options
from specq.client import (
    Client,
    FoundJob,
    JobDesk,
    Request,
    Result,
    failed_result,
    has_ended,
    id_of,
    make_result,
    result_line,
)
from specq.config import ClientConfig, load, override
from specq.protocol import JobError, JobInfo, Submit
from specq.runtime import columns, writing
from specq.text import TextCodec

_HEADER = ("JOB", "ID", "STATE", "TOKENS", "AGE", "PRIORITY", "MODEL")
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


@click.command()
@click.option(
    "--limit", type=click.IntRange(0), default=20, show_default=True, help="Maximum number of finished jobs to list."
)
@click.option("--all", "list_all", is_flag=True, help="List all finished jobs.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per line.")
@section_options(ClientConfig)
def jobs(config_file: str | None, limit: int, *, list_all: bool, as_json: bool, **values: Any) -> None:
    """List the jobs of a broker: waiting and running jobs, then finished jobs, newest first."""
    config = override(load(config_file).client, **values)
    with JobDesk(config.broker, config.timeout_s, config.keys) as desk:
        lines = list(desk.list_jobs(None if list_all else limit))
    if as_json:
        for line in lines:
            click.echo(json.dumps(line))
    else:
        click.echo(columns([_HEADER, *map(_row, lines)]) if lines else "no jobs")
        if not list_all and sum(map(has_ended, lines)) == limit:
            click.echo(f"only the last {limit} finished jobs; --all lists all", err=True)


def _row(line: dict[str, Any]) -> tuple[object, ...]:
    shown = id_of(line["label"], line["job_id"])
    return (
        line["job_id"],
        str(shown)[:40],
        line["state"],
        line["tokens"],
        _age(line["age_s"]),
        line["priority"],
        line["model"],
    )


def _age(seconds: float) -> str:
    for size, unit in _UNITS:
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


class _JobId(click.IntRange):
    """A job number from the broker, which differs from the `id` of its prompt."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return int(super().convert(value, param, ctx))
        except click.BadParameter:
            self.fail(f"{value!r} is not a job number; `specq jobs` shows it in the first column.", param, ctx)


JOB_ID = _JobId(1, 2**63 - 1)


@click.command()
@click.argument("job_ids", type=JOB_ID, nargs=-1, metavar="[JOB]...")
@click.option("--all", "fetch_all", is_flag=True, help="Print the results of all finished jobs.")
@click.option("--wait", is_flag=True, help="Wait for running jobs.")
@click.option(
    "--text/--no-text",
    default=True,
    help="Decode the tokens; needs a running verifier with the tokenizer.  [default: on]",
)
@click.option("--verbose", is_flag=True, help="Add all counters to each result, under `internal`.")
@out_option()
@section_options(ClientConfig)
@click.pass_context
def results(
    ctx: click.Context,
    /,
    config_file: str | None,
    job_ids: tuple[int, ...],
    out: str,
    *,
    fetch_all: bool,
    wait: bool,
    text: bool,
    verbose: bool,
    **values: Any,
) -> None:
    """Print the results of jobs as JSONL, one line each, as `specq submit` does.

    Without JOB, print the result of the last finished job. The exit status is 0 only if all jobs have results and none
    failed.
    """
    if job_ids and fetch_all:
        raise click.UsageError("JOB and --all exclude each other; give one of them")
    config = override(load(config_file).client, **values)
    written = _Written(_Codecs(config) if text else None, verbose=verbose)
    with (
        JobDesk(config.broker, config.timeout_s, config.keys) as desk,
        writing(out),
        click.open_file(out, "wb") as file,
    ):
        wanted = list(dict.fromkeys(job_ids)) or _ended(desk, None if fetch_all else 1)
        for found in desk.fetch(wanted, wait=wait):
            file.write(written.line(found))
            file.flush()
    if written.problems:
        click.echo(f"specq: {len(written.problems)} of {len(wanted)}: {written.problems[0]}", err=True)
        ctx.exit(1)


def _ended(desk: JobDesk, limit: int | None) -> list[int]:
    """Return the finished jobs, newest last. Raises JobError if a limit is given and no job has finished."""
    found = [line["job_id"] for line in reversed(list(desk.list_jobs(limit))) if has_ended(line)]
    if limit and not found:
        raise JobError("no job has finished yet; `specq jobs` lists waiting and running jobs")
    return found


class _Codecs:
    """The tokenizers of the jobs' models, each fetched once."""

    def __init__(self, config: ClientConfig) -> None:
        self._config, self._known = config, dict[str, TextCodec]()

    def __getitem__(self, model: str) -> TextCodec:
        if model not in self._known:
            config = self._config
            with Client(config.broker, model=model, timeout_s=config.timeout_s, keys=config.keys, wait_s=0) as client:
                self._known[model] = _codec(client)
        return self._known[model]


def _codec(client: Client) -> TextCodec:
    try:
        return client.served.codec
    except JobError as error:
        raise JobError(f"{error}; or use --no-text to print only the tokens", error.code) from None


class _Written:
    """Turns jobs into lines, and collects their errors."""

    def __init__(self, codecs: _Codecs | None, *, verbose: bool) -> None:
        self._codecs, self._verbose, self.problems = codecs, verbose, list[str]()

    def line(self, found: FoundJob) -> bytes:
        """Return the line of a job; b"" for an unknown job or without a result."""
        if found.error is not None:
            self.problems.append(str(found.error))
        elif not found.ended:
            num_tokens = len(found.transcript.token_ids)
            self.problems.append(
                f"job {found.key} is still running ({num_tokens} tokens so far); use --wait to wait for it"
            )
        if found.info is None or not found.ended:
            return b""
        return result_line(self._result(found, found.info), verbose=self._verbose)

    def _result(self, found: FoundJob, info: JobInfo) -> Result:
        codec = self._codecs[info.model] if self._codecs else None
        prompt = codec.decode(info.prompt_ids.tolist(), skip_special=False) if codec else ""
        submit = Submit(job_id=info.job_id, params=info.params, prompt_ids=info.prompt_ids)
        request = Request(id_of(info.label, info.job_id), prompt, (submit,))
        if found.error is not None:
            return failed_result(request, 0, str(found.error))
        return make_result(request, 0, found.transcript, codec)


@click.command()
@click.argument("job_ids", type=JOB_ID, nargs=-1, required=True, metavar="JOB...")
@section_options(ClientConfig)
@click.pass_context
def cancel(ctx: click.Context, /, config_file: str | None, job_ids: tuple[int, ...], **values: Any) -> None:
    """Cancel jobs. Their tokens so far become their results. The exit status is 0 only if all jobs are known."""
    config = override(load(config_file).client, **values)
    unknown = 0
    with JobDesk(config.broker, config.timeout_s, config.keys) as desk:
        for found in desk.cancel(dict.fromkeys(job_ids)):
            is_unknown = found.error is not None and found.error.code == "unknown"
            click.echo(f"specq: {found.error}" if is_unknown else _outcome(found), err=is_unknown)
            unknown += is_unknown
    ctx.exit(1 if unknown else 0)


def _outcome(found: FoundJob) -> str:
    num_tokens = len(found.transcript.token_ids)
    how = found.transcript.finish
    if how == "cancelled":
        return f"{found.key} cancelled with {num_tokens} tokens"
    return f"{found.key} ended earlier, with {num_tokens} tokens ({how or 'failed'})"
