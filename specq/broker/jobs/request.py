"""What was asked for: one prompt, how to complete it, and for whom. It never changes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from specq.protocol import Int32Array, SamplingParams, Speculation, Submit

PREFIX_LENGTHS = (16, 64, 256, 1024)  # tokens of prompts, at which they are compared


def sharers(owner: str, tenant: str, cache_salt: str) -> str:
    """Return whose sessions a job shares KV of prefixes and earlier texts with, as `Open.owner` has it: no two (owner,
    tenant, salt) give the same, since no owner's name begins with a plus. A salt is a secret of who chose it, so it
    goes no further."""
    name = bucket(owner, tenant)
    if not cache_salt:
        return name
    digest = hashlib.blake2b(cache_salt.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()
    return f"+{digest} {name}"


def bucket(owner: str, tenant: str) -> str:
    """Return in whose name a job takes its turns and its share of the queue; no owner has a slash in its name."""
    return f"{owner}/{tenant}" if tenant else owner


@dataclass(frozen=True, eq=False)
class JobRequest:
    """A `Submit` that names its model, whose it is, and when it came; times are the journal's, deadline 0: none."""

    submit: Submit
    owner: str = ""
    submitted: float = 0.0
    deadline: float = 0.0

    @property
    def bucket(self) -> str:
        return bucket(self.owner, self.submit.tenant)

    @property
    def model(self) -> str:
        return self.submit.model

    @property
    def params(self) -> SamplingParams:
        return self.submit.params

    @property
    def speculation(self) -> Speculation:
        return self.submit.speculation

    @property
    def priority(self) -> int:
        return self.submit.priority

    @property
    def prompt_ids(self) -> Int32Array:
        return self.submit.prompt_ids  # i32[prompt_len]

    @property
    def prompt_len(self) -> int:
        return len(self.submit.prompt_ids)

    @property
    def max_length(self) -> int:
        """Return the tokens that the job may have in the end, the prompt included."""
        return self.prompt_len + self.params.max_tokens

    def prefix_keys(self, sharers: str) -> tuple[int, ...]:
        """Return hashes of the prompt's beginnings, which prompts of the same `sharers` that begin alike share: see
        `specq.broker.workers.policy`."""
        return tuple(hash((sharers, of_prompt)) for of_prompt in self._prefix_hashes)

    @cached_property
    def _prefix_hashes(self) -> tuple[int, ...]:
        lengths = [length for length in PREFIX_LENGTHS if length < self.prompt_len]
        return tuple(hash(self.prompt_ids[:length].tobytes()) for length in [*lengths, self.prompt_len])

    def has_content(self, message: Submit) -> bool:
        """Does the message ask for the same, under the same label? One without a model does not care which it is."""
        mine, submit = self.submit, message
        if submit.digest:
            return submit.digest == mine.digest and message.model in ("", self.model)
        same = (submit.params, submit.speculation, submit.label) == (mine.params, mine.speculation, mine.label)
        return same and message.model in ("", self.model) and np.array_equal(message.prompt_ids, self.prompt_ids)
