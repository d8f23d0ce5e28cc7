"""Files and batches: a file of requests, run when there is room.

    lines      a line of an input file, checked; pure
    window     the completion window, and the priority that follows from it; pure
    room       how many lines are under way; pure
    results    results as lines of output files; pure
    values     files and batches
    interface  the interface of the store, its limits and errors
    schema, sqlite_files, store   the store in a SQLite file
    postgres   the same in a PostgreSQL database, for several gateways
    threads    its two threads
    runner     runs batches

It knows no HTTP and no models: `specq.gateway` answers the lines.
"""

from specq.batches.interface import CHUNK_BYTES, BatchStoreError, BatchTables, StoreLimits
from specq.batches.lines import BatchLine
from specq.batches.results import LineAnswer, result_id
from specq.batches.runner import BatchRunner, LineRetryError, LineRun
from specq.batches.store import SqliteBatches
from specq.batches.threads import BatchStore
from specq.batches.values import LineResult, NewBatch, StoredBatch, StoredFile
from specq.batches.window import read_window

__all__ = [
    "CHUNK_BYTES",
    "BatchLine",
    "BatchRunner",
    "BatchStore",
    "BatchStoreError",
    "BatchTables",
    "LineAnswer",
    "LineResult",
    "LineRetryError",
    "LineRun",
    "NewBatch",
    "SqliteBatches",
    "StoreLimits",
    "StoredBatch",
    "StoredFile",
    "read_window",
    "result_id",
]
