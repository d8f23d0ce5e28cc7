"""Exactly once over HTTP: a repeated request with the same `Idempotency-Key` finds its jobs again; pure.

    Idempotency-Key   together with the name of the API key, it is the job key. Job ids and seeds follow from it
    Last-Event-ID     the position from which to resume a stream

The broker keeps the jobs, with a digest of the request in their label. It refuses the same key with another request
(`conflict`). The gateway keeps no state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from specq.gateway import sse
from specq.gateway.completion_call import Call
from specq.gateway.errors import ApiError

KEY_HEADER, POSITION_HEADER = "idempotency-key", "last-event-id"
MAX_KEY = 255


@dataclass(frozen=True, slots=True)
class Repeatable:
    """The keys of a repeatable request; `key` "": it cannot be repeated, and its jobs end with it."""

    key: str = ""
    digest: str = ""
    event_id: str = ""

    def options(self, caller: str, *, num_prompts: int = 0) -> dict[str, Any]:
        """Return the job options for this caller.

        `num_prompts` is the length of a list of prompts.
        """
        if not self.key:
            return {}
        label = f"http {self.digest}"
        ids = [label] * num_prompts if num_prompts else label
        return {"job_key": f"http {caller} {self.key}", "keep_running": True, "id": ids}

    def position(self, num_choices: int) -> sse.Position:
        """Return the position at which the stream begins."""
        return sse.read_position(self.event_id, num_choices) if self.event_id else sse.start(num_choices)


def read(headers: Mapping[str, str], path: str, body: Any, call: Call) -> Repeatable:
    """Read the headers.

    Raises ApiError for an unusable key, or for a position without a key or stream.
    """
    key, event_id = headers.get(KEY_HEADER), headers.get(POSITION_HEADER, "")
    if key is not None and not (0 < len(key) <= MAX_KEY and key.isascii() and key.isprintable()):
        message = f"Idempotency-Key must have 1 to {MAX_KEY} printable ASCII characters"
        raise ApiError(message, param="Idempotency-Key")
    if event_id and not (key and call.stream):
        raise ApiError(
            "Last-Event-ID resumes a stream; also give stream and the Idempotency-Key of that stream",
            param="Last-Event-ID",
        )
    return Repeatable(key, digest(path, body, call.arguments.get("grammar")), event_id) if key else Repeatable()


def digest(path: str, body: Any, grammar: Any = None) -> str:
    """Return a digest of a request that ignores the order of its fields, but not that of a grammar's properties."""
    content = path.encode() + b"\n" + orjson.dumps(body, option=orjson.OPT_SORT_KEYS)
    content += orjson.dumps(grammar) if grammar else b""
    return hashlib.sha256(content).hexdigest()
