"""Constrained texts over HTTP: OpenAI's and vLLM's fields become one grammar of the job, or are refused by name."""

from __future__ import annotations

import itertools
import json

import openai
import orjson
import pytest
from pydantic import BaseModel

from specq.gateway import chat_call, completion_call, responses_call, serving
from specq.gateway.errors import ApiError
from specq.protocol import Accepted, Failed, Submit
from specq.testing.fake_broker import CODEC, answer, tokens
from tests.each import each

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
SCHEMA = {"type": "object", "properties": {"year": {"type": "integer"}, "name": {"type": "string"}}}
NAMED = {"name": "person", "schema": SCHEMA}
TAGS = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
TAG = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f"], "tags": [TAG]}
UNSUPPORTED, UNKNOWN, MISSING = "unsupported_parameter", "unknown_parameter", "missing_parameter"
VALUE, TYPE = "invalid_value", "invalid_type"
READERS = {
    "chat": (chat_call.read, CHAT),
    "plain": (completion_call.read, {"prompt": "a"}),
    "responses": (responses_call.read, {"input": "a"}),
}


def of_type(kind, **parts):
    return {"type": kind, **parts}


def tag_format(form):
    return {"response_format": of_type("structural_tag", format=form)}


FORMATS = [  # of chats and completions
    ({"response_format": of_type("text")}, {}),
    ({"response_format": of_type("json_object")}, {"json_object": True}),
    ({"response_format": of_type("json_object", schema=SCHEMA)}, {"json_schema": SCHEMA}),
    ({"response_format": of_type("json_schema", json_schema=NAMED)}, {"json_schema": SCHEMA}),
    ({"response_format": of_type("json_schema", json_schema=NAMED | {"strict": True})}, {"json_schema": SCHEMA}),
    ({"response_format": of_type("json_schema", json_schema=NAMED | {"strict": None})}, {"json_schema": SCHEMA}),
    (
        {"response_format": of_type("json_schema", json_schema=NAMED | {"strict": False, "description": "one"})},
        {"json_schema": SCHEMA, "strict": False},
    ),
    ({"response_format": of_type("structural_tag", **TAGS)}, {"structural_tag": TAGS}),
    (tag_format(TRIGGERED), {"structural_tag": TAGS}),
    (tag_format(TRIGGERED | {"at_least_one": True}), {"structural_tag": TAGS, "required": True}),
    (tag_format(TRIGGERED | {"stop_after_first": False, "excludes": []}), {"structural_tag": TAGS}),
    (tag_format(TRIGGERED | {"tags": [TAG | {"end": ["</f>"]}]}), {"structural_tag": TAGS}),
    (tag_format(of_type("json_schema", json_schema=SCHEMA)), {"json_schema": SCHEMA}),
    (tag_format(of_type("json_schema", json_schema=True)), {"json_schema": {}}),
    (tag_format(of_type("regex", pattern="a+")), {"regex": "a+"}),
    (tag_format(of_type("grammar", grammar='start: "a"')), {"lark": 'start: "a"'}),
    (tag_format(of_type("const_string", value="a")), {"choice": ["a"]}),
]
TEXTS = [  # of responses
    ({"text": {}}, {}),
    ({"text": {"format": None, "verbosity": "medium"}}, {}),
    ({"text": {"format": of_type("text")}}, {}),
    ({"text": {"format": of_type("json_object")}}, {"json_object": True}),
    ({"text": {"format": of_type("json_schema", **NAMED, strict=True)}}, {"json_schema": SCHEMA}),
    ({"text": {"format": of_type("json_schema", **NAMED, strict=False)}}, {"json_schema": SCHEMA, "strict": False}),
]
EVERYWHERE = [
    ({}, {}),
    ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, {"json_schema": SCHEMA}),
    ({"structured_outputs": {"regex": "a+", "choice": None}}, {"regex": "a+"}),
    ({"structured_outputs": {"choice": ["a", "b"], "json_object": False}}, {"choice": ["a", "b"]}),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, {"lark": 'start: "a"'}),
    (
        {"structured_outputs": {"json_object": True, "disable_any_whitespace": True, "disable_fallback": True}},
        {"json_object": True},
    ),
    (
        {"structured_outputs": {"structural_tag": json.dumps(of_type("structural_tag", **TAGS))}},
        {"structural_tag": TAGS},
    ),
    ({"structured_outputs": {"regex": "a", "disable_additional_properties": False}}, {"regex": "a"}),
    ({"guided_json": SCHEMA, "guided_decoding_backend": "guidance"}, {"json_schema": SCHEMA}),
    ({"guided_json": json.dumps(SCHEMA)}, {"json_schema": SCHEMA}),
    ({"guided_regex": "a+"}, {"regex": "a+"}),
    ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
    ({"guided_grammar": 'start: "a"'}, {"lark": 'start: "a"'}),
    ({"structural_tag": json.dumps(TAGS)}, {"structural_tag": TAGS}),
    ({"structural_tag": {"format": TRIGGERED}}, {"structural_tag": TAGS}),
    ({"grammar": {"regex": "a", "after": "</think>"}}, {"regex": "a", "after": "</think>"}),
    ({"grammar": '{"regex": "a"}'}, '{"regex": "a"}'),
    ({"grammar": {}}, {}),
]
OF = {"chat": FORMATS + EVERYWHERE, "plain": FORMATS + EVERYWHERE, "responses": TEXTS + EVERYWHERE}


