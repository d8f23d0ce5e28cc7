"""`specq cancel`: cancels jobs by their ids."""

from __future__ import annotations

from typing import Any

import click

from specq.cli.options import section_options
from specq.cli.results import JOB_ID
from specq.client import FoundJob, JobDesk
from specq.config import ClientConfig, load, override


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
