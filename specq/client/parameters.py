"""The parameters and options of a request, by their flat names.

Parameters: sampling, drafting, number of completions.

    n           completions of the prompt, in [1, 128]; with n > 1 completion i has the seed `derived_seed(seed, i)`
    bad_words   texts that are banned; `specq.client.request` describes which tokens these are
    seed        any 64-bit number, signed or not: see `seed_used`
    the others  fields of `SamplingParams` and `Speculation`

Rule: a wrong value raises JobError (code `invalid`). The error names the parameter (`JobError.field`) and the allowed
values. A value that the verifier would ignore because of other parameters is an error too.

Job options: urgency, and the key under which a job is found again.

    priority  jobs of a higher priority are placed first; in [-1000, 1000]
    deadline  seconds after which the job fails if it has not ended
    job_key   names the job: a second submission with the same key joins the existing job. Its seed follows from the
              key too, if a seed is needed and not given. None: the job is new
    cache_salt   a secret. Only jobs with the same salt share the KV of the prompt and the drafts from earlier texts.
                 None: jobs without a salt share them. Where keys are in use, only jobs of the same API key or broker
                 key share at all
    tenant    for whom a gateway submits the job: the broker gives each tenant its own share (`Submit`)
    trace     whether every process records the events of the job, for `specq trace`
    explain   whether the pieces of a stream report what became of drafts (`Piece.rejected`, `Piece.rounds`)
    keep_running   whether the job keeps running at the broker when no caller waits for it

No option changes the text of a job with a seed.

Options that concern the prompt's tokens and the text of the answer, under vLLM's names.

    truncate_prompt_tokens   most tokens of the prompt; -1: as many as leave room for one token
    truncation_side          "left" keeps the last tokens, "right" the first ones
    continue_final_message   the last message of a chat is continued, and not ended
    skip_special_tokens      whether special tokens are left out of the text
    include_stop_str_in_output   whether the text keeps the stop string that ended it

Rule: the broker does not know them. They change the prompt before a job is sent, or the text of its tokens."""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from specq.protocol import (
    MAX_SEED,
    JobError,
    SamplingParams,
    Speculation,
    bounds,
    known_names,
    shown,
)
from specq.verification import STRATEGIES, reason_against, strategy

LINE_OPTIONS = ("priority", "deadline", "trace", "cache_salt")  # allowed in a line of a prompts file
OPTION_NAMES = (*LINE_OPTIONS, "job_key", "tenant", "keep_running", "explain")
ID_BITS = 63


@dataclass(frozen=True, slots=True)
class JobOptions:
    """Checked job options; `deadline_ms` 0 means no deadline."""

    priority: int = 0
    deadline_ms: int = 0
    job_key: str | None = None
    tenant: str = ""
    keep_running: bool = False
    trace: bool = False
    explain: bool = False
    cache_salt: str = ""

    def job_id(self, index: int) -> int:
        """Return the job id of a completion: from the job key, or random without one."""
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
    if priority is not None and (type(priority) is not int or not bounds.PRIORITY.admits(priority)):
        raise JobError(
            f"priority is {shown(priority)}, but must be a whole number {bounds.PRIORITY.allowed}", field="priority"
        )
    tenant = values.get("tenant", "")
    if not isinstance(tenant, str) or not bounds.TENANT.admits(tenant):
        raise JobError(f"tenant is {shown(tenant)}, but must be {bounds.TENANT.allowed}", field="tenant")
    deadline_ms, keep_running = _milliseconds(values.get("deadline")), bool(values.get("keep_running", False))
    trace, explain = (_flag(values, name) for name in ("trace", "explain"))
    key, salt = values.get("job_key"), _salt(values.get("cache_salt"))
    return JobOptions(priority or 0, deadline_ms, key, tenant, keep_running, trace, explain, salt)


def _salt(salt: Any) -> str:
    if salt is None:
        return ""
    is_text = isinstance(salt, str) and salt.encode(errors="ignore").decode() == salt  # no half of a surrogate pair
    if not is_text or not salt or not bounds.CACHE_SALT.admits(salt):
        reason = f"cache_salt is {shown(salt)}, but must be text of 1 to {bounds.CACHE_SALT.most} characters"
        raise JobError(reason, field="cache_salt")
    return str(salt)