@each(("endpoint", "given", "grammar"), [(name, *row) for name, rows in OF.items() for row in rows])
def test_each_form_becomes_a_grammar(endpoint, given, grammar):
    read, body = READERS[endpoint]
    call = read(body | given)
    assert call.arguments["grammar"] == grammar
    assert orjson.dumps(call.arguments["grammar"]) == orjson.dumps(grammar), "properties keep their order"
    assert call.chosen.field == (next(iter(given)) if grammar else "")


FIELDS = {
    "response_format": of_type("json_object"),
    "structured_outputs": {"regex": "a"},
    "guided_json": SCHEMA,
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": 'start: "a"',
    "structural_tag": TAGS,
    "grammar": {"regex": "a"},
}


@each(("first", "second"), itertools.combinations(FIELDS, 2))
def test_of_two_fields_both_are_named(first, second):
    for endpoint, (read, body) in READERS.items():
        given = {first: FIELDS[first], second: FIELDS[second]}
        if endpoint == "responses" and "response_format" in given:
            given["text"] = {"format": given.pop("response_format")}
        names = ["text" if endpoint == "responses" and first == "response_format" else first, second]
        with pytest.raises(ApiError, match=f"{names[0]} and {names[1]} are both given") as refused:
            read(body | given)
        assert (refused.value.status, refused.value.param) == (400, second)


