"""How a job is treated: its urgency, and the id under which it is found again.

    priority  jobs of a higher one are placed first; in [-1000, 1000]
    deadline  seconds after which the job fails if it has not ended
    job_key   a job that is submitted again with the same key is the job that there is. Its seed follows from the key
              too, where one is needed and not given. None: the job is new
    cache_salt   a secret: the KV of the prompt, and what earlier texts say, are shared with jobs of the same salt only.
                 None: with all that have
              none. In any case with those of the same API key, or key of the broker, only, where keys are used
    tenant    for whom a gateway submits the job: the broker gives each tenant its own share (`Submit`)
    trace     whether every process notes what happens to the job, for `specq trace`
    explain   what became of drafts comes with the pieces of a stream (`Piece.rejected`, `Piece.rounds`)
    keep_running   the job runs on at the broker when nobody waits for it any more

No option changes the text of a job with a seed.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from dataclasses import dataclass
from typing import Any

from specq.protocol import CACHE_SALT, DEADLINE_MS, LABEL, PRIORITY, TENANT, JobError, shown

LINE_OPTIONS = ("priority", "deadline", "trace", "cache_salt")  # that a line of a prompts file may give
OPTION_NAMES = (*LINE_OPTIONS, "job_key", "tenant", "keep_running", "explain")
ID_BITS = 63


@dataclass(frozen=True, slots=True)
class JobOptions:
    """Checked job options; `deadline_ms` 0: none."""

    priority: int = 0
    deadline_ms: int = 0
    job_key: str | None = None
    tenant: str = ""
    keep_running: bool = False
    trace: bool = False
    explain: bool = False
    cache_salt: str = ""

    def job_id(self, index: int) -> int:
        """Return the job id of a completion: it follows from the job key; without a key it is random."""
        if self.job_key is None:
            return secrets.randbits(ID_BITS) or 1
        return keyed_number(f"{self.job_key} job {index}")

    @property
    def seed(self) -> int:
        """The seed that follows from the job key."""
        return keyed_number(f"{self.job_key} seed")


def read_job_options(values: dict[str, Any]) -> JobOptions:
    """Return the job options among the arguments of a request."""
    priority = values.get("priority")
    if priority is not None and (type(priority) is not int or not PRIORITY.admits(priority)):
        raise JobError(f"priority is {shown(priority)}; it must be a whole number {PRIORITY.allowed}", field="priority")
    tenant = values.get("tenant", "")
    if not isinstance(tenant, str) or not TENANT.admits(tenant):
        raise JobError(f"tenant is {shown(tenant)}; it must be {TENANT.allowed}", field="tenant")
    deadline_ms, keep_running = _milliseconds(values.get("deadline")), bool(values.get("keep_running", False))
    trace, explain = (_flag(values, name) for name in ("trace", "explain"))
    key, salt = values.get("job_key"), _salt(values.get("cache_salt"))
    return JobOptions(priority or 0, deadline_ms, key, tenant, keep_running, trace, explain, salt)


def _salt(salt: Any) -> str:
    if salt is None:
        return ""
    is_text = isinstance(salt, str) and salt.encode(errors="ignore").decode() == salt  # no half of a surrogate pair
    if not is_text or not salt or not CACHE_SALT.admits(salt):
        reason = f"cache_salt is {shown(salt)}; it must be text of 1 to {CACHE_SALT.most} characters"
        raise JobError(reason, field="cache_salt")
    return str(salt)


def _flag(values: dict[str, Any], name: str) -> bool:
    value = values.get(name, False)
    if type(value) is not bool:
        raise JobError(f"{name} is {shown(value)}; it must be true or false", field=name)
    return value


def _milliseconds(seconds: Any) -> int:
    if seconds is None:
        return 0
    if type(seconds) not in (int, float) or not math.isfinite(seconds) or not 0 < seconds * 1000 <= DEADLINE_MS.high:
        reason = f"deadline is {shown(seconds)}; it must be a number of seconds above 0, at most a year"
        raise JobError(reason, field="deadline")
    return max(1, int(seconds * 1000))


def keyed_number(key: str) -> int:
    """Return the number in [1, 2**63) that follows from a key."""
    return max(1, int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1)


def label_of(request_id: Any) -> str:
    """Return a request's id as a label, cut if it is too long."""
    try:
        text = json.dumps(request_id)
    except (TypeError, ValueError):
        text = json.dumps(str(request_id))
    return text if len(text) <= LABEL.most else json.dumps(str(request_id)[: LABEL.most // 8])


def id_of(label: str, job_id: int) -> Any:
    """Return the request's id from a job's label; the job id if there is no label."""
    try:
        return json.loads(label)
    except ValueError:
        return label or job_id
