"""The client: prompts in, text out, over one socket to a broker.

    core, events          the protocol: messages in, events out; no socket, no clock
    requests, pending, stops, tokenizer_pieces   what the core waits for, sends again, stops and puts together
    link, connection      the I/O thread that drives it, and what goes over it
    tracing               what is noted of jobs that ask to be traced
    cache                 large tokenizers on disk
    request               the arguments of a call, read from top to bottom; job_options, parameters, bad_words: its
                          parts
    batch                 several prompts in one call
    completions, result   events to pieces and results
    base, sync, aio       what a client does, and its two faces: `Client` and `AsyncClient`
    prepared              `AsyncClient` in two steps, for a gateway
    detached              jobs that nobody waits for, over the same core and link
    prompt_files, detached_files, results_file   files of prompts to files of results

In: prompts and parameters. Out: `Result`s and `Piece`s, or JobError.
"""

from specq.client.aio import AsyncClient, AsyncJob
from specq.client.base import PieceStream, count_ready
from specq.client.batch import read_requests
from specq.client.detached import JobDesk, has_ended
from specq.client.detached_files import detach_lines
from specq.client.events import Event, FoundJob, NewTokens
from specq.client.job_options import id_of
from specq.client.prepared import PreparedClient
from specq.client.prompt_files import PromptLine, read_lines, result_line, run_lines
from specq.client.request import Request, ServedModel, check_values
from specq.client.result import Piece, Result, failed_result, make_result
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
