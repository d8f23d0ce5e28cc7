"""The body of `/v1/completions` as a `Call`; pure.

A `Call` is a checked request for text: the client's arguments, and the form of the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specq.client import Request
from specq.gateway.errors import ApiError, of_job
from specq.gateway.evaluation_fields import COMMON, NO_EVALUATION, Evaluation, read_evaluation
from specq.gateway.fields import (
    IGNORED,
    ONLY,
    REFUSED,
    SAMPLING,
    SPECULATION,
    check,
    check_known,
    given,
    is_count,
    is_flag,
    is_object,
    read_top,
)
from specq.gateway.grammar_fields import COMPLETIONS, NO_GRAMMAR, FieldGrammar, choose_grammar, in_words_of_request
from specq.gateway.parts import PLAIN, PartsForm
from specq.gateway.tool_fields import NO_TOOLS, ToolUse
from specq.protocol import JobError

MOST_CHOICES = 128  # completions in one request, over all its prompts
_STREAM_OPTIONS = ("include_usage", "include_obfuscation", "continuous_usage_stats")


@dataclass(frozen=True, slots=True)
class Call:
    """A checked request.

    arguments      of the client, without the fields of the connection (keys, tenants).
    model          the model's name, "" if none is given.
    stream         whether the text is sent piece by piece.
    include_usage  whether the stream ends with the usage.
    continuous_usage  whether each chunk has the usage so far.
    num_top        number of most likely tokens listed for each token; -1: no log-probabilities.
    num_prompts    number of prompts.
    n              completions of each prompt.
    explain        whether chunks have the origins of tokens and the rejected drafts (`specq.gateway.shapes`).
    repeated       the part of the request that the answer repeats.
    evaluation     what else the answer holds (`specq.gateway.evaluation_answer`).
    prompts        the requests of the client, one for each prompt, once they are read.
    names          the endpoint's names for arguments of the client, if they differ.
    chosen         the field that asks for a grammar.
    tools          the tools that the model may know or call.
    with_reasoning  whether the answer has the reasoning.
    thinking_budget  the most tokens of the reasoning; -1: not limited.
    form           what the text may hold, known when the prompt is (`specq.gateway.answer_form`).
    """

    arguments: Mapping[str, Any]
    model: str = ""
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    num_top: int = -1
    num_prompts: int = 1
    n: int = 1
    explain: bool = False
    repeated: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    evaluation: Evaluation = NO_EVALUATION
    prompts: tuple[Request, ...] = ()
    chosen: FieldGrammar = NO_GRAMMAR
    tools: ToolUse = NO_TOOLS
    with_reasoning: bool = True
    thinking_budget: int = -1
    form: PartsForm = PLAIN

    def refused(self, error: JobError) -> ApiError:
        """Return the error for the gateway's client from the error of a job."""
        return of_job(in_words_of_request(error, self.chosen, self.tools), self.names)


