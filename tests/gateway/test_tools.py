"""Tools and reasoning over HTTP: OpenAI's own client, unchanged, reads calls and thoughts, whole and as a stream."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import openai
import pytest
from tokenizers import Tokenizer

from specq.gateway.answer_form import _check_budget
from specq.gateway.parts import THINKS, PartsForm
from specq.protocol import FetchTokenizer, JobError, Submit
from specq.testing.fake_broker import INFO, FakeBroker, answer, tokens
from specq.testing.tokenizer import tokenizer_json
from specq.text import TextCodec, num_tokens, tokenizer_chunks, tokenizer_hash
from tests.each import each
from tests.gateway.serving import connected, openai_client, running

CHAT = [{"role": "user", "content": "Hi"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}]
FLAT = [{"type": "function", **TOOLS[0]["function"]}]
SPECIAL = ("<think>", "</think>", "[TOOL_CALLS]")
THOUGHT = "<think>\nIs it cold?\n</think>\n\n"
CALLS = "\n".join(
    f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>' for city in ("Oslo", "Rome")
)
TEXT = f"{THOUGHT}I look.\n{CALLS}"
MISTRAL = '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}]'
TEMPLATES = {
    "qwen": Path("tests/text/templates/qwen3.jinja").read_text(),
    "mistral": "{{ messages[0].content }}{{ tools | tojson }}[TOOL_CALLS]",
    "chatml": Path("tests/text/templates/chatml.jinja").read_text(),
    "opens": "{{ messages[0].content }}<think>\n",
}


@cache
def spelled():
    """Return a tokenizer that has the marks of reasoning and of Mistral's calls as special tokens."""
    tokenizer = Tokenizer.from_str(tokenizer_json())
    tokenizer.add_special_tokens(list(SPECIAL))
    return str(tokenizer.to_str())


@contextmanager
def model(template, text):
    """Run a gateway of a model that always writes this text, a few tokens at a time."""
    files = {"tokenizer.json": spelled()}
    files["tokenizer_config.json"] = json.dumps({"chat_template": TEMPLATES[template]})
    codec, count = TextCodec(files), num_tokens(spelled())
    info = replace(INFO, max_length=1 << 20, tokenizer_hash=tokenizer_hash(spelled()))
    info = replace(info, vocab_size=count, num_tokens=count)

    def reply(message):
        if isinstance(message, FetchTokenizer):
            return list(tokenizer_chunks(info, files))
        first, *rest = answer(message)
        if not isinstance(message, Submit):
            return [first, *rest]
        ids = codec.encode_part(text)[: message.params.max_tokens]
        end = "length" if len(ids) == message.params.max_tokens else "stop"
        cuts = range(0, len(ids), 4)
        said = [tokens(message.job_id, at, ids[at : at + 4], end if at + 4 >= len(ids) else "") for at in cuts]
        return [first, *said]

    with FakeBroker(reply) as broker, running(broker.address) as gateway:
        yield broker, gateway


@contextmanager
def speaking(template, text):
    with model(template, text) as (broker, gateway), openai_client(gateway) as api:
        yield broker, api


def added(chunks, index=0):
    """Return the message of one choice that a client makes of deltas, its first deltas of calls, and its end."""
    texts, calls, firsts, end = {}, {}, [], None
    for choice in (choice for chunk in chunks for choice in chunk.choices if choice.index == index):
        delta, end = choice.delta.model_dump(exclude_none=True), choice.finish_reason or end
        for name in ("content", "reasoning_content", "reasoning"):
            texts[name] = texts.get(name, "") + delta.get(name, "")
        for call in delta.get("tool_calls", []):
            firsts += [] if call["index"] in calls else [call]
            calls[call["index"]] = calls.get(call["index"], "") + call["function"]["arguments"]
    return texts, list(calls.values()), firsts, end


def grammar_of(broker):
    *_, job = (message for message in broker.heard if isinstance(message, Submit))
    return json.loads(job.params.grammar) if job.params.grammar else {}