def _flag(values: dict[str, Any], name: str) -> bool:
    value = values.get(name, False)
    if type(value) is not bool:
        raise JobError(f"{name} is {shown(value)}, but must be true or false", field=name)
    return value


def _milliseconds(seconds: Any) -> int:
    if seconds is None:
        return 0
    if (
        type(seconds) not in (int, float)
        or not math.isfinite(seconds)
        or not 0 < seconds * 1000 <= bounds.DEADLINE_MS.high
    ):
        reason = f"deadline is {shown(seconds)}, but must be a number of seconds above 0, at most a year"
        raise JobError(reason, field="deadline")
    return max(1, int(seconds * 1000))


def keyed_number(key: str) -> int:
    """Return a number in [1, 2**63) derived from a key."""
    return max(1, int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1)


def label_of(request_id: Any) -> str:
    """Return a request's id as a label, cut if it is too long."""
    try:
        text = json.dumps(request_id)
    except (TypeError, ValueError):
        text = json.dumps(str(request_id))
    return text if len(text) <= bounds.LABEL.most else json.dumps(str(request_id)[: bounds.LABEL.most // 8])


def id_of(label: str, job_id: int) -> Any:
    """Return the request's id from a job's label, or the job id without a label."""
    try:
        return json.loads(label)
    except ValueError:
        return label or job_id


MAX_COMPLETIONS = 128
LEAST_SEED, MOST_SEED = -(2**63), 2**64 - 1
SAMPLING = tuple(f.name for f in fields(SamplingParams))
DRAFTING = tuple(f.name for f in fields(Speculation))
NAMES = (*SAMPLING, "n", "bad_words", *DRAFTING)


@dataclass(frozen=True, slots=True)
class Parameters:
    """Checked parameters. `n` is None if not given, which means one completion."""

    sampling: SamplingParams
    speculation: Speculation
    n: int | None = None
    bad_words: tuple[str, ...] = ()


def read_parameters(given: dict[str, Any]) -> Parameters:
    """Return checked parameters."""
    unknown = sorted(set(given) - set(NAMES))
    if unknown:
        known = (*NAMES, *LINE_OPTIONS, "explain")
        reason = f"unknown parameter {shown(unknown[0])}; {known_names(unknown[0], known)}"
        raise JobError(reason, field=unknown[0])
    given = given | ({"seed": seed_used(given["seed"])} if "seed" in given else {})
    sampling = SamplingParams.from_dict({name: value for name, value in given.items() if name in SAMPLING})
    speculation = Speculation.from_dict({name: value for name, value in given.items() if name in DRAFTING})
    _check_sampling(sampling)
    _check_honoured(sampling, speculation, given)
    return Parameters(sampling, speculation, _count(given.get("n")), _words(given.get("bad_words", ())))


def seed_used(seed: Any) -> int:
    """Return the seed in [0, MAX_SEED] for a given 64-bit number.

    A seed in this range stays as it is. For other 64-bit numbers the seed is derived from the text `seed N`, with N in
    decimal. It is the 8-byte BLAKE2b digest of the text, as a little-endian number, halved. Raises JobError for other
    values.
    """
    if type(seed) is not int or not LEAST_SEED <= seed <= MOST_SEED:
        raise JobError(f"seed is {shown(seed)}, but must be a whole number from -2**63 to 2**64 - 1", field="seed")
    return seed if 0 <= seed <= MAX_SEED else keyed_number(f"seed {seed}")


def _check_sampling(params: SamplingParams) -> None:
    """Check what `SamplingParams` does not check itself."""
    if reason := reason_against(params.strategy):
        raise JobError(reason, field="strategy")
    biased = Counter(token for token, _ in params.logit_bias)
    for token, count in biased.items():
        if count > 1:
            raise JobError(f"logit_bias names token {token} more than once", field="logit_bias")
    for text in params.stop:
        _check_text("stop", text)


def _check_honoured(params: SamplingParams, speculation: Speculation, given: dict[str, Any]) -> None:
    """Refuse parameters that the strategy or the mode would ignore."""
    own = strategy(params.strategy).parameters
    for owner in STRATEGIES:
        for name in strategy(owner).parameters:
            if name in given and name not in own:
                reason = f"{name} is given with strategy {params.strategy}; only strategy {owner} has one"
                raise JobError(reason, field=name)
    if "allowed_token_ids" in given and not params.allowed_token_ids:
        raise JobError("allowed_token_ids is empty, but must have at least one token id", field="allowed_token_ids")
    idle = [name for name in speculation.to_dict() if name != "mode"]
    if speculation.mode == "plain" and idle:
        raise JobError(f"{idle[0]} is given with mode plain, which has no drafts; remove one of them", field=idle[0])


def _count(n: Any) -> int | None:
    if n is not None and (type(n) is not int or not 1 <= n <= MAX_COMPLETIONS):
        raise JobError(f"n is {shown(n)}, but must be a whole number in [1, {MAX_COMPLETIONS}]", field="n")
    return n


def _words(words: Any) -> tuple[str, ...]:
    """Return bad words as a tuple: one text, or several."""
    listed = (words,) if isinstance(words, str) else words
    if isinstance(listed, (list, tuple)) and len(listed) > bounds.MAX_LISTED:
        raise JobError(
            f"bad_words has {len(listed)} entries, but must have at most {bounds.MAX_LISTED}", field="bad_words"
        )
    if not isinstance(listed, (list, tuple)) or not all(isinstance(word, str) and word.strip(" ") for word in listed):
        reason = f"bad_words is {shown(words)}, but must be a list of texts that are more than spaces"
        raise JobError(reason, field="bad_words")
    for word in listed:
        _check_text("bad_words", word)
    return tuple(listed)


def _check_text(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        reason = f"{name} is {shown(text)}; it is not valid Unicode at character {error.start}: {error.reason}"
        raise JobError(reason, field=name) from None


LEFT, RIGHT = "left", "right"


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Checked options; `truncate_prompt_tokens` 0 means no limit.

    shown  special tokens that the text shows even if it shows no others. The gateway sets them, not the caller.
    """

    truncate_prompt_tokens: int = 0
    truncation_side: str = LEFT
    continue_final_message: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    shown: frozenset[str] = frozenset()

    def truncated(self, token_ids: Sequence[int], context_length: int) -> Sequence[int]:
        """Return the tokens of a prompt within the limit. Raises JobError for a limit that the model exceeds."""
        most = self.truncate_prompt_tokens
        if most >= context_length:
            reason = f"truncate_prompt_tokens is {most}, but must be below the {context_length} tokens of the model"
            raise JobError(reason, field="truncate_prompt_tokens")
        most = context_length - 1 if most < 0 else most
        if not most or len(token_ids) <= most:
            return token_ids
        return token_ids[:most] if self.truncation_side == RIGHT else token_ids[-most:]


TEXT_OPTIONS = tuple(field.name for field in fields(TextOptions) if field.name != "shown")


def read_text_options(values: dict[str, Any]) -> TextOptions:
    """Return the options among the arguments of a call."""
    given = {name: values[name] for name in TEXT_OPTIONS if values.get(name) is not None}
    for name, value in given.items():
        if name not in ("truncate_prompt_tokens", "truncation_side") and type(value) is not bool:
            raise JobError(f"{name} is {shown(value)}, but must be true or false", field=name)
    most, side = given.get("truncate_prompt_tokens", 0), given.get("truncation_side", LEFT)
    if "truncate_prompt_tokens" in given and (type(most) is not int or most < -1 or not most):
        reason = f"truncate_prompt_tokens is {shown(most)}, but must be -1 or a whole number of at least 1"
        raise JobError(reason, field="truncate_prompt_tokens")
    if side not in (LEFT, RIGHT):
        raise JobError(f"truncation_side is {shown(side)}, but must be left or right", field="truncation_side")
    return TextOptions(**given)