def job_arguments(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return specq's own fields in the form that the client expects."""
    found = {name: fields[name] for name in (*SAMPLING, *SPECULATION) if name in fields}
    if found.get("top_k") == -1:  # means all in vLLM
        del found["top_k"]
    return {"temperature": 1.0, **found}


def read_stream(fields: Mapping[str, Any]) -> tuple[bool, bool, bool]:
    """Return whether to stream, to add usage at the end, and to add usage to each chunk.

    As in vLLM, the last is possible only together with the usage at the end.
    """
    stream = check("stream", fields.get("stream", False), is_flag)
    options = check("stream_options", fields.get("stream_options", {}), is_object)
    if options and not stream:
        raise ApiError("stream_options is given without stream", param="stream_options")
    for name, value in options.items():
        if name not in _STREAM_OPTIONS:
            reason = f"unknown field {name[:64]!r} of stream_options"
            raise ApiError(reason, param="stream_options", code="unknown_parameter")
        if not (value is None or is_flag(value)):
            reason = f"stream_options.{name} is {value!r:.40}, but must be true or false"
            raise ApiError(reason, param="stream_options", code="invalid_type")
    usage = bool(options.get("include_usage"))
    return stream, usage, usage and bool(options.get("continuous_usage_stats"))


def read_explain(fields: Mapping[str, Any]) -> bool:
    """Return whether a stream reports what became of drafts."""
    explain = bool(check("explain", fields.get("explain", False), is_flag))
    if explain and not fields.get("stream"):
        raise ApiError("explain is given without stream; it describes a text while it is generated", param="explain")
    return explain


def read_count(name: str, value: Any, most: int) -> int:
    """Return a number from 1 to `most`."""
    if not is_count(value) or not 1 <= value <= most:
        raise ApiError(f"{name} is {value!r:.40}, but must be a whole number from 1 to {most}", param=name)
    return int(value)


def read_choices(fields: Mapping[str, Any], num_prompts: int) -> int:
    """Return the number of completions of each prompt."""
    n = read_count("n", fields.get("n", 1), MOST_CHOICES)
    if n * num_prompts > MOST_CHOICES:
        raise ApiError(f"{num_prompts} prompts with n = {n} are more than {MOST_CHOICES} completions", param="n")
    return n


def read_model(fields: Mapping[str, Any]) -> str:
    """Return the model's name, or "" for the only one."""
    model = fields.get("model", "")
    if not isinstance(model, str):
        raise ApiError("model is not a string", param="model", code="invalid_type")
    return model


MAX_TOKENS = 16  # if the request has no limit, as in OpenAI's API
KNOWN = (
    "model",
    "prompt",
    "stream",
    "stream_options",
    "max_tokens",
    "logprobs",
    "best_of",
    "explain",
    "echo",
    *COMPLETIONS,
    *COMMON,
    *SAMPLING,
    *SPECULATION,
)
_NAMES = {"token_ids": "prompt"}
_EMPTY: tuple[Any, ...] = ("", [])  # prompts without content
_ONLY = {**ONLY, "suffix": ("",)}
_REFUSED = {
    **REFUSED,
    "prompt_embeds": "send a prompt",
    "thinking_token_budget": "use /v1/chat/completions for it",
}


def read(body: Any) -> Call:
    """Return the call; raise ApiError that names the wrong field."""
    fields = given(body)
    check_known(fields, KNOWN, IGNORED, _ONLY, _REFUSED)
    source, num_prompts = _read_prompt(fields)
    streaming = read_stream(fields)
    n = read_choices(fields, num_prompts)
    if fields.get("best_of", n) != n:
        raise ApiError("best_of is not supported beyond n; leave it out", param="best_of", code="unsupported_parameter")
    num_top = read_top("logprobs", fields) if "logprobs" in fields else -1
    arguments = job_arguments(fields) | source | {"max_tokens": fields.get("max_tokens", MAX_TOKENS), "n": n}
    chosen = choose_grammar(fields, COMPLETIONS)
    arguments["grammar"] = chosen.grammar
    explain = arguments["explain"] = read_explain(fields)
    if num_top >= 0:
        arguments["logprobs"] = num_top
    evaluation = read_evaluation(fields, num_top)
    arguments |= evaluation.arguments
    common = arguments, read_model(fields), *streaming, num_top, num_prompts, n, explain
    return Call(*common, names=_NAMES, evaluation=evaluation, chosen=chosen)


def _read_prompt(fields: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the prompt as a source of the client, and the number of prompts.

    A prompt is text, token ids, or a list of either.
    """
    if "prompt" not in fields:
        raise ApiError("prompt is missing", param="prompt", code="missing_parameter")
    prompt = fields["prompt"]
    if prompt in _EMPTY:
        raise _empty("prompt")
    if isinstance(prompt, str):
        return {"prompt": [prompt]}, 1
    if not isinstance(prompt, list):
        raise _wrong_prompt()
    if len(prompt) > MOST_CHOICES and isinstance(prompt[0], (str, list)):  # checked before each prompt is read
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
    return ApiError(f"{name} is empty, but must have at least one token", param="prompt", code="invalid_value")


def _wrong_prompt() -> ApiError:
    return ApiError(
        "prompt must be a string, a list of strings, a list of token ids, or a list of such lists",
        param="prompt",
        code="invalid_type",
    )
