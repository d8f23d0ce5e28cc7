"""How a job shall be treated, beside what it asks for: its urgency, and the id under which it is found again.

    priority  jobs of a higher one are placed first; in [-1000, 1000]
    deadline  seconds after which the job fails if it has not ended
    job_key   whoever submits with the same key again attaches to the same jobs; also the seed follows from it where one
              is drawn. None: the jobs are new

None of it changes the text of a job with a seed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from specq.protocol import DEADLINE_MS, LABEL, PRIORITY, JobError, Submit

NAMES = ("priority", "deadline")


@dataclass(frozen=True, slots=True)
class JobOptions:
    """Checked wishes; `deadline_ms` 0: none."""

    priority: int = 0
    deadline_ms: int = 0
    job_key: str | None = None

    def apply(self, submits: Sequence[Submit], request_id: Any) -> tuple[Submit, ...]:
        """Return the jobs of a request as these wishes want them, labelled with its id, if it was given one."""
        label = "" if request_id is None else label_of(request_id)
        return tuple(
            replace(
                submit,
                job_id=submit.job_id if self.job_key is None else keyed_number(f"{self.job_key} job {index}"),
                priority=self.priority,
                deadline_ms=self.deadline_ms,
                label=label,
            )
            for index, submit in enumerate(submits)
        )


def split_job_options(values: dict[str, Any]) -> tuple[JobOptions, dict[str, Any]]:
    """Return the wishes among a request's values, and the rest, with a seed if the job's key shall give it."""
    rest = {name: value for name, value in values.items() if name not in (*NAMES, "job_key")}
    key, priority = values.get("job_key"), values.get("priority")
    if priority is not None and (type(priority) is not int or not PRIORITY.admits(priority)):
        raise JobError(f"priority is {priority!r}; it must be a whole number {PRIORITY.allowed}")
    if key is not None and rest.get("temperature") and rest.get("seed") is None:
        rest["seed"] = keyed_number(f"{key} seed")
    return JobOptions(priority or 0, _milliseconds(values.get("deadline")), key), rest


def _milliseconds(seconds: Any) -> int:
    if seconds is None:
        return 0
    if type(seconds) not in (int, float) or not math.isfinite(seconds) or not 0 < seconds * 1000 <= DEADLINE_MS.high:
        raise JobError(f"deadline is {seconds!r}; it must be a number of seconds above 0, at most a year")
    return max(1, int(seconds * 1000))


def keyed_number(key: str) -> int:
    """Return a number in [1, 2**63) that a key stands for."""
    return max(1, int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1)


def label_of(request_id: Any) -> str:
    """Return a request's id as a label; too long a one is cut."""
    try:
        text = json.dumps(request_id)
    except (TypeError, ValueError):
        text = json.dumps(str(request_id))
    return text if len(text) <= LABEL.most else json.dumps(str(request_id)[: LABEL.most // 8])


def id_of(label: str, job_id: int) -> Any:
    """Return the request's id that a label stands for; of a job without one, its job id."""
    try:
        return json.loads(label)
    except ValueError:
        return label or job_id
