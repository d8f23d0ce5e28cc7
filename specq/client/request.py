"""A request: the arguments of a call in, one `Submit` per completion out.

For several prompts in one call, see `specq.client.completions`.

The arguments are one source (`SOURCES`) and parameters. Optional are `id`, job options, and for a chat
`chat_template_kwargs`. None means not given. `specq.client.parameters` has the job options and parameters. To add an
argument, add its reader there or here.

Rule: a request that cannot run raises JobError (code `invalid`) before anything is sent. The error names the field
(`JobError.field`), its value and the allowed values.

Bad words are token sequences that a verifier never completes.

Tokens are banned, not text. Each word is banned in two spellings: alone, and after a space. vLLM does the same
(`SamplingParams.update_from_tokenizer`). But it drops the second spelling if its number of tokens differs. The same
letters may still appear in another form: in capitals, or in other tokens. They may also cross the end of a token that
holds other text too. The tokens are banned everywhere, also within a longer word.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from specq.client.parameters import (
    OPTION_NAMES,
    TEXT_OPTIONS,
    JobOptions,
    Parameters,
    TextOptions,
    label_of,
    read_job_options,
    read_parameters,
    read_text_options,
)
from specq.protocol import (
    MAX_SEED,
    Int32Array,
    JobError,
    ModelInfo,
    SamplingParams,
    Submit,
    reason_against_prompt_rows,
    shown,
    too_large,
)
from specq.text import TextCodec
from specq.verification import derived_seed

TokenIds = tuple[int, ...]


def bad_word_ids(words: Iterable[str], codec: TextCodec) -> tuple[TokenIds, ...]:
    """Return the token sequences of the words, each once.

    Raises JobError for a word without tokens.
    """
    return tuple(dict.fromkeys(spelling for word in words for spelling in _spellings(word.lstrip(" "), codec)))


def _spellings(word: str, codec: TextCodec) -> list[TokenIds]:
    """Return the tokens of a word alone and after a space.

    The second are left out if they end with the first.
    """
    alone, spaced = tuple(codec.encode_part(word)), tuple(codec.encode_part(" " + word))
    if not alone:
        raise JobError(f"bad_words has {shown(word)}, which the tokenizer cannot encode", field="bad_words")
    return [alone] if spaced[-len(alone) :] == alone else [alone, spaced]


SOURCES = ("prompt", "messages", "token_ids")
CHAT_VARIABLES = "chat_template_kwargs"  # for the chat template, beside `messages`: tools, add_generation_prompt, ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A served model and its tokenizer.

    asked  the name that the caller gave; "" means the only model.
    """

    info: ModelInfo
    codec: TextCodec
    asked: str = ""

    @property
    def context_length(self) -> int:
        """The model's most tokens, prompt and generated tokens together."""
        return min(self.info.max_length, self.info.kv_slots or self.info.max_length)


Reader = Callable[[Any, ServedModel], tuple[str, Sequence[int]]]


@dataclass(frozen=True, slots=True)
class Request:
    """A request that is ready to be sent.

    prompt    its text: as given, or from the chat template, or from the token ids.
    submits   one job per completion, in order; they differ in job id and seed.
    listed    whether `n` was given, so that the answer is a list.
    in_batch  whether it is part of a list of prompts.
    keep_running  whether the jobs keep running when no caller waits for them.
    text      the options of the answer's text.
    """

    id: Any
    prompt: str
    submits: tuple[Submit, ...]
    listed: bool = False
    in_batch: bool = False
    keep_running: bool = False
    text: TextOptions = TextOptions()  # noqa: RUF009 - frozen


def read_request(arguments: dict[str, Any], served: ServedModel) -> Request:
    """Check the arguments of one prompt against the served model, and return the request.

    Raises JobError (code `invalid`) if the request cannot run.
    """
    given = _given(arguments)
    options, parameters = _read_values(given)
    text, source = read_text_options(given), _source(given)
    with _blaming(source):
        prompt, prompt_ids = _read_source(source, given, served, text)
        room = _room(prompt_ids, served)
    sampling = _fitted(parameters, room, served)
    if "messages" in given:
        sampling = _ending_turns(sampling, served)
    seed = _seed(sampling, options, given)
    submits = tuple(
        Submit(
            job_id=options.job_id(index),
            params=sampling if own_seed == sampling.seed else replace(sampling, seed=own_seed),
            speculation=parameters.speculation,
            model=served.asked,
            prompt_ids=prompt_ids,
            priority=options.priority,
            deadline_ms=options.deadline_ms,
            label=label_of(given["id"]) if "id" in given else "",
            tenant=options.tenant,
            cache_salt=options.cache_salt,
            trace=options.trace,
            explain=options.explain,
        )
        for index, own_seed in enumerate(_seeds(seed, parameters.n or 1))
    )
    if reason := reason_against_prompt_rows(len(prompt_ids), sampling):
        raise JobError(reason, field="prompt_logprobs")
    for submit in submits:
        if error := too_large(submit):
            raise error
    given_id, listed = given.get("id", submits[0].job_id), parameters.n is not None
    return Request(given_id, prompt, submits, listed=listed, keep_running=options.keep_running, text=text)


