"""The client: takes prompts, returns text, over one socket to a broker.

    core, events          the protocol: messages in, events out; no socket, no clock
    pending               requests in progress: what to wait for, send again and stop
    tokenizer_files       large tokenizers: joined from pieces and kept on disk
    link                  the I/O thread that drives the core
    tracing               events of traced jobs
    request, parameters   the arguments of a call, read from top to bottom
    completions, result   events to pieces and results, for one prompt or several
    base, sync, aio       the calls, and their two forms: `Client` and `AsyncClient`. `PreparedClient` serves a gateway
    detached              jobs that run without a waiting client, over the same core and link
    prompt_files, results_file   files of prompts to files of results

Input: prompts and parameters. Output: `Result`s and `Piece`s, or JobError.
"""

from specq.client.aio import AsyncClient, AsyncJob, PreparedClient
from specq.client.base import PieceStream, count_ready
from specq.client.completions import read_requests
from specq.client.detached import JobDesk, has_ended
from specq.client.events import Event, FoundJob, NewTokens
from specq.client.parameters import id_of
from specq.client.prompt_files import PromptLine, detach_lines, read_lines, result_line, run_lines
from specq.client.request import Request, ServedModel, check_values
from specq.client.result import Piece, PromptLogprobs, Result, failed_result, make_result
from specq.client.results_file import ResultsFile
from specq.client.sync import Client, Job

__all__ = [
    "AsyncClient",
    "AsyncJob",
    "Client",
    "Event",
    "FoundJob",
    "Job",
    "JobDesk",
    "NewTokens",
    "Piece",
    "PieceStream",
    "PreparedClient",
    "PromptLine",
    "PromptLogprobs",
    "Request",
    "Result",
    "ResultsFile",
    "ServedModel",
    "check_values",
    "count_ready",
    "detach_lines",
    "failed_result",
    "has_ended",
    "id_of",
    "make_result",
    "read_lines",
    "read_requests",
    "result_line",
    "run_lines",
]
