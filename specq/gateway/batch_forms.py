"""Files and batches as OpenAI's API has them; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specq.batches import BatchStoreError, NewBatch, StoredBatch, StoredFile, read_window
from specq.gateway.errors import ApiError
from specq.gateway.fields import check, check_known, given, is_object, is_text
from specq.gateway.guard import Caller
from specq.gateway.uploads import read_expiry

MOST_ENTRIES, MOST_KEY, MOST_VALUE = 16, 64, 512  # of metadata, as at OpenAI
TIMES = ("created", "in_progress", "expires", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
_KNOWN = ("input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after")
_STATUS = {"busy": 503, "full": 429, "too_large": 413, "lost": 503, "conflict": 409}


def read_batch(body: Any, caller: Caller, endpoints: Sequence[str], keep_s: int) -> NewBatch:
    """Return the batch that a body asks for; raise ApiError that names the wrong field.

    endpoints  the endpoints that batches may have.
    keep_s     seconds for which its files are kept, unless the body says less.
    """
    fields = given(body)
    check_known(fields, _KNOWN, {}, {}, {})
    for name in _KNOWN[:3]:
        if name not in fields:
            raise ApiError(f"{name} is missing", param=name, code="missing_parameter")
        check(name, fields[name], is_text)
    endpoint, window = fields["endpoint"], fields["completion_window"]
    if endpoint not in endpoints:
        message = f"endpoint is {endpoint[:64]!r}; a batch may be of {', '.join(endpoints)}"
        raise ApiError(message, param="endpoint", code="unsupported_parameter")
    window_s = read_window(window)
    if window_s is None:
        message = f"completion_window is {window[:64]!r}; give a time up to 30d, as 24h, 90m or 7d"
        raise ApiError(message, param="completion_window")
    keep_s = read_expiry(fields.get("output_expires_after"), "output_expires_after", keep_s)
    metadata = read_metadata(fields["metadata"]) if "metadata" in fields else None
    asked = fields["input_file_id"], window, window_s, keep_s, metadata
    return NewBatch(caller.name, caller.max_priority, endpoint, *asked)


def read_metadata(value: Any) -> dict[str, str]:
    """Return the metadata; raise ApiError if it is not as OpenAI's."""
    metadata: dict[str, str] = check("metadata", value, is_object)
    rows = metadata.items()
    if len(metadata) > MOST_ENTRIES or not all(
        isinstance(text, str) and len(name) <= MOST_KEY and len(text) <= MOST_VALUE for name, text in rows
    ):
        limits = f"at most {MOST_ENTRIES} strings of at most {MOST_VALUE} characters, with keys of {MOST_KEY}"
        raise ApiError(f"metadata must have {limits}", param="metadata")
    return metadata


def file_form(file: StoredFile) -> dict[str, Any]:
    """Return a file."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created,
        "expires_at": file.expires_at,
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_form(batch: StoredBatch) -> dict[str, Any]:
    """Return a batch."""
    asked, reasons = batch.asked, list(batch.reasons)
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": asked.endpoint,
        "errors": {"object": "list", "data": reasons} if reasons else None,
        "input_file_id": asked.input_id,
        "completion_window": asked.window,
        "status": batch.status,
        "output_file_id": batch.output_id or None,
        "error_file_id": batch.error_id or None,
        **{f"{name}_at": batch.times.get(f"{name}_at") for name in TIMES},
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "metadata": asked.metadata,
    }


def listed(forms: Sequence[Mapping[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Return a page of a list."""
    ends = (forms[0]["id"], forms[-1]["id"]) if forms else (None, None)
    return {"object": "list", "data": forms, "first_id": ends[0], "last_id": ends[1], "has_more": has_more}


def read_limit(query: Mapping[str, str], default: int, most: int) -> int:
    """Return the `limit` of a list."""
    text = query.get("limit", str(default))
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 0
    if not 1 <= number <= most:
        raise ApiError(f"limit is {text[:40]!r}, but must be a whole number from 1 to {most}", param="limit")
    return number


def of_store(error: BatchStoreError) -> ApiError:
    """Return the error for a client from that of the store."""
    headers = {"retry-after": "2"} if error.code == "busy" else {"x-should-retry": "false"}
    codes = {"full": "quota_exceeded", "too_large": "file_too_large", "conflict": "conflict"}
    code = codes.get(error.code, "store_busy")
    return ApiError(str(error), _STATUS[error.code], None, code, headers)
