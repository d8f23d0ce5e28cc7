"""`specq submit --detach`: the lines of a prompts file become jobs that nobody waits for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from specq.client.detached import JobDesk
from specq.client.prompt_files import PromptLine
from specq.client.request import Request, read_request
from specq.client.sync import Client
from specq.protocol import JobError

_AT_ONCE = 256  # lines


@dataclass(frozen=True, slots=True)
class Detached:
    """A line's jobs; `error` says why it has none, or why some are missing."""

    job_ids: tuple[int, ...] = ()
    error: str = ""


def detach_lines(
    client: Client, desk: JobDesk, lines: Iterable[PromptLine], defaults: dict[str, Any], *, as_chat: bool = False
) -> Iterator[Detached]:
    """Submit all lines; yield the jobs of each line, in order, when the broker has taken them."""
    lines = iter(lines)
    while chunk := list(islice(lines, _AT_ONCE)):
        requests = [_request(client, line, defaults, as_chat=as_chat) for line in chunk]
        jobs = [job for request in requests if isinstance(request, Request) for job in request.submits]
        refused = dict(desk.submit(jobs))
        for line, request in zip(chunk, requests, strict=True):
            yield _detached(line, request, refused)


def _request(client: Client, line: PromptLine, defaults: dict[str, Any], *, as_chat: bool) -> Request | str:
    """Return a line's request, or why there is none."""
    if line.error:
        return line.error
    try:
        arguments = line.request(defaults, as_chat=as_chat)
        return read_request(arguments, client.served)
    except JobError as error:
        return f"line {line.number}: {error}"


def _detached(line: PromptLine, request: Request | str, refused: dict[int, JobError | None]) -> Detached:
    if isinstance(request, str):
        return Detached(error=request)
    job_ids = [job.job_id for job in request.submits]
    errors = [str(refused[job_id]) for job_id in job_ids if refused[job_id] is not None]
    taken = tuple(job_id for job_id in job_ids if refused[job_id] is None)
    return Detached(taken, f"line {line.number}: {errors[0]}" if errors else "")
