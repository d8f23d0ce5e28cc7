"""Files and batches as the store holds them.

A batch's states (OpenAI's):

    validating ─▶ failed
        │
        ▼
    in_progress ─▶ finalizing ─▶ completed
        ├────────▶ expired
        ▼
    cancelling (also from validating) ─▶ cancelled

Times in `times`, and `created` and `expires_at` of files, are seconds since 1970, and only shown. `deadline` is of the
store's time, which decides (`specq.batches.interface`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Purpose = Literal["batch", "batch_output"]
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
ENDED: tuple[Status, ...] = ("failed", "completed", "expired", "cancelled")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file. `number` orders files by their creation. `name` is what its uploader called it, and no path."""

    number: int
    id: str
    owner: str
    name: str
    purpose: Purpose
    num_bytes: int
    created: int
    expires_at: int


@dataclass(frozen=True, slots=True)
class NewBatch:
    """A request for a batch.

    max_priority  the highest priority that its owner may claim; None: any.
    window        `completion_window` as it was given, and `window_s` in seconds.
    keep_s        seconds for which its result files are kept.
    """

    owner: str
    max_priority: int | None
    endpoint: str
    input_id: str
    window: str
    window_s: int
    keep_s: int
    metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch.

    input_file     number of its input file.
    output, errors  numbers of the files of its results; 0: there are none yet.
    output_id, error_id  their ids once the batch has ended; "": none.
    reasons        entries of OpenAI's `errors.data`.
    times          `created_at`, `in_progress_at` ... as they are shown.
    """

    number: int
    id: str
    asked: NewBatch
    status: Status
    input_file: int
    deadline: float
    times: Mapping[str, int]
    total: int = 0
    completed: int = 0
    failed: int = 0
    output: int = 0
    errors: int = 0
    output_id: str = ""
    error_id: str = ""
    reasons: tuple[Mapping[str, Any], ...] = ()

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED


class LineResult(NamedTuple):
    """The result of a line as a line of the output file or the error file.

    outcome  unrun: the batch ended first.
    """

    number: int
    outcome: Literal["completed", "failed", "unrun"]
    data: bytes
