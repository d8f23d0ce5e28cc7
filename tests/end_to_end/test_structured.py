"""Structured output over HTTP with a real verifier of `tiny`: OpenAI's own client, and vLLM's fields."""

from __future__ import annotations

import json
import re
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field

from specq import Client
from specq.config.values import free_address
from tests.gateway.serving import openai_client, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Tell me about a dog."}], "max_tokens": 200}
LONG = {"type": "object", "properties": {"text": {"type": "string", "minLength": 300}}, "required": ["text"]}


class Address(BaseModel, extra="forbid"):
    street: str = Field(max_length=12)
    number: int = Field(ge=1, le=999)


class Pet(BaseModel, extra="forbid"):
    """Bounded, so that a text of a small model ends."""

    name: str = Field(max_length=10)
    kind: Literal["dog", "cat"]
    is_old: bool
    home: Address | None
    marks: list[Literal["a", "b"]] = Field(max_length=3)


def test_every_field_over_http(spawn):
    """Texts that end by `stop` are valid; a cut one is a beginning; a grammar that cannot be built is refused."""
    broker = free_address()
    spawn("broker", "--bind", broker, "--journal", "none")
    spawn("worker", "--role", "target", "--broker", broker, "--model", "tiny")
    with Client(broker) as client:
        client.wait_until_ready(timeout_s=120)
    with running(broker) as gateway, openai_client(gateway) as api:
        check_parse(api)
        check_fields(api)
        check_refusals(api)


def check_parse(api):
    for seed in range(2):
        chat = api.chat.completions.parse(**CHAT, seed=seed, response_format=Pet)
        with api.chat.completions.stream(**CHAT, seed=seed, response_format=Pet) as stream:
            streamed = stream.get_final_completion()
        assert chat.choices[0].finish_reason == "stop"
        assert chat.choices[0].message.parsed == streamed.choices[0].message.parsed
        assert isinstance(chat.choices[0].message.parsed, Pet)
    made = api.responses.parse(model="tiny", input="A cat.", text_format=Pet, max_output_tokens=200)
    assert isinstance(made.output_parsed, Pet)


def text_of(api, **body):
    (choice,) = api.chat.completions.create(**CHAT | {"extra_body": body}).choices
    return choice.message.content, choice.finish_reason


def check_fields(api):
    texts = ["yes", "no, never"]
    assert text_of(api, structured_outputs={"choice": texts})[0] in texts
    assert text_of(api, guided_choice=texts)[0] in texts
    assert text_of(api, guided_grammar='root ::= "yes" | "no, never"')[0] in texts
    assert re.fullmatch(r"[a-c]{2,5}/\d", text_of(api, guided_regex=r"[a-c]{2,5}/\d")[0])
    assert Pet.model_validate_json(text_of(api, guided_json=json.dumps(Pet.model_json_schema()))[0])
    number = {"begin": "<n>", "schema": {"type": "integer", "minimum": 0, "maximum": 99}, "end": "</n>"}
    tags = {"type": "structural_tag", "structures": [number], "triggers": ["<n>"]}
    text, finish = text_of(api, response_format=tags)
    assert "<n>" not in text or finish == "length" or re.search(r"<n>\d{1,2}</n>", text)
    plain = api.completions.create(model="tiny", prompt="A", extra_body={"response_format": {"type": "json_object"}})
    assert plain.choices[0].text.startswith("{")
    cut, finish = text_of(api, guided_json=LONG, max_tokens=20)
    assert (cut[:10], finish) == ('{"text": "', "length")


def check_refusals(api):
    schema = {"type": "array", "uniqueItems": True, "maxItems": 2, "items": {"type": "boolean"}}
    form = {"type": "json_schema", "json_schema": {"name": "set", "schema": schema}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="uniqueItems") as refused:
            list(api.chat.completions.create(**CHAT, response_format=form, stream=stream))
        assert (refused.value.param, refused.value.type) == ("response_format", "invalid_request_error")
    form["json_schema"]["strict"] = False
    assert isinstance(json.loads(text_of(api, response_format=form)[0]), list)
    with pytest.raises(openai.BadRequestError, match="GBNF") as refused:
        text_of(api, guided_grammar='root ::= "a')
    assert refused.value.param == "guided_grammar"