def test_a_chat_with_calls(own_cache):
    with speaking("qwen", TEXT) as (broker, api):
        asked = {"model": "fake", "messages": CHAT, "tools": TOOLS}
        (choice,) = api.chat.completions.create(**asked).choices
        grammar = grammar_of(broker)
        chunks = list(api.chat.completions.create(**asked, n=2, stream=True))
        with api.chat.completions.stream(**asked) as stream:
            final = stream.get_final_completion().choices[0]
        parsed = final.message.tool_calls[0].function.parsed_arguments
        hidden = api.chat.completions.create(**asked, extra_body={"include_reasoning": False}).choices[0].message
        named = {"type": "function", "function": {"name": "weather"}}
        forced = api.chat.completions.create(**asked, tool_choice=named).choices[0]

    message, calls = choice.message, choice.message.tool_calls
    assert (message.content, message.reasoning_content, choice.finish_reason) == (
        "I look.",
        "Is it cold?",
        "tool_calls",
    )
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("weather", '{"city": "Oslo"}'),
        ("weather", '{"city": "Rome"}'),
    ]
    for index in range(2):
        texts, arguments, firsts, end = added(chunks, index)
        assert texts == {"content": "I look.", "reasoning_content": "Is it cold?", "reasoning": "Is it cold?"}
        assert (arguments, end) == (['{"city": "Oslo"}', '{"city": "Rome"}'], "tool_calls")
        assert [(first["type"], first["function"]["name"]) for first in firsts] == [("function", "weather")] * 2
    ids = {first["id"] for index in range(2) for first in added(chunks, index)[2]}
    assert len(ids | {call.id for call in calls}) == 6
    assert (parsed, final.finish_reason) == ({"city": "Oslo"}, "tool_calls")
    assert (hidden.content, hasattr(hidden, "reasoning_content")) == ("I look.", False)
    assert (len(forced.message.tool_calls), forced.finish_reason) == (2, "stop")  # as at OpenAI
    assert (grammar["after"], grammar["opens"], grammar.get("required")) == ("</think>", "<think>", None)
    assert grammar["structural_tag"]["triggers"] == ["<tool_call>"]


def test_a_stream_with_calls_goes_on_after_any_event(own_cache):
    """What came before a break and what comes after it make the calls of a whole stream."""
    body = {"messages": CHAT, "tools": TOOLS, "stream": True, "seed": 1}
    with model("qwen", TEXT) as (_, gateway), connected(gateway) as http:
        headers = {"Idempotency-Key": "1"}
        whole = http.post("/v1/chat/completions", json=body, headers=headers).text.split("\n\n")[:-2]
        for cut, event in enumerate(whole, 1):
            own = headers | {"Last-Event-ID": event.splitlines()[0].removeprefix("id: ")}
            rest = http.post("/v1/chat/completions", json=body, headers=own).text.split("\n\n")[:-2]
            assert deltas(whole[:cut] + rest) == deltas(whole)
    assert len(whole) > 10


def deltas(events):
    """Return the joined texts of a stream, with the ids of its calls."""
    found = {}
    for event in events:
        choice = json.loads(event.partition("data: ")[2])["choices"][0]
        for name, value in choice["delta"].items():
            for call in value if name == "tool_calls" else ():
                found["ids"] = found.get("ids", "") + call.get("id", "")
                found["arguments"] = found.get("arguments", "") + call["function"]["arguments"]
            found[name] = found.get(name, "") + value if isinstance(value, str) else "list"
    return found


def test_a_template_without_tools(own_cache):
    """The prompt explains them, and a required call begins at once; without tools the same text is content."""
    with speaking("chatml", CALLS) as (broker, api):
        asked = {"model": "fake", "messages": CHAT}
        choice = api.chat.completions.create(**asked, tools=TOOLS, tool_choice="required").choices[0]
        (job,) = broker.wait_for(Submit)
        prompt = TextCodec({"tokenizer.json": spelled()}).decode(job.prompt_ids.tolist(), skip_special=False)
        grammar = grammar_of(broker)
        none = api.chat.completions.create(**asked, tools=TOOLS, tool_choice="none").choices[0]
        free = grammar_of(broker)
        api.chat.completions.create(**asked, tools=TOOLS, response_format={"type": "json_object"})
        either = grammar_of(broker)

    assert json.dumps(TOOLS[0]) in prompt
    assert (len(choice.message.tool_calls), choice.message.content) == (2, None)
    assert (grammar["required"], grammar.get("after"), free) == (True, None, {})
    assert (either["required"], either["otherwise"]) == (True, {"type": "object"})
    assert (none.message.content, none.message.tool_calls, none.finish_reason) == (CALLS, None, "stop")


