"""Several prompts in one call, as vLLM's `LLM.generate` takes them: a list of prompts, of chats or of lists of ids."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from specq.client.request import (
    CHAT_VARIABLES,
    SOURCES,
    Request,
    ServedModel,
    check_values,
    not_one_source,
    read_request,
)
from specq.protocol import JobError


def read_requests(arguments: dict[str, Any], served: ServedModel) -> list[Request]:
    """Return the requests of a call: one, or those of a list of prompts, chats or lists of ids, in order.

    The parameters hold for every prompt; `id` is a list too, or None. The error of one of several prompts has its
    place.
    """
    if not is_batch(arguments):
        return [read_request(arguments, served)]
    batch = split_batch(arguments)
    check_values({name: value for name, value in arguments.items() if name not in (*SOURCES, CHAT_VARIABLES)})
    requests = []
    for place, own in enumerate(batch):
        try:
            requests.append(replace(read_request(own, served), in_batch=True))
        except JobError as error:
            reason = f"prompt {place}: {error}" if len(batch) > 1 else str(error)
            raise JobError(reason, error.code, error.field) from None
    return requests


def is_batch(arguments: dict[str, Any]) -> bool:
    """Return whether these are the arguments of a list of prompts; the list may be empty."""
    return _is_list(arguments.get("prompt")) or any(_is_nested(arguments.get(name)) for name in SOURCES[1:])


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple, np.ndarray))


def _is_nested(value: Any) -> bool:
    return _is_list(value) and len(value) > 0 and _is_list(value[0])


def split_batch(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the arguments of each prompt of a list; raises JobError if there is more than one list."""
    given = [name for name in SOURCES if arguments.get(name) is not None]
    if len(given) != 1:
        raise not_one_source(given)
    prompts = arguments[given[0]]
    rest = {name: value for name, value in arguments.items() if name not in (given[0], "id", "job_key")}
    ids, key = _ids(arguments.get("id"), len(prompts)), arguments.get("job_key")
    keys = [None if key is None else f"{key} prompt {i}" for i in range(len(prompts))]
    return [
        {**rest, given[0]: prompt, "id": own, "job_key": job_key}
        for prompt, own, job_key in zip(prompts, ids, keys, strict=True)
    ]


def _ids(ids: Any, count: int) -> list[Any]:
    if ids is None:
        return [None] * count
    if not isinstance(ids, (list, tuple)) or len(ids) != count:
        raise JobError(f"id is {ids!r}; for {count} prompts it must be a list of {count} ids", field="id")
    return list(ids)