def check_values(arguments: dict[str, Any]) -> None:
    """Raise JobError for job options and parameters that are wrong for any model.

    `arguments` has no source.
    """
    _read_values(_given(arguments))


# --- the steps of a request -----------------------------------------------------------------------------------------


def _given(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}


def _read_values(given: dict[str, Any]) -> tuple[JobOptions, Parameters]:
    """Return the job options and the parameters, with all checks that need no model."""
    options = read_job_options(given)
    read_text_options(given)
    others = (*SOURCES, CHAT_VARIABLES, "id", *OPTION_NAMES, *TEXT_OPTIONS)
    return options, read_parameters({name: value for name, value in given.items() if name not in others})


def _source(given: dict[str, Any]) -> str:
    """Return the name of the one given source."""
    names = [name for name in SOURCES if name in given]
    if len(names) != 1:
        raise not_one_source(names)
    if given.get(CHAT_VARIABLES) and names != ["messages"]:
        reason = f"{CHAT_VARIABLES} is given without messages, the only source with a chat template"
        raise JobError(reason, field=CHAT_VARIABLES)
    return names[0]


def not_one_source(names: Sequence[str]) -> JobError:
    """Return the error for a request with no source, or with several."""
    reason = f"give exactly one of {', '.join(SOURCES)}, not {' and '.join(names) or 'none'}"
    return JobError(reason, field=[*names, *SOURCES][0])


@contextmanager
def _blaming(field: str) -> Iterator[None]:
    """Add this field's name to an error that has none."""
    try:
        yield
    except JobError as error:
        error.field = error.field or field
        raise


def _read_source(
    source: str, given: dict[str, Any], served: ServedModel, options: TextOptions
) -> tuple[str, Int32Array]:
    """Return the prompt as text and as token ids i32[n], n >= 1."""
    variables, is_open = given.get(CHAT_VARIABLES, {}), options.continue_final_message
    if is_open and source != "messages":
        raise JobError("continue_final_message is given without messages", field="continue_final_message")
    readers: dict[str, Reader] = {
        "prompt": _from_text,
        "messages": partial(_from_messages, variables, is_open=is_open),
        "token_ids": _from_ids,
    }
    text, all_ids = readers[source](given[source], served)
    token_ids = options.truncated(all_ids, served.context_length)
    if not len(token_ids):
        raise JobError("the prompt is empty")
    if len(token_ids) < len(all_ids):
        text = served.codec.decode(token_ids, skip_special=False)
    return text, np.asarray(token_ids, np.int32)


def _check_known(token_ids: Sequence[int], served: ServedModel) -> None:
    """Raise JobError for an id that the tokenizer or the model does not have."""
    info, limit = served.info, served.info.num_prompt_tokens
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < limit:
        outside = next(i for i in token_ids if not 0 <= i < limit)
        if not 0 <= outside < info.num_tokens:
            raise JobError(f"token id {outside} is outside the vocabulary of {info.name} (0 to {limit - 1})")
        text = served.codec.decode([outside], skip_special=False)  # the tokenizer has it, but the model was not resized
        raise JobError(
            f"the prompt has the token {shown(text)} (id {outside}), which {info.name} does not have: its tokenizer "
            f"has {info.num_tokens} tokens, the model {info.vocab_size}; leave it out"
        )


def _from_text(prompt: Any, served: ServedModel) -> tuple[str, Sequence[int]]:
    if not isinstance(prompt, str):
        raise JobError(f"prompt is {shown(prompt)}, but must be a string")
    if not prompt:
        raise JobError("the prompt is empty")
    token_ids = served.codec.encode(prompt)
    _check_known(token_ids, served)
    return prompt, token_ids


