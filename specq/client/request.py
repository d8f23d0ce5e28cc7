"""What the user asks for, checked at the edge: text or token ids in, a `Submit` out.

Rule: whatever is wrong with a request is a JobError (code `invalid`) that names the field, its value and what is
allowed, before anything is sent.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specq.errors import JobError
from specq.messages import Submit
from specq.params import MAX_SEED, SamplingParams
from specq.text import TextCodec
from specq.types import Int32Array, ModelInfo
from specq.verification import STRATEGIES

SOURCES = ("prompt", "messages", "token_ids")


@dataclass(frozen=True, slots=True)
class Served:
    """A model as the broker serves it, with its tokenizer."""

    info: ModelInfo
    codec: TextCodec


@dataclass(frozen=True, slots=True)
class Request:
    """A job that is ready to be sent; `prompt` is its text: as given, or of the chat template, or of the token ids."""

    id: Any
    prompt: str
    submit: Submit


def sampling_params(values: dict[str, Any]) -> SamplingParams:
    """Build validated parameters; None means not given, and a seed is drawn where one is needed but not given."""
    given = {name: value for name, value in values.items() if value is not None}
    params = SamplingParams.from_dict(given)
    if params.strategy not in STRATEGIES:
        raise JobError(f"unknown strategy {params.strategy!r}; known are {', '.join(sorted(STRATEGIES))}")
    if params.temperature > 0 and "seed" not in given:
        params = replace(params, seed=secrets.randbelow(MAX_SEED + 1))
    return params


def build_request(source: dict[str, Any], values: dict[str, Any], served: Served, model: str = "") -> Request:
    """Check a request against the model and return it.

    source  exactly one of prompt (text), messages (a chat, for the model's template), token_ids; optionally id
    values  sampling parameters; max_tokens is cut to what the model takes
    """
    params = sampling_params(values)
    prompt, token_ids = _prompt(source, served)
    room = _room(served.info) - len(token_ids)
    if room < 1:
        raise JobError(
            f"the prompt has {len(token_ids)} tokens; {served.info.name} takes {_room(served.info)}, "
            "the generated ones included"
        )
    job_id = 1 + secrets.randbelow(MAX_SEED)
    params = replace(params, max_tokens=min(params.max_tokens, room))
    submit = Submit(job_id=job_id, params=params, model=model, prompt_ids=token_ids)
    return Request(source.get("id", job_id), prompt, submit)


def _room(info: ModelInfo) -> int:
    return min(info.max_length, info.kv_slots or info.max_length)


def _prompt(source: dict[str, Any], served: Served) -> tuple[str, Int32Array]:
    """Return the prompt as text and as token ids i32[n], n >= 1."""
    given = [name for name in SOURCES if source.get(name) is not None]
    if len(given) != 1:
        raise JobError(f"give exactly one of {', '.join(SOURCES)}, not {' and '.join(given) or 'none'}")
    readers = {"prompt": _from_text, "messages": _from_messages, "token_ids": _from_ids}
    text, token_ids = readers[given[0]](source[given[0]], served)
    if not len(token_ids):
        raise JobError("the prompt is empty")
    return text, np.asarray(token_ids, np.int32)


def _from_text(prompt: Any, served: Served) -> tuple[str, Sequence[int]]:
    if not isinstance(prompt, str):
        raise JobError(f"prompt is a {type(prompt).__name__}; it must be a string")
    if not prompt:
        raise JobError("the prompt is empty")
    return prompt, served.codec.encode(prompt)


def _from_messages(messages: Any, served: Served) -> tuple[str, Sequence[int]]:
    return served.codec.render_chat(messages), served.codec.encode_chat(messages)


def _from_ids(token_ids: Any, served: Served) -> tuple[str, Sequence[int]]:
    """Take ids as they are: a list, a tuple or an integer array."""
    ids = token_ids.tolist() if isinstance(token_ids, np.ndarray) else token_ids
    if not isinstance(ids, (list, tuple)) or not all(type(i) is int for i in ids):
        raise JobError("token_ids must be a list of integers")
    limit = served.info.num_tokens
    outside = [i for i in ids if not 0 <= i < limit]
    if outside:
        raise JobError(f"token id {outside[0]} is outside the vocabulary of {served.info.name} (0 to {limit - 1})")
    return served.codec.decode(ids, skip_special=False), ids
