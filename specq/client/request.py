"""What the user asks for, checked at the edge: text or token ids in, a `Submit` for each completion out.

Rule: whatever is wrong with a request is a JobError (code `invalid`) that names the field, its value and what is
allowed, before anything is sent.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specq.client.bad_words import bad_word_ids
from specq.client.job_options import split_job_options
from specq.client.parameters import check_against, read_parameters
from specq.protocol import MAX_SEED, Int32Array, JobError, ModelInfo, Submit, too_large
from specq.text import TextCodec
from specq.verification import derived_seed

SOURCES = ("prompt", "messages", "token_ids")


@dataclass(frozen=True, slots=True)
class Served:
    """A model as the broker serves it, with its tokenizer."""

    info: ModelInfo
    codec: TextCodec


@dataclass(frozen=True, slots=True)
class Request:
    """What is ready to be sent.

    prompt   its text: as given, or of the chat template, or of the token ids
    submits  a job for each completion, in order; they differ in job id and seed
    listed   whether `n` was given, so that the answer is a list
    """

    id: Any
    prompt: str
    submits: tuple[Submit, ...]
    listed: bool = False


def build_request(source: dict[str, Any], values: dict[str, Any], served: Served, model: str = "") -> Request:
    """Check a request against the model and return it.

    source  exactly one of prompt (text), messages (a chat, for the model's template), token_ids; optionally id
    values  parameters (`specq.client.parameters`; max_tokens is cut to what the model takes), wishes (`.wishes`)
    """
    job_options, values = split_job_options(values)
    wanted = read_parameters(values)
    prompt, token_ids = _prompt(source, served)
    room = _room(served.info) - len(token_ids)
    if room < 1:
        raise JobError(
            f"the prompt has {len(token_ids)} tokens; {served.info.name} takes {_room(served.info)}, "
            "the generated ones included"
        )
    banned = wanted.sampling.bad_token_ids + bad_word_ids(wanted.bad_words, served.codec)
    sampling = replace(wanted.sampling, bad_token_ids=banned, max_tokens=min(wanted.sampling.max_tokens, room))
    check_against(sampling, served.info, room)
    submits = tuple(
        Submit(
            job_id=1 + secrets.randbelow(MAX_SEED),
            params=replace(sampling, seed=seed),
            speculation=wanted.speculation,
            model=model,
            prompt_ids=token_ids,
        )
        for seed in _seeds(sampling.seed, wanted.n or 1)
    )
    submits = job_options.apply(submits, source.get("id"))
    for submit in submits:
        if reason := too_large(submit):
            raise JobError(reason)
    return Request(source.get("id", submits[0].job_id), prompt, submits, listed=wanted.n is not None)


def _seeds(seed: int, count: int) -> list[int]:
    """Return a seed for each completion; a single one has the seed that was asked for."""
    return [seed] if count == 1 else [derived_seed(seed, index) for index in range(count)]


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