def _from_messages(
    variables: Any, messages: Any, served: ServedModel, *, is_open: bool = False
) -> tuple[str, Sequence[int]]:
    if not isinstance(variables, dict) or not all(isinstance(name, str) for name in variables):
        reason = f"{CHAT_VARIABLES} is a {type(variables).__name__}, but must be an object of the template's variables"
        raise JobError(reason, field=CHAT_VARIABLES)
    if "messages" in variables:
        raise JobError(f"{CHAT_VARIABLES} has messages; give them as messages", field=CHAT_VARIABLES)
    render = served.codec.render_open_chat if is_open else served.codec.render_chat
    text = render(messages, **variables)
    token_ids = served.codec.encode_part(text)
    _check_known(token_ids, served)
    return text, token_ids


def _from_ids(token_ids: Any, served: ServedModel) -> tuple[str, Sequence[int]]:
    """Return ids unchanged: a list, a tuple or an integer array."""
    ids = token_ids.tolist() if isinstance(token_ids, np.ndarray) else token_ids
    if not isinstance(ids, (list, tuple)) or not set(map(type, ids)) <= {int}:
        raise JobError("token_ids must be a list of integers")
    _check_known(ids, served)
    return served.codec.decode(ids, skip_special=False), ids


def _room(prompt_ids: Int32Array, served: ServedModel) -> int:
    """Return how many tokens the model can generate after the prompt, at least 1."""
    limit = served.context_length
    if len(prompt_ids) >= limit:
        raise JobError(
            f"the prompt has {len(prompt_ids)} tokens; {served.info.name} accepts {limit}, generated tokens included"
        )
    return limit - len(prompt_ids)


def _fitted(parameters: Parameters, room: int, served: ServedModel) -> SamplingParams:
    """Return the sampling parameters for this model.

    Bad words become token ids, and `max_tokens` is limited to the room.
    """
    asked = parameters.sampling
    _check_against(asked, served.info, room)
    banned = bad_word_ids(parameters.bad_words, served.codec)
    _check_vocabulary("bad_words", [token for spelling in banned for token in spelling], served.info)
    if banned or asked.max_tokens > room:
        asked = replace(asked, bad_token_ids=asked.bad_token_ids + banned, max_tokens=min(asked.max_tokens, room))
    return asked


def _ending_turns(params: SamplingParams, served: ServedModel) -> SamplingParams:
    """Return the parameters of a chat, where a turn's end may end the text.

    This applies if no file of the model names an end-of-text token. The job carries this choice, so it ends the same
    way on any verifier.
    """
    turn_end = None if params.ignore_eos or served.info.eos_ids else served.codec.turn_end
    if turn_end is None or turn_end >= served.info.vocab_size or turn_end in params.stop_token_ids:
        return params
    return replace(params, stop_token_ids=(*params.stop_token_ids, turn_end))


def _check_against(params: SamplingParams, info: ModelInfo, room: int) -> None:
    """Raise JobError for parameters that the model does not support.

    room  number of tokens that the model can generate after the prompt.
    """
    named = {
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids,
        "logit_bias": [token for token, _ in params.logit_bias],
        "bad_token_ids": [token for sequence in params.bad_token_ids for token in sequence],
    }
    for name, token_ids in named.items():
        _check_vocabulary(name, token_ids, info)
    if params.min_tokens > room:
        reason = f"min_tokens is {params.min_tokens}; {info.name} has room for {room} tokens more after this prompt"
        raise JobError(reason, field="min_tokens")


def _check_vocabulary(name: str, token_ids: Sequence[int], info: ModelInfo) -> None:
    """Raise JobError for a token id in this parameter without a logit in the model."""
    outside = [token for token in token_ids if token >= info.vocab_size]
    if outside:
        allowed = f"(0 to {info.vocab_size - 1})"
        reason = f"{name} names token id {outside[0]}, outside the vocabulary of {info.name} {allowed}"
        raise JobError(reason, field=name)


def _seed(sampling: SamplingParams, options: JobOptions, given: dict[str, Any]) -> int:
    """Return the given seed. If a needed seed is missing, derive it from the job key or draw it."""
    if sampling.temperature == 0 or "seed" in given:
        return sampling.seed
    return secrets.randbelow(MAX_SEED + 1) if options.job_key is None else options.seed


def _seeds(seed: int, count: int) -> list[int]:
    """Return a seed for each completion; a single completion has the request's own."""
    return [seed] if count == 1 else [derived_seed(seed, index) for index in range(count)]
