"""Errors in OpenAI's format: {"error": {"message", "type", "param", "code"}}, each with its HTTP status.

The paths of Anthropic's API have its format: {"type": "error", "error": {"type", "message", "details"}}.

Rule: every refusal is an `ApiError`. Errors of the client and the broker are converted by their code and field
(`of_job`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specq.protocol import JobError

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_STATUS = {  # of the codes of JobError
    "invalid": 400,
    "conflict": 409,
    "no_verifier": 503,
    "no_broker": 503,
    "lost": 503,
    "busy": 429,
    "deadline": 504,
    "engine": 500,
    "unknown": 404,
    "forbidden": 403,
}
_ANTHROPIC_PATH = "/v1/messages"  # and below
_ANTHROPIC_TYPES = {  # Anthropic's own statuses beside 400 and 500
    **_TYPES,
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    504: "timeout_error",
    529: "overloaded_error",
}
OUR_FAULT = "an error inside the gateway; its log says where"
RETRY_AFTER_S = 2
MAX_PARAM = 64  # longest field name in an error
_NO_RETRY = {"x-should-retry": "false"}  # read by OpenAI's client before it repeats a 409


@dataclass(eq=False)
class ApiError(Exception):
    """A refusal; `param` names the wrong field, `code` is for programs."""

    message: str
    status: int = 400
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    @property
    def body(self) -> dict[str, Any]:
        """Return the error as JSON-able values."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def on_path(error: ApiError, path: str) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of an error in the format of this path."""
    is_anthropics = path == _ANTHROPIC_PATH or path.startswith(f"{_ANTHROPIC_PATH}/")
    return in_anthropics_form(error) if is_anthropics else (error.status, error.body)


def in_anthropics_form(error: ApiError) -> tuple[int, dict[str, Any]]:
    """Return the status and the body as Anthropic's API has them. Its status for 503 is 529."""
    status = 529 if error.status == 503 else error.status
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    is_named = not error.param or error.param in error.message
    message = error.message if is_named else f"{error.param}: {error.message}"
    details = {"details": {"error_code": error.code}} if error.code else {}
    return status, {"type": "error", "error": {"type": kind, "message": message, **details}}


def of_job(error: JobError, names: Mapping[str, str] | None = None) -> ApiError:
    """Return the error for a gateway's client from the error of its job.

    names  see `specq.gateway.completion_call.Call`.
    """
    status, message = _STATUS.get(error.code, 500), str(error)
    if error.code == "conflict":
        message = "this Idempotency-Key was used with another request; take another key"
    headers = _NO_RETRY if status == 409 else {"retry-after": str(RETRY_AFTER_S)} if status in (429, 503) else {}
    param = (names or {}).get(error.field, error.field)[:MAX_PARAM]
    return ApiError(message, status, param or None, error.code, headers)