def test_special_tokens_of_a_form(own_cache):
    with speaking("mistral", MISTRAL) as (_, api):
        asked = {"model": "fake", "messages": CHAT, "tools": TOOLS}
        call = api.chat.completions.create(**asked).choices[0].message.tool_calls[0]
        _, arguments, firsts, end = added(api.chat.completions.create(**asked, stream=True))
        plain = api.chat.completions.create(model="fake", messages=CHAT).choices[0].message.content

    assert (call.function.arguments, len(call.id), call.id.isalnum()) == ('{"city": "Oslo"}', 9, True)
    assert (arguments, len(firsts), end) == (['{"city": "Oslo"}'], 1, "tool_calls")
    assert plain == MISTRAL.removeprefix("[TOOL_CALLS]")


@each("limit", [8, 31])
def test_a_call_that_is_cut(own_cache, limit):
    """The whole answer has its text, as in vLLM; a stream has told of it. Both end with `length`."""
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    with speaking("chatml", text) as (_, api):
        count = len(TextCodec({"tokenizer.json": spelled()}).encode_part(text)) - limit
        asked = {"model": "fake", "messages": CHAT, "tools": TOOLS, "max_tokens": count}
        choice = api.chat.completions.create(**asked).choices[0]
        texts, arguments, _, end = added(api.chat.completions.create(**asked, stream=True))

    is_complete = limit == 8
    assert (choice.finish_reason, end) == ("length", "length")
    assert bool(choice.message.tool_calls) == is_complete
    assert is_complete or text.startswith(choice.message.content)
    assert '{"city": "Oslo"}'.startswith("".join(arguments))
    assert (texts["content"] == "") == bool(arguments)


def test_reasoning_without_tools(own_cache):
    """The prompt opens it; a grammar of the request begins behind it."""
    with speaking("opens", "So, so.\n</think>\n\n{}") as (broker, api):
        asked = {"model": "fake", "messages": CHAT, "response_format": {"type": "json_object"}}
        message = api.chat.completions.create(**asked).choices[0].message
        texts, *_ = added(api.chat.completions.create(**asked, stream=True))
        grammar = grammar_of(broker)

    assert (message.content, message.reasoning_content, message.reasoning) == ("{}", "So, so.", "So, so.")
    assert texts == {"content": "{}", "reasoning_content": "So, so.", "reasoning": "So, so."}
    assert grammar == {"json_object": True, "after": "</think>"}


def test_a_budget_of_thinking_tokens(own_cache):
    """It limits what comes before the end of the reasoning, with and without a grammar, by each endpoint."""
    budget, schema = {"thinking_token_budget": 3}, {"response_format": {"type": "json_object"}}
    chat = {"model": "fake", "messages": CHAT}
    with speaking("opens", "So.\n</think>\n\n{}") as (broker, api):
        api.chat.completions.create(**chat, extra_body=budget)
        api.chat.completions.create(**chat, extra_body=budget | schema)
        api.chat.completions.create(**chat, tools=TOOLS, extra_body={"thinking_token_budget": 0})
        api.responses.create(model="fake", input="Hi", extra_body=budget)
        body = {"max_tokens": 9, "messages": CHAT, "thinking": {"type": "enabled", "budget_tokens": 3}}
        api.post("/messages", body=body, cast_to=object)
        free, formed, tools, response, message = (json.loads(one.params.grammar) for one in broker.wait_for(Submit, 5))
    with speaking("qwen", "So.") as (broker, api):
        api.chat.completions.create(**chat, extra_body=budget)
        may_think = grammar_of(broker)
        api.chat.completions.create(**chat, extra_body=budget | {"chat_template_kwargs": {"enable_thinking": False}})
        does_not = broker.wait_for(Submit, 2)[1].params.grammar

    ends = {"after": "</think>", "within": 3}
    assert free == response == message == {"any": True, **ends}
    assert formed == {"json_object": True, **ends}
    assert (tools["after"], tools["within"], "structural_tag" in tools) == ("</think>", 0, True)
    assert may_think == {"any": True, **ends, "opens": "<think>"}
    assert does_not == ""


