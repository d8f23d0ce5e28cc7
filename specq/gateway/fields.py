"""The fields of requests, and how each is handled.

    SAMPLING   passed to the job unchanged, under specq's names; the client checks them
    RENAMED    the same, under another name
    IGNORED    accepted without effect; only their type is checked
    ONLY       accepted with these values, which have no effect; other values are refused by name
    REFUSED    refused by name, with the reason; null counts as not given

Rule: a field that is not in a table of its endpoint is refused. To add a field, add a line in its table and in
docs/http-api.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from specq.gateway.errors import MAX_PARAM, ApiError
from specq.protocol import JobError, did_you_mean, known_names
from specq.text import MissingContentError, UnsupportedPartError
from specq.text import read_content as content_of

Check = Callable[[Any], bool]


def is_text(value: object) -> bool:
    return isinstance(value, str)


def is_flag(value: object) -> bool:
    return isinstance(value, bool)


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def is_object(value: object) -> bool:
    return isinstance(value, dict)


def is_list(value: object) -> bool:
    return isinstance(value, list)


_NAMES: dict[Check, str] = {
    is_text: "a string",
    is_flag: "true or false",
    is_number: "a number",
    is_count: "a whole number, at least 0",
    is_object: "an object",
    is_list: "a list",
}

# --- fields of both completion endpoints ------------------------------------------------------------------------------

SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "n"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words", "bad_token_ids"),
    *("grammar", "allowed_token_ids"),
)
SPECULATION = (
    *("strategy", "threshold", "typical_eps", "typical_delta", "mode", "num_candidates", "candidate_temp"),
    *("candidate_top_p", "max_depth", "max_nodes", "tree", "fan_out_hit", "fan_out_miss", "priority", "deadline"),
    "cache_salt",
)
IGNORED: dict[str, Check] = {
    "user": is_text,
    "metadata": is_object,
    "service_tier": is_text,
    "safety_identifier": is_text,
    "prompt_cache_key": is_text,
    "prompt_cache_retention": is_text,
    "prompt_cache_options": is_object,
    "session_id": is_text,
    "stream_interval": is_count,
    "parallel_tool_calls": is_flag,
    "prediction": is_object,
    "spaces_between_special_tokens": is_flag,
    "length_penalty": is_number,
    "early_stopping": is_flag,
    "include_reasoning": is_flag,
    "request_id": is_text,
    "guided_decoding_backend": is_text,
}
ONLY: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "use_beam_search": (False,),
    "detokenize": (True,),
    "return_token_offsets": (False,),
    "return_prompt_text": (False,),
    "add_special_tokens": (),
}
_CODES = {UnsupportedPartError: "unsupported_parameter", MissingContentError: "missing_parameter"}
REFUSED: dict[str, str] = {
    "logits_processors": "requests bring no code",
    **dict.fromkeys(
        ("mm_processor_kwargs", "media_io_kwargs", "mm_payload", "return_mm_kwargs"), "specq reads text only"
    ),
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params"), "sessions move by themselves"),
    "logprob_token_ids": "logprobs lists the likeliest",
    "repetition_detection": "use repetition_penalty or frequency_penalty",
    "routed_experts_prompt_start": "specq reports no experts",
    "watermarking": "specq marks no texts",
    "vllm_xargs": "specq's own options are fields of the request",
}


MAX_TOP = 20  # most likely tokens listed for each token

# --- reading ----------------------------------------------------------------------------------------------------------


def given(body: Any) -> dict[str, Any]:
    """Return the fields of a request that are not null.

    Raises ApiError if the body is not an object.
    """
    if not isinstance(body, dict):
        raise ApiError(f"the body is not a JSON object but {_kind(body)}")
    return {name: value for name, value in body.items() if value is not None}


def check_known(
    fields: Mapping[str, Any],
    known: Iterable[str],
    ignored: Mapping[str, Check],
    only: Mapping[str, tuple[Any, ...]],
    refused: Mapping[str, str],
) -> None:
    """Raise ApiError for an unknown or refused field, a wrong type or a value that is not allowed."""
    names = [*known, *ignored, *only]
    for name, value in fields.items():
        if name in refused:
            raise ApiError(f"{name} is not supported: {refused[name]}", param=name, code="unsupported_parameter")
        if name not in names:
            raise ApiError(_unknown(name, names), param=name[:MAX_PARAM], code="unknown_parameter")
        if name in ignored:
            check(name, value, ignored[name])
        if name in only and not any(value is one or (value == one and type(value) is type(one)) for one in only[name]):
            raise ApiError(f"{name} is not supported{_except(only[name])}", param=name, code="unsupported_parameter")


def check(name: str, value: Any, kind: Check) -> Any:
    """Return a value of the right type; raise ApiError that names the field."""
    if not kind(value):
        raise ApiError(f"{name} is {_kind(value)}, but must be {_NAMES[kind]}", param=name, code="invalid_type")
    return value


def read_top(name: str, fields: Mapping[str, Any]) -> int:
    """Return the number of most likely tokens that a field requests, 0 without the field."""
    value = fields.get(name, 0)
    if not is_count(value) or value > MAX_TOP:
        raise ApiError(f"{name} is {value!r:.40}, but must be a whole number from 0 to {MAX_TOP}", param=name)
    return int(value)


class Part(NamedTuple):
    """A field of a request, or a part of one: its name in errors, and its value."""

    name: str
    value: Any

    def of(self, kind: Check) -> Any:
        """Return the value if it has this type."""
        try:
            return check(self.name, self.value, kind)
        except ApiError as error:
            error.param = self.field
            raise

    def parts(self, *known: str) -> dict[str, Part]:
        """Return the parts of an object that are not null; refuse unknown ones."""
        parts = {name: value for name, value in self.of(is_object).items() if value is not None}
        for name in parts:
            if name not in known:
                raise self.wrong(f"has an unknown part {name[:64]!r}; {known_names(name, known)}", "unknown_parameter")
        return {name: Part(f"{self.name}.{name}", value) for name, value in parts.items()}

    def entries(self) -> list[Part]:
        """Return the entries of a list."""
        return [Part(f"{self.name}[{place}]", value) for place, value in enumerate(self.of(is_list))]

    def among(self, known: Collection[str]) -> str:
        """Return the type of an object, which must be one of `known`."""
        kind = need(self.parts(*self.of(is_object)), "type", self)
        if kind.of(is_text) not in known:
            raise kind.wrong(f"is {kind.value[:40]!r}, but must be one of {', '.join(known)}")
        return str(kind.value)

    def parsed(self) -> Part:
        """Return the part, which may be given as JSON text."""
        if not isinstance(self.value, str):
            return self
        try:
            return self._replace(value=orjson.loads(self.value))
        except ValueError as error:
            raise self.wrong(f"is not valid JSON: {error}") from None

    @property
    def field(self) -> str:
        """The field that the part belongs to."""
        return self.name.partition(".")[0].partition("[")[0]

    def wrong(self, message: str, code: str = "invalid_value") -> ApiError:
        return ApiError(f"{self.name} {message}", param=self.field, code=code)

    def refused(self, reason: str) -> ApiError:
        return self.wrong(f"is not supported: {reason}", "unsupported_parameter")


def need(parts: Mapping[str, Part], name: str, whole: Part) -> Part:
    """Return a part that must be there."""
    if name not in parts:
        raise ApiError(f"{whole.name}.{name} is missing", param=whole.field, code="missing_parameter")
    return parts[name]


def check_role(field: str, name: str, role: str, roles: Sequence[str]) -> str:
    """Return the role of a message; raise ApiError if it is not among `roles`.

    field  the field that contains the message.
    name   the name of the message in errors.
    """
    if role not in roles:
        known = ", ".join(roles)
        raise ApiError(f"{name}.role is {role!r:.40}, but must be one of {known}", param=field, code="invalid_value")
    return role


def read_content(field: str, name: str, message: dict[str, Any], kinds: tuple[str, ...] = ("text",)) -> str:
    """Return the content of a message as one text; see `specq.text.read_content`.

    `field` and `name` are those of `check_role`. Raises ApiError if the content is not text, or is missing. The content
    of an assistant may be missing.
    """
    try:
        return content_of(name, message, kinds)
    except JobError as error:
        code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), "invalid_type")
        raise ApiError(str(error), param=field, code=code) from None


def _except(values: tuple[Any, ...]) -> str:
    shown = " or ".join(str(value).lower() if isinstance(value, bool) else repr(value) for value in values)
    return f"; leave it out{f' or give {shown}' if shown else ''}"


def _unknown(name: str, names: list[str]) -> str:
    hint = did_you_mean(name, names)
    return f"unknown field {name[:64]!r}{f'; {hint}' if hint else ''}"


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
