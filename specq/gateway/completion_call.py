"""The body of `/v1/completions` as a `Call`; pure."""

from __future__ import annotations

from typing import Any

from specq.gateway.calls import (
    MOST_CHOICES,
    Call,
    job_arguments,
    read_choices,
    read_explain,
    read_model,
    read_stream,
    read_top,
)
from specq.gateway.errors import ApiError
from specq.gateway.fields import IGNORED, ONLY, REFUSED, SAMPLING, SPECULATION, check_known, given

MAX_TOKENS = 16  # where the request names none, as at OpenAI
KNOWN = (
    "model",
    "prompt",
    "stream",
    "stream_options",
    "max_tokens",
    "logprobs",
    "best_of",
    "explain",
    *SAMPLING,
    *SPECULATION,
)
_NAMES = {"token_ids": "prompt"}
_EMPTY: tuple[Any, ...] = ("", [])  # prompts that nothing follows from
_ONLY = {**ONLY, "echo": (False,), "suffix": ("",)}
_REFUSED = {**REFUSED, "prompt_embeds": "send a prompt", "response_format": "specq has no grammars yet"}


def read(body: Any) -> Call:
    """Return the call; raises ApiError that names the field at fault."""
    fields = _without_text_format(given(body))
    check_known(fields, KNOWN, IGNORED, _ONLY, _REFUSED)
    source, num_prompts = _read_prompt(fields)
    streaming = read_stream(fields)
    n = read_choices(fields, num_prompts)
    if fields.get("best_of", n) != n:
        raise ApiError("best_of is not supported beyond n; leave it out", param="best_of", code="unsupported_parameter")
    num_top = read_top("logprobs", fields) if "logprobs" in fields else -1
    arguments = job_arguments(fields) | source | {"max_tokens": fields.get("max_tokens", MAX_TOKENS), "n": n}
    explain = arguments["explain"] = read_explain(fields)
    if num_top >= 0:
        arguments["logprobs"] = num_top
    return Call(arguments, read_model(fields), *streaming, num_top, num_prompts, n, explain, names=_NAMES)


def _without_text_format(fields: dict[str, Any]) -> dict[str, Any]:
    if fields.get("response_format") == {"type": "text"}:
        return {name: value for name, value in fields.items() if name != "response_format"}
    return fields


def _read_prompt(fields: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the prompt as a source of the client, and how many there are: text, token ids, or a list of either."""
    if "prompt" not in fields:
        raise ApiError("prompt is missing", param="prompt", code="missing_parameter")
    prompt = fields["prompt"]
    if prompt in _EMPTY:
        raise _empty("prompt")
    if isinstance(prompt, str):
        return {"prompt": [prompt]}, 1
    if not isinstance(prompt, list):
        raise _wrong_prompt()
    if len(prompt) > MOST_CHOICES and isinstance(prompt[0], (str, list)):  # before each of them is looked at
        raise ApiError(f"{len(prompt)} prompts are more than {MOST_CHOICES} completions", param="prompt")
    if all(type(one) is int for one in prompt):
        return {"token_ids": [prompt]}, 1
    empty = [place for place, one in enumerate(prompt) if one in _EMPTY]
    if empty:
        raise _empty(f"prompt[{empty[0]}]")
    if all(isinstance(one, str) for one in prompt):
        return {"prompt": prompt}, len(prompt)
    if all(isinstance(one, list) and all(type(token) is int for token in one) for one in prompt):
        return {"token_ids": prompt}, len(prompt)
    raise _wrong_prompt()


def _empty(name: str) -> ApiError:
    return ApiError(f"{name} is empty; it must have at least one token", param="prompt", code="invalid_value")


def _wrong_prompt() -> ApiError:
    return ApiError(
        "prompt must be a string, a list of strings, a list of token ids, or a list of such lists",
        param="prompt",
        code="invalid_type",
    )