def test_a_budget_that_cannot_be_kept_is_refused(own_cache):
    """Where the model does not think, or where the end of its thoughts is several tokens."""
    with speaking("chatml", "So.") as (_, api):
        with pytest.raises(openai.BadRequestError, match="has no <think>") as refused:
            api.chat.completions.create(model="fake", messages=CHAT, extra_body={"thinking_token_budget": 3})
        body = {"max_tokens": 9, "messages": CHAT, "thinking": {"type": "enabled", "budget_tokens": 3}}
        with pytest.raises(openai.BadRequestError, match="has no <think>, so its thinking"):
            api.post("/messages", body=body, cast_to=object)
        with pytest.raises(openai.BadRequestError, match="use /v1/chat/completions for it"):
            api.completions.create(model="fake", prompt="a", extra_body={"thinking_token_budget": 3})
        with pytest.raises(openai.BadRequestError, match="whole number, at least 0"):
            api.chat.completions.create(model="fake", messages=CHAT, extra_body={"thinking_token_budget": -1})
    assert refused.value.param == "thinking_token_budget"
    form = PartsForm(thinks=THINKS)
    with pytest.raises(JobError, match="the tokenizer of this model has no token </think>"):
        _check_budget("<think>", form, TextCodec({"tokenizer.json": tokenizer_json()}))
    _check_budget("<think>", form, TextCodec({"tokenizer.json": spelled()}))


def test_thinking_that_is_switched_off(own_cache):
    """The template closes it in the prompt, so that the text is content and a grammar begins at once."""
    with speaking("qwen", "<think>") as (broker, api):
        body = {"chat_template_kwargs": {"enable_thinking": False}, "guided_choice": ["a"]}
        message = api.chat.completions.create(model="fake", messages=CHAT, extra_body=body).choices[0].message

        assert (message.content, hasattr(message, "reasoning_content")) == ("", False)
        assert grammar_of(broker) == {"choice": ["a"]}


def test_responses_with_calls(own_cache):
    with speaking("qwen", TEXT) as (_, api):
        asked = {"model": "fake", "input": "Hi", "tools": FLAT}
        whole = api.responses.create(**asked)
        events = list(api.responses.create(**asked, stream=True))
        with api.responses.stream(**asked) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
        again = [{"role": "user", "content": "Hi"}, *(item.model_dump() for item in whole.output)]
        again.append({"type": "function_call_output", "call_id": whole.output[2].call_id, "output": "cold"})
        api.responses.create(model="fake", input=again)

    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert [item.type for item in final.output] == [item.type for item in whole.output]
    assert whole.output[0].content[0].text == final.output[0].content[0].text == "Is it cold?"
    assert whole.output_text == final.output_text == "I look."
    assert [item.arguments for item in final.output[2:]] == ['{"city": "Oslo"}', '{"city": "Rome"}']
    assert len({item.id for item in final.output}) == len({item.call_id for item in final.output[2:]}) + 2 == 4
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    assert [event.sequence_number for event in events] == list(range(len(events)))
    given = "".join(
        e.delta for e in events if e.type == "response.function_call_arguments.delta" and e.output_index == 2
    )
    done = [event.arguments for event in events if event.type == "response.function_call_arguments.done"]
    assert (given, done[0], len(done)) == (done[0], '{"city": "Oslo"}', 2)
    for name in ("reasoning_text", "output_text", "function_call_arguments"):
        assert {f"response.{name}.delta", f"response.{name}.done"} <= set(kinds)
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 4