@each(
    ("given", "message", "code"),
    [
        ({"response_format": {}}, "response_format.type is missing", MISSING),
        ({"response_format": "json"}, "response_format is a string, but must be an object", TYPE),
        ({"response_format": of_type("xml")}, "is 'xml', but must be one of text, json_object, json_sc", VALUE),
        ({"response_format": of_type("text", schema={})}, "unknown part 'schema'", UNKNOWN),
        ({"response_format": of_type("json_schema")}, "response_format.json_schema is missing", MISSING),
        (
            {"response_format": of_type("json_schema", json_schema={"name": "a"})},
            "response_format.json_schema.schema is missing",
            MISSING,
        ),
        (
            {"response_format": of_type("json_schema", json_schema=NAMED | {"strikt": True})},
            "response_format.json_schema has an unknown part 'strikt'; did you mean 'strict'",
            UNKNOWN,
        ),
        (
            {"response_format": of_type("json_schema", json_schema=NAMED | {"strict": 1})},
            "response_format.json_schema.strict is a number, but must be true or false",
            TYPE,
        ),
        (
            {"response_format": of_type("json_schema", json_schema=NAMED | {"schema": [1]})},
            "response_format.json_schema.schema is a list, but must be an object",
            TYPE,
        ),
        (
            {"response_format": of_type("json_schema", json_schema={"schema": {"enum": ["a" * 65_536]}})},
            "response_format.json_schema.schema is not a valid grammar: grammar has 65",
            VALUE,
        ),
        ({"response_format": of_type("structural_tag", triggers=["<"])}, "structures is missing", MISSING),
        ({"response_format": of_type("structural_tag", **TAGS | {"triggers": ["["]})}, "triggers, with", VALUE),
        (tag_format(TRIGGERED | {"stop_after_first": True}), "stop_after_first is not supported", UNSUPPORTED),
        (tag_format(TRIGGERED | {"excludes": ["a"]}), "format.excludes is not supported", UNSUPPORTED),
        (
            tag_format(TRIGGERED | {"tags": [TAG | {"content": of_type("any_text")}]}),
            r"response_format.format.tags\[0\].content.type is 'any_text', but must be one of json_schema",
            VALUE,
        ),
        (tag_format(TRIGGERED | {"tags": [TAG | {"end": ["a", "b"]}]}), r"tags\[0\].end is not", UNSUPPORTED),
        (tag_format(of_type("sequence", elements=[])), "format.type is 'sequence', but must be one", VALUE),
        (tag_format(of_type("regex", pattern="a", excludes=["b"])), "excludes is not", UNSUPPORTED),
        (tag_format(of_type("json_schema", json_schema={}, style="glm_xml")), "style is not", UNSUPPORTED),
        (tag_format(of_type("json_schema", json_schema={}, max_whitespace_cnt=0)), "_cnt is not", UNSUPPORTED),
        ({"structured_outputs": {}}, "must have exactly one of json, regex, .* none is given", VALUE),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "but json and regex are given", VALUE),
        ({"structured_outputs": {"jason": {}}}, "unknown part 'jason'; did you mean 'json'", UNKNOWN),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json is not valid JSON", VALUE),
        (
            {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
            "disable_additional_properties is not supported: write .additionalProperties",
            UNSUPPORTED,
        ),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " ?"}},
            "structured_outputs.whitespace_pattern is not supported",
            UNSUPPORTED,
        ),
        ({"guided_whitespace_pattern": " ?"}, "guided_whitespace_pattern is not supported", UNSUPPORTED),
        ({"guided_json": 3}, "guided_json is a number, but must be an object", TYPE),
        ({"guided_regex": ""}, "guided_regex is not a valid grammar: regex is '', but must be", VALUE),
        ({"guided_choice": []}, "guided_choice is not a valid grammar: choice is", VALUE),
        ({"guided_choice": ["a", ""]}, "guided_choice is not a valid grammar: choice is", VALUE),
        ({"guided_grammar": ["a"]}, "guided_grammar is a list, but must be a string", TYPE),
        ({"structural_tag": "["}, "structural_tag is not valid JSON", VALUE),
        ({"structural_tag": TAGS | {"format": TRIGGERED}}, "unknown part 'structures'", UNKNOWN),
    ],
)  # fmt: skip
def test_what_cannot_be_a_grammar_is_refused_by_its_name(given, message, code):
    (field,) = given
    endpoints = ("chat", "plain") if field == "response_format" else READERS
    for read, body in (READERS[name] for name in endpoints):
        with pytest.raises(ApiError, match=message) as refused:
            read(body | given)
        assert (refused.value.status, refused.value.param, refused.value.code) == (400, field, code)


@each(
    ("text", "message"),
    [
        (
            {"format": of_type("structural_tag", **TAGS)},
            "format.type is 'structural_tag', but must be one of text",
        ),
        ({"format": of_type("json_schema", json_schema=NAMED)}, "text.format has an unknown part 'json_schema'"),
        ({"format": of_type("json_schema", name="a")}, "text.format.schema is missing"),
        ({"verbosity": "low"}, "text.verbosity is not supported"),
        ({"style": "a"}, "text has an unknown part 'style'"),
    ],
)
def test_what_cannot_be_the_text_of_a_response(text, message):
    with pytest.raises(ApiError, match=message) as refused:
        responses_call.read({"input": "a", "text": text})
    assert refused.value.param == "text"


