"""The fields of requests that evaluations and tools ask for, under OpenAI's and vLLM's names; pure.

echo, prompt_logprobs        the prompt in the answer, and log-probabilities of its tokens
return_token_ids, return_tokens_as_token_ids   token ids in the answer
max_tokens 0                 one token is generated and left out
the others                   arguments of the client: see `specq.client.parameters` and `SamplingParams`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specq.gateway.errors import ApiError
from specq.gateway.fields import Check, check, is_flag, is_text, read_top

_CLIENT: dict[str, Check] = {
    "truncation_side": is_text,
    "skip_special_tokens": is_flag,
    "include_stop_str_in_output": is_flag,
}
_FLAGS = ("return_token_ids", "return_tokens_as_token_ids")
COMMON = (*_CLIENT, *_FLAGS, "prompt_logprobs", "truncate_prompt_tokens")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What the answer holds besides the usual.

    echo           whether the text begins with the prompt.
    num_prompt_top  number of likeliest tokens in `prompt_logprobs`; -1: no such list.
    with_ids       whether choices have the ids of their tokens.
    names_ids      whether tokens are shown as their ids.
    is_empty       whether the generated token is left out.
    arguments      for the client.
    """

    echo: bool = False
    num_prompt_top: int = -1
    with_ids: bool = False
    names_ids: bool = False
    is_empty: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)


NO_EVALUATION = Evaluation()


def read_evaluation(fields: Mapping[str, Any], num_top: int = -1) -> Evaluation:
    """Return what a request asks for. `num_top`: the number of likeliest tokens for each token of the answer."""
    given = {name: kind for name, kind in _CLIENT.items() if name in fields}
    arguments: dict[str, Any] = {name: check(name, fields[name], kind) for name, kind in given.items()}
    if "truncate_prompt_tokens" in fields:
        arguments["truncate_prompt_tokens"] = fields["truncate_prompt_tokens"]
    flags = {name: bool(check(name, fields.get(name, False), is_flag)) for name in ("echo", *_FLAGS)}
    num_prompt_top = _read_prompt_top(fields)
    most = max(num_prompt_top, num_top if flags["echo"] else -1)
    if most >= 0:
        arguments["prompt_logprobs"] = most
    is_empty = type(fields.get("max_tokens")) is int and fields["max_tokens"] == 0
    if is_empty:
        arguments["max_tokens"] = 1
    return Evaluation(
        echo=flags["echo"],
        num_prompt_top=num_prompt_top,
        with_ids=flags["return_token_ids"],
        names_ids=flags["return_tokens_as_token_ids"],
        is_empty=is_empty,
        arguments=arguments,
    )


def _read_prompt_top(fields: Mapping[str, Any]) -> int:
    if "prompt_logprobs" not in fields:
        return -1
    num_top = read_top("prompt_logprobs", fields)
    if fields.get("stream"):
        raise ApiError("prompt_logprobs is not available with stream; leave one of them out", param="prompt_logprobs")
    return num_top
