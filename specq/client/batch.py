"""Several prompts in one call, as vLLM's `LLM.generate` takes them: a list in, a list of results out, in order.

A batch is a list for `prompt`, a list of chats for `messages`, or a list of lists of ids for `token_ids`; its `id` is a list
too, or none.

Rules: the parameters hold for every prompt. What is wrong with one is a JobError that names its place, before anything is
sent; one that fails later has `error` in its result and harms no other, as a completion of several does.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from specq.client.request import SOURCES
from specq.protocol import JobError


def is_batch(arguments: dict[str, Any]) -> bool:
    """Are these the arguments of several prompts, or of none?"""
    return _is_list(arguments.get("prompt")) or any(_is_nested(arguments.get(name)) for name in SOURCES[1:])


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple, np.ndarray))


def _is_nested(value: Any) -> bool:
    return _is_list(value) and len(value) > 0 and _is_list(value[0])


def split_batch(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the arguments of each prompt of a batch; raises JobError if they are not one prompt's each."""
    given = [name for name in SOURCES if arguments.get(name) is not None]
    if len(given) != 1:
        raise JobError(f"give exactly one of {', '.join(SOURCES)}, not {' and '.join(given)}")
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
        raise JobError(f"id is {ids!r}; for {count} prompts it must be a list of {count} ids")
    return list(ids)