def test_a_keys_request_is_another_one_with_other_properties_first():
    """The order of fields does not count in a request, but the text's properties follow it."""
    turned = SCHEMA | {"properties": dict(reversed(SCHEMA["properties"].items()))}
    bodies = [CHAT | {"guided_json": schema} for schema in (SCHEMA, turned)]
    keyed = [serving.read({"idempotency-key": "k"}, "/", body, chat_call.read(body)) for body in bodies]
    assert keyed[0].digest != keyed[1].digest
    same = {"guided_json": SCHEMA, **CHAT}
    assert serving.read({"idempotency-key": "k"}, "/", same, chat_call.read(same)).digest == keyed[0].digest


# --- through the gateway ----------------------------------------------------------------------------------------------


class Person(BaseModel):
    name: str
    year: int


ADA = Person(name="Ada", year=1815)


def answer_ada(message):
    """Answer every job with the same JSON."""
    if not isinstance(message, Submit):
        return answer(message)
    ids = CODEC.encode(ADA.model_dump_json())
    return [Accepted(job_id=message.job_id), tokens(message.job_id, 0, ids, "stop")]


def test_openais_parse_gives_objects(api, broker):
    """With the class as the format: the job has its schema, every keyword enforced, and the properties' order."""
    broker.reply = answer_ada
    chat = api.chat.completions.parse(model="fake", **CHAT, response_format=Person)
    made = api.responses.parse(model="fake", input="a", text_format=Person)
    submits = broker.wait_for(Submit, 2)

    assert chat.choices[0].message.parsed == made.output_parsed == ADA
    assert made.text.format.name == "Person"
    for submit in submits:
        grammar = json.loads(submit.params.grammar)
        assert list(grammar) == ["json_schema"]
        assert list(grammar["json_schema"]["properties"]) == ["name", "year"]


def test_openais_stream_is_parsed_too(api, broker):
    broker.reply = answer_ada
    with api.chat.completions.stream(model="fake", **CHAT, response_format=Person) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == ADA
    with api.responses.stream(model="fake", input="a", text_format=Person) as stream:
        assert stream.get_final_response().output_parsed == ADA


def refuse(message):
    """Refuse every job with a grammar, as a verifier does that cannot build it."""
    if isinstance(message, Submit) and message.params.grammar:
        reason = "grammar: a{99999999} is too large"
        return [Accepted(job_id=message.job_id), Failed(job_id=message.job_id, code="invalid", reason=reason)]
    return answer(message)


@each("stream", [False, True])
def test_a_verifiers_refusal_names_the_field_of_the_request(api, broker, stream):
    broker.reply = refuse
    strict = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"pattern": "a"}, "strict": True}}
    cases = [
        (api.chat.completions.create, CHAT | {"response_format": strict}, "response_format"),
        (api.chat.completions.create, CHAT | {"extra_body": {"guided_regex": "a"}}, "guided_regex"),
        (api.completions.create, {"prompt": "a", "extra_body": {"grammar": {"regex": "a"}}}, "grammar"),
        (api.completions.create, {"prompt": "a", "extra_body": {"response_format": strict}}, "response_format"),
        (api.responses.create, {"input": "a", "text": {"format": {"type": "json_object"}}}, "text"),
    ]
    for create, given, field in cases:
        with pytest.raises(openai.BadRequestError, match=r"a\{99999999\} is too large") as refused:
            list(create(model="fake", **given, stream=stream))
        assert (refused.value.param, refused.value.type) == (field, "invalid_request_error")


def test_a_text_that_fails_later_ends_with_the_field_too(http, broker):
    """The stream has begun, so that the error is an event."""

    def fail_late(message):
        if not isinstance(message, Submit):
            return answer(message)
        reason = "grammar: nothing is allowed after token 3"
        first = tokens(message.job_id, 0, CODEC.encode("A wörld of"))
        return [Accepted(job_id=message.job_id), first, Failed(job_id=message.job_id, code="invalid", reason=reason)]

    broker.reply = fail_late
    response = http.post("/v1/chat/completions", json=CHAT | {"guided_regex": "a", "stream": True})
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert response.status_code == 200
    assert json.loads(lines[-1])["error"] == {
        "message": "guided_regex: nothing is allowed after token 3",
        "type": "invalid_request_error",
        "param": "guided_regex",
        "code": "invalid",
    }
